"""The parameters and buffers of a module, every tensor once, and other tensors put in their place for a while.

In: a module.  Out: `Named` tensors with all their names; `swapped`.  Next: `capture.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar import _torch


@dataclass(frozen=True)
class Named:
    """One tensor of a module: every name it goes by, and where it hangs (a registry of a submodule, a key in it)."""

    tensor: Tensor
    names: tuple[str, ...]
    slots: tuple[tuple[Any, Any], ...]


def named_tensors(model: nn.Module) -> tuple[tuple[Named, ...], tuple[Named, ...]]:
    """Parameters and buffers, tied ones once, in the order of `named_parameters` and `named_buffers`."""
    groups: list[tuple[Named, ...]] = []
    for kind in ("_parameters", "_buffers"):
        found: dict[int, Named] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            for key, tensor in module.__dict__[kind].items():
                if tensor is None:
                    continue
                name = f"{path}.{key}" if path else key
                slot = (module.__dict__[kind], key)
                old = found.get(id(tensor), Named(tensor, (), ()))
                slots = old.slots if any(d is slot[0] and k == key for d, k in old.slots) else (*old.slots, slot)
                found[id(tensor)] = Named(tensor, (*old.names, name), slots)
            for index, tensor in enumerate(_torch.flat_weights(module)):
                if id(tensor) in found:
                    old = found[id(tensor)]
                    found[id(tensor)] = Named(tensor, old.names, (*old.slots, (_torch.flat_weights(module), index)))
        groups.append(tuple(found.values()))
    return groups[0], groups[1]


@contextmanager
def swapped(named: Sequence[Named], values: Sequence[Tensor]) -> Iterator[None]:
    """Inside, each tensor is replaced under all its names; afterwards the old ones are back whatever happened."""
    saved = [(slot, key, slot[key]) for item in named for slot, key in item.slots]
    try:
        for item, value in zip(named, values, strict=True):
            for slot, key in item.slots:
                slot[key] = value
        yield
    finally:
        for slot, key, old in saved:
            slot[key] = old
