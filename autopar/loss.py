"""Call the user's loss function on what the model returned.

In: `loss_fn`, a function or a module, the model's output and the arguments of its call.  Out: the loss, or one
`CaptureError` that tells how `loss_fn` was called.  Next: `capture.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from autopar import _torch
from autopar.errors import AutoparError, CaptureError
from autopar.tracing import user_line

Loss = Callable[..., Any]
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def call_loss(loss_fn: Loss, out: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """`loss_fn(output)`, or `loss_fn(output, *args, **kwargs)` with the call's own arguments where it takes more."""
    if not takes_more_than_one(loss_fn):
        args, kwargs = (), {}
    try:
        loss = loss_fn(out, *args, **kwargs)
    except (AutoparError, *_torch.DataDependent):
        raise
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        raise CaptureError(failed(loss_fn, out, args, kwargs, error)) from error
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise CaptureError(f"loss_fn must return a scalar floating-point tensor, not {what}")
    return loss


def signature(loss_fn: Loss) -> inspect.Signature | None:
    """What it takes: a module what its `forward` takes; None for a builtin that does not tell."""
    try:
        return inspect.signature(loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn)
    except (TypeError, ValueError):
        return None


def takes_more_than_one(loss_fn: Loss) -> bool:
    """It needs more than one argument, or takes any number."""
    found = signature(loss_fn)
    if found is None:
        return False
    kinds = [p.kind for p in found.parameters.values() if p.default is inspect.Parameter.empty]
    required = [kind for kind in kinds if kind not in VARIADIC]
    return len(required) > 1 or inspect.Parameter.VAR_POSITIONAL in kinds


def failed(loss_fn: Loss, out: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception) -> str:
    """What was called with what, why it failed, and what to write instead."""
    given = [f"output {told(out)}"]
    given += [f"args[{i}] {told(x)}" for i, x in enumerate(args)] + [f"{k}={told(x)}" for k, x in kwargs.items()]
    name = getattr(loss_fn, "__qualname__", type(loss_fn).__qualname__)
    found = signature(loss_fn)
    takes = "" if found is None else f"({', '.join(found.parameters)})"
    line = user_line(error.__traceback__)
    return (
        f"loss_fn {name}{takes} failed on ({', '.join(given)}): {str(error).partition(chr(10))[0]}\n"
        + (f"  from {line}\n" if line else "")
        + "  try: a function of the output and every argument of the model's call, like "
        "loss_fn=lambda out, x, y: F.cross_entropy(out, y); where the model does not take the labels, a module of "
        "yours around it that does"
    )


def told(value: Any) -> str:
    """A tensor by dtype and shape, anything else by its type."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
