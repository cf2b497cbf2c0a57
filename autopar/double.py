"""Every float32 replaced by float64, so that comparisons see no rounding.

In: a model.  Out: `double_`, its parameters and buffers in float64; `Double`, a dispatch mode under which it
computes in float64 even where it asks for float32, eagerly and while it is traced.  Next: `capture.py`.
This file needs no part of the compiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autopar._torch import DispatchMode

NARROW, WIDE = torch.float32, torch.float64


def widened(value: Any) -> Any:
    """float64 where there was float32: dtypes and tensors, in any nest of tuples, lists and dicts."""
    if value is NARROW:
        return WIDE
    if isinstance(value, Tensor):
        return value.to(WIDE) if value.dtype == NARROW else value
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(widened(item) for item in value)
    if isinstance(value, dict):
        return {key: widened(item) for key, item in value.items()}
    return value


class Double(DispatchMode):  # type: ignore[no-untyped-call]
    """Inside, eager code that asks for float32 gets float64."""

    def __enter__(self) -> Double:
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(WIDE)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return widened(func(*widened(args), **widened(kwargs or {})))


def double_(model: nn.Module) -> nn.Module:
    """The model with every float32 parameter and buffer in float64, ties kept (of buffers too)."""
    wide: dict[int, Tensor] = {}
    for parameter in model.parameters():
        if parameter.dtype == NARROW:
            parameter.data = parameter.data.to(WIDE)
    for module in model.modules():
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.dtype == NARROW:
                setattr(module, key, wide.setdefault(id(buffer), buffer.to(WIDE)))
    return model
