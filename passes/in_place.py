"""Ops whose results may lie where they are wanted.

In: a node of a program.  Out: whether its memory is its own, and the op that writes elsewhere.  Next: `buckets.py`.
"""

from __future__ import annotations

from typing import Any

from torch import fx, ops

aten = ops.aten

WRITES: dict[Any, Any] = {
    aten.mm.default: aten.mm.out,
    aten.bmm.default: aten.bmm.out,
    aten.sum.dim_IntList: aten.sum.IntList_out,
    aten.add.Tensor: aten.add.out,
}
"""Op -> the same into given memory, with kernels that need no memory beside."""

FRESH = {*WRITES, aten.embedding_dense_backward.default, aten._to_copy.default}
"""Ops of which sums are made that never give back the memory of an operand."""


def alone(node: fx.Node) -> bool:
    """Whether one op alone reads what a node computes, in memory that is no other's."""
    return node.target in FRESH and len(node.users) == 1
