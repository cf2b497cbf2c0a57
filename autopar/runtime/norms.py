"""The joint norm of gradients that are spread in different ways, and clipping by it.

In: parameters whose gradients are DTensors of one mesh, or plain tensors.  Out: a plain number.  Next: `module.py`.

`torch.nn.utils.clip_grad_norm_` gives the same; this one sends a single vector per kind of placement set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar._torch import local_of


def clip(parameters: Sequence[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> float:
    """Scale the gradients in place; the norm they had."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = norm(gradients, norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(f"the total norm of order {norm_type} of the gradients is {total}, so it cannot be clipped")
    scale = min(1.0, max_norm / (total + 1e-6))
    with torch.no_grad():
        for gradient in gradients:
            (local_of(gradient) if isinstance(gradient, DTensor) else gradient).mul_(scale)
    return total


def norm(tensors: Sequence[Tensor], norm_type: float) -> float:
    """Norm of all elements of all tensors taken as one vector."""
    if not tensors:
        return 0.0
    maximum = math.isinf(norm_type)
    parts: dict[tuple[str, ...], Tensor] = {}
    mesh = next((t.device_mesh for t in tensors if isinstance(t, DTensor)), None)
    for tensor in tensors:
        axes: tuple[str, ...] = ()
        local = tensor
        if isinstance(tensor, DTensor):
            assert mesh is not None and mesh.mesh_dim_names is not None
            pairs = zip(mesh.mesh_dim_names, tensor.placements, strict=True)
            axes = tuple(name for name, placement in pairs if not placement.is_replicate())
            local = local_of(tensor)
        part = _local(local.detach(), norm_type)
        seen = parts.get(axes)
        parts[axes] = part if seen is None else torch.maximum(seen, part) if maximum else seen + part
    total = torch.zeros((), dtype=next(iter(parts.values())).dtype, device=next(iter(parts.values())).device)
    for axes, part in sorted(parts.items()):
        for axis in axes:
            assert mesh is not None
            dist.all_reduce(part, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=mesh.get_group(axis))
        total = torch.maximum(total, part) if maximum else total + part
    return float(total if maximum else total ** (1.0 / norm_type))


def _local(tensor: Tensor, norm_type: float) -> Tensor:
    """This rank's term: the largest magnitude, or the sum of powers."""
    wide = torch.float64 if tensor.device.type == "cpu" else torch.float32
    if tensor.numel() == 0:
        return torch.zeros((), dtype=wide, device=tensor.device)
    if math.isinf(norm_type):
        return tensor.abs().max().to(wide)
    norm: Tensor = torch.linalg.vector_norm(tensor, norm_type, dtype=wide if not tensor.is_complex() else None)
    return norm**norm_type
