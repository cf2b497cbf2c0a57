"""Checkpoints: entries brought into the layout of the parameter they are for, and whole tensors for files.

In: a state dict.  Out: one that `load_state_dict` copies from, or plain tensors.  Next: `module.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def in_layouts(
    own: Mapping[str, Any], given: Mapping[str, Any], cut: Callable[[str, Tensor], Tensor]
) -> dict[str, Any]:
    """The given entries, those for DTensors as DTensors of the same placements.

    cut   (name, whole tensor) -> this rank's piece
    """
    out: dict[str, Any] = dict(given)
    for name, value in given.items():
        target = own.get(name)
        if not isinstance(target, DTensor) or not isinstance(value, Tensor) or target.shape != value.shape:
            continue
        if isinstance(value, DTensor):
            if value.device_mesh == target.device_mesh and value.placements == target.placements:
                continue
            value = full(value)
        with torch.no_grad():
            local = cut(name, value.detach().to(device=target.device, dtype=target.dtype)).contiguous()
            out[name] = DTensor.from_local(
                local,
                target.device_mesh,
                target.placements,
                run_check=False,
                shape=target.shape,
                stride=target.stride(),
            )
    return out


def full(value: Any) -> Any:
    """The whole plain tensor behind an entry."""
    if isinstance(value, DTensor):
        with torch.no_grad():
            return value.full_tensor().detach()
    return value.detach().clone() if isinstance(value, Tensor) else value
