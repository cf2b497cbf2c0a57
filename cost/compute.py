"""Seconds of one op on one device, from its work and the bytes it touches.

In: a node with its rule, a choice, a cluster.  Out: `Work`, and its seconds.  Next: `memory.py`.

An op takes the longer of computing and moving its bytes (the roofline; Williams, Waterman & Patterson 2009), after its
launch. Products of matrices come near the peak as their sizes allow (`Products`); of other kinds a calibrated device
knows curves.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.attention import MASK_AT
from autopar.cluster import ClusterSpec
from autopar.device import ANY, Device
from autopar.layout import Layout, Mesh, chunk
from autopar.rules.core import Dims, Instance

aten = torch.ops.aten

RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default}
RESHAPES |= {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
STRIDED = {aten.permute.default, aten.transpose.int, aten.t.default, aten.expand.default, aten.slice.Tensor}
STRIDED |= {aten.select.int, aten.alias.default, aten.detach.default}

PICKS = {"embedding": 0, "index_select": 0, "gather": 0, "index": 0}
"""Ops that read of one operand only what they pick."""

PIECES = {"attention": "q k e", "attention_backward": "q k e", "convolution": "", "convolution_backward": ""}
"""Ops of which a calibrated device knows seconds over flops: letters of the flops of one piece (none: all of it)."""

WRITTEN_OUT = " written out"
"""Ends the kind of an attention that no fused kernel takes: with dropout or a mask."""


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


@dataclass(frozen=True)
class Work:
    """What an op does on one device.

    kind     name of the op, "gelu"
    dtype    that it computes in, "float32"
    bytes    of its operands and results
    flops    floating-point operations
    pieces   of what is known by its flops: equal parts that run one after another, as of attention every head of
             every example; 0 for everything else
    product  where it is a product of matrices, sizes (b, m, n, k): b products [m, k] x [k, n]
    """

    kind: str
    dtype: str
    bytes: int
    flops: float = 0.0
    pieces: int = 0
    product: tuple[int, int, int, int] | None = None


def work_s(work: Work, device: Device) -> float:
    """Seconds of an op on a device that works alone, or with as many others as do not slow it."""
    known = device.kernels.get(work.kind, {}).get(work.dtype)
    if known is not None and work.pieces:
        return work.pieces * known.at(max(1.0, work.flops / work.pieces))
    known = known or device.kernels.get(ANY, {}).get(work.dtype)
    if known is not None and not work.flops:
        return known.at(max(1, work.bytes))
    peak = device.peak(work.dtype) * device.fractions.get(work.kind, 1.0)
    if work.product is not None and work.dtype in device.products:
        peak *= device.products[work.dtype].fraction(*work.product)
    moving = work.bytes / (device.memory_bytes_per_s * device.memory_fraction)
    return device.launch_s + max(work.flops / peak, moving)


# --- what an op does under a choice -----------------------------------------------------------------------------------


def node_s(
    node: fx.Node,
    instance: Instance,
    roles: tuple[str, ...],
    tensors: Iterable[tuple[Layout, torch.dtype]],
    mesh: Mesh,
    cluster: ClusterSpec,
) -> float:
    """Seconds of a node under a choice; `tensors`: layout and dtype of every operand and result."""
    if is_bias(node):
        return 0.0
    if not owns(node):
        return cluster.crowding * cluster.device.view_s
    return cluster.crowding * work_s(work_of(node, instance, roles, list(tensors), mesh), cluster.device)


def is_bias(node: fx.Node) -> bool:
    """Whether an op adds a vector to a product that nobody else reads: one kernel does both (`passes/fuse_bias.py`)."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2:
        return False
    product, vector = node.all_input_nodes
    return product.target is aten.mm.default and len(product.users) == 1 and vector.meta["val"].dim() == 1


def update_s(stored: Layout, dtype: torch.dtype, copies: float, mesh: Mesh, cluster: ClusterSpec) -> float:
    """Seconds in which an optimizer with so many copies of a parameter in its state updates a device's part of it.

    It reads the parameter, its gradient and the state, and writes the parameter and the state.
    """
    touched = (3 + 2 * copies) * stored.local_numel(mesh) * dtype.itemsize
    return cluster.crowding * work_s(Work("optimizer", dtype_name(dtype), int(touched)), cluster.device)


def work_of(
    node: fx.Node, instance: Instance, roles: tuple[str, ...], tensors: list[tuple[Layout, torch.dtype]], mesh: Mesh
) -> Work:
    """What a node does on the device that has the largest pieces."""
    kind = kind_of(node)
    skipped = PICKS.get(kind)
    touched = sum(
        layout.local_numel(mesh) * dtype.itemsize for i, (layout, dtype) in enumerate(tensors) if i != skipped
    )
    floats = [dtype for _, dtype in tensors if dtype.is_floating_point]
    dtype = dtype_name(floats[-1]) if floats else "float32"
    if instance.flops is None:
        return Work(kind, dtype, touched)
    number, letters = instance.flops
    sizes = {x: letter_size(x, instance.sizes[x], roles, mesh) for x in letters}
    flops = number * math.prod(sizes.values())
    piece = PIECES.get(kind.removesuffix(WRITTEN_OUT))
    outside = (n for x, n in sizes.items() if piece and x.partition("~")[0] not in piece.split())
    pieces = 0 if piece is None else math.prod(outside)
    return Work(kind, dtype, touched, flops, pieces, product(instance, sizes))


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def kind_of(node: fx.Node) -> str:
    """ "gelu" for aten.gelu.default."""
    kind = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    if "approximate" in node.kwargs:
        return f"{kind} {node.kwargs['approximate']}"
    if node.target not in MASK_AT:
        return kind
    mask = MASK_AT[node.target]
    masked, dropout_p = node.args[mask] is not None, node.args[mask + 3]
    return kind + WRITTEN_OUT if masked or dropout_p else kind


def letter_size(letter: str, size: int, roles: tuple[str, ...], mesh: Mesh) -> int:
    """A device's size of a letter (the largest piece) under the roles of a choice."""
    for axis_size, role in zip(mesh.sizes, roles, strict=True):
        if role == letter:
            _, size = chunk(size, axis_size, 0)
    return size


def product(instance: Instance, sizes: Mapping[str, int]) -> tuple[int, int, int, int] | None:
    """Sizes (b, m, n, k) of a contraction, or None where its letters do not tell.

    They are products of the letters in both operands and the result, of the others of the result that are not the
    second operand's, of those that are, and of those that the result lacks.
    """
    if len(instance.inputs) < 2 or len(instance.outputs) != 1:
        return None
    first, second, result = (letters_of(dims) for dims in (*instance.inputs[:2], instance.outputs[0]))
    if not sizes.keys() <= first | second | result:  # channels that other ops see as other factors
        return None
    groups = (first & second & result, result - second, (second - first) & result, sizes.keys() - result)
    b, m, n, k = (math.prod(sizes[x] for x in group & sizes.keys()) for group in groups)
    return b, m, n, k


def letters_of(dims: Dims) -> frozenset[str]:
    return frozenset(letter for dim in dims for letter in dim)
