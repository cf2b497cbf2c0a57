"""Modules that run whole, as plain Python, at every step: `autopar.opaque(module)`.

In: a module whose forward decides by values.  Out: the same module; inside a captured graph it is one node
`autopar::opaque`, and its backward one node `autopar::opaque_backward`, which runs the forward again.
Next: `capture.py`.

The node takes the module's tensor arguments, parameters and buffers, all whole, and must give results of the same
shapes and dtypes whatever it decides (checked when it runs). Random functions and buffer updates inside are refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar import _torch, tree
from autopar.errors import CaptureError, UnsupportedError
from autopar.swap import named_tensors, swapped
from autopar.tracing import ACTIVE

TENSOR = "<tensor>"  # stands for a tensor among leaves
Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True)
class Call:
    """One call of an opaque module: how to run it on flat tensors, and what comes out.

    leaves    of (args, kwargs), TENSOR where a tensor goes; the operands are those, then the tensors called `names`
    results   shape and dtype of every tensor leaf of the result, known after a first run
    """

    module: weakref.ReferenceType[nn.Module]
    in_tree: tree.Tree
    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    out_tree: tree.Tree = tree.LEAF
    out_leaves: tuple[Any, ...] = ()
    results: Shapes = ()

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """The module's own forward on the given tensors."""
        module = self.module()
        if module is None:
            raise CaptureError("an opaque module no longer exists; keep a reference to the model")
        parameters, buffers = named_tensors(module)
        at = {item.names[0]: item for item in (*parameters, *buffers)}
        count = len(tensors) - len(self.names)
        fill = iter(tensors[:count])
        args, kwargs = tree.unflatten(self.in_tree, [next(fill) if leaf is TENSOR else leaf for leaf in self.leaves])
        with swapped([at[name] for name in self.names], tensors[count:]):
            return type(module).forward(module, *args, **kwargs)

    def run_flat(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensor leaves of the result, which must be shaped as when captured."""
        results = [x for x in tree.flatten(self.run(tensors))[0] if isinstance(x, Tensor)]
        shapes = tuple((tuple(x.shape), x.dtype) for x in results)
        if [s for s, _ in shapes] != [s for s, _ in self.results]:
            raise CaptureError(f"an opaque module returned {shapes}; when captured it returned {self.results}")
        return results


REGISTRY: dict[str, Call] = {}


class Opaque:
    """The forward of an opaque module: its own outside of capture, one node inside."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if ACTIVE.get() is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return node(self.module, args, kwargs)


def opaque(module: nn.Module) -> nn.Module:
    """Mark a module to run whole on every device, whatever its values decide; returns the same module.

    Its parameters keep their names. Outside of autopar it behaves as before.
    """
    if not isinstance(module, nn.Module):
        raise CaptureError(f"autopar.opaque takes a torch.nn.Module, not a {type(module).__name__}")
    module.forward = Opaque(module)
    return module


def node(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the module as one node of the graph that is being traced."""
    leaves, in_tree = tree.flatten((tuple(args), dict(kwargs)))
    parameters, buffers = named_tensors(module)
    named = (*parameters, *buffers)
    operands = [*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *(item.tensor for item in named)]
    marked = tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    call = probed(Call(weakref.ref(module), in_tree, marked, tuple(item.names[0] for item in named)), operands)
    made = Function.apply(  # type: ignore[no-untyped-call]
        key_of(call), *operands
    )
    results = iter(made if isinstance(made, tuple) else (made,))
    return tree.unflatten(call.out_tree, [next(results) if leaf is TENSOR else leaf for leaf in call.out_leaves])


def probed(call: Call, operands: Sequence[Tensor]) -> Call:
    """The call with the shapes that come out, from one run on zeros."""
    name = type(call.module()).__name__
    with _torch.without_modes(), torch.no_grad(), untraced():
        before = torch.get_rng_state()
        zeros = [torch.zeros(tuple(t.shape), dtype=t.dtype) for t in operands]
        versions = [t._version for t in zeros]
        out = call.run(zeros)
        drew = not torch.equal(before, torch.get_rng_state())
        torch.set_rng_state(before)
        changed = versions != [t._version for t in zeros]
    if drew or changed:
        what = "draws random numbers" if drew else "changes its inputs or buffers in place"
        raise UnsupportedError(
            f"{name} is marked opaque and {what}, which an opaque module may not\n  try: do it outside of the module"
        )
    leaves, out_tree = tree.flatten(out)
    results = tuple((tuple(x.shape), x.dtype) for x in leaves if isinstance(x, Tensor))
    kinds = tuple(TENSOR if isinstance(x, Tensor) else x for x in leaves)
    return replace(call, out_tree=out_tree, out_leaves=kinds, results=results)


@contextmanager
def untraced() -> Iterator[None]:
    """Inside, opaque modules are plain modules."""
    token = ACTIVE.set(None)
    try:
        yield
    finally:
        ACTIVE.reset(token)


def key_of(call: Call) -> str:
    """The call's name in the registry; an equal call keeps its name."""
    number = 0
    while True:
        key = f"{type(call.module()).__name__}#{number}"
        old = REGISTRY.setdefault(key, call)
        if old.module() is None or old == call:
            REGISTRY[key] = call
            return key
        number += 1


class Function(torch.autograd.Function):
    """Ties the two ops together while tracing."""

    @staticmethod
    def forward(ctx: Any, key: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.key = key
        ctx.save_for_backward(*tensors)
        results = tuple(torch.ops.autopar.opaque(key, tensors))
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        floating = [
            g for g, (_, dtype) in zip(grads, REGISTRY[ctx.key].results, strict=True) if dtype.is_floating_point
        ]
        needs = list(ctx.needs_input_grad[1:])
        found = iter(torch.ops.autopar.opaque_backward(ctx.key, ctx.saved_tensors, floating, needs))
        return (None, *(next(found) if need else None for need in needs))


def _forward(key: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [x.clone() for x in REGISTRY[key].run_flat(tensors)]


def _backward(key: str, tensors: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    with torch.enable_grad():
        operands = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        results = [x for x in REGISTRY[key].run_flat(operands) if x.is_floating_point()]
    wanted = [t for t, need in zip(operands, needs, strict=True) if need]
    pairs = [(x, g) for x, g in zip(results, grads, strict=True) if x.requires_grad]
    if not pairs:
        return [torch.zeros_like(t) for t in wanted]
    found = torch.autograd.grad([x for x, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    return [torch.zeros_like(t) if g is None else g.clone() for t, g in zip(wanted, found, strict=True)]


def _fake_forward(key: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    wide = any(t.dtype == torch.float64 for t in tensors)
    made = REGISTRY[key].results
    return [torch.empty(s, dtype=torch.float64 if wide and d == torch.float32 else d, device="cpu") for s, d in made]


def _fake_backward(key: str, tensors: Sequence[Tensor], grads: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    return [torch.empty_like(t) for t, need in zip(tensors, needs, strict=True) if need]


torch.library.define("autopar::opaque", "(str key, Tensor[] tensors) -> Tensor[]")
torch.library.define(
    "autopar::opaque_backward", "(str key, Tensor[] tensors, Tensor[] grads, bool[] needs) -> Tensor[]"
)
for _name, _kernel, _fake in (
    ("autopar::opaque", _forward, _fake_forward),
    ("autopar::opaque_backward", _backward, _fake_backward),
):
    torch.library.impl(_name, "CompositeExplicitAutograd", _kernel)
    torch.library.impl(_name, "Autograd", torch.library.fallthrough_kernel)  # the kernels use autograd themselves
    torch.library.register_fake(_name, _fake)
