"""Seconds of one op on one device, from its work and the bytes it touches.

In: a node with its rule, a choice, a cluster.  Out: seconds.  Next: `memory.py`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from autopar.cluster import ClusterSpec
from autopar.layout import Layout, Mesh, chunk

aten = torch.ops.aten

RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default}
RESHAPES |= {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
STRIDED = {aten.permute.default, aten.transpose.int, aten.t.default, aten.expand.default, aten.slice.Tensor}
STRIDED |= {aten.select.int, aten.alias.default, aten.detach.default}


def owns(node: fx.Node) -> bool:
    """Whether the result of an op has memory of its own; a reshape of a tensor in another order has, as it copies."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if node.target in RESHAPES:
        return not in_order(node.args[0])
    return node.target not in STRIDED


def in_order(node: Any) -> bool:
    """Whether the elements of a result lie in memory in the order of its dims."""
    while node.op == "call_function" and node.target in RESHAPES and not owns(node):
        node = node.args[0]
    return node.target not in STRIDED


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def letter_size(letter: str, size: int, roles: tuple[str, ...], mesh: Mesh) -> int:
    """A device's size of a letter (the largest piece) under the roles of a choice."""
    for axis_size, role in zip(mesh.sizes, roles, strict=True):
        if role == letter:
            _, size = chunk(size, axis_size, 0)
    return size


def local_flops(
    flops: tuple[float, tuple[str, ...]] | None, sizes: Mapping[str, int], roles: tuple[str, ...], mesh: Mesh
) -> float:
    """Floating-point operations on one device."""
    if flops is None:
        return 0.0
    number, letters = flops
    return number * math.prod(letter_size(x, sizes[x], roles, mesh) for x in letters)


def op_s(flops: float, touched_bytes: float, dtype: str, cluster: ClusterSpec) -> float:
    """The slower of computing and moving, after the launch."""
    device = cluster.device
    return device.launch_s + max(flops / device.peak(dtype), touched_bytes / device.memory_bytes_per_s)


def node_s(
    node: fx.Node,
    instance: Any,
    roles: tuple[str, ...],
    tensors: Iterable[tuple[Layout, torch.dtype]],
    mesh: Mesh,
    cluster: ClusterSpec,
) -> float:
    """Seconds of a node under a choice; `tensors`: layout and dtype of every operand and result. A view is free."""
    if not owns(node):
        return 0.0
    listed = list(tensors)
    touched = sum(layout.local_numel(mesh) * dtype.itemsize for layout, dtype in listed)
    kinds = [dtype for _, dtype in listed if dtype.is_floating_point]
    flops = local_flops(getattr(instance, "flops", None), getattr(instance, "sizes", {}), roles, mesh)
    return op_s(flops, touched, dtype_name(kinds[-1]) if kinds else "float32", cluster)
