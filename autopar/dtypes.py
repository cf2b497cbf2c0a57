"""Ops that take tensors of one dtype only: tracing, which computes nothing, lets others pass.

In: a captured graph.  Out: the same, or a `CaptureError` with the user's line.  Next: `capture.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, ops

import autopar.attention  # noqa: F401 - registers its op
from autopar.errors import CaptureError
from autopar.graph import Graph

aten = ops.aten

ALIKE: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.baddbmm.default: (0, 1, 2),
    aten.convolution.default: (0, 1, 2),
    aten.scatter.src: (0, 3),
    aten.scatter_add.default: (0, 3),
    aten.index_put.default: (0, 2),
    aten.index_add.default: (0, 3),
    ops.autopar.attention.default: (0, 1, 2),
}
"""Op -> its arguments that must be alike."""


def check_dtypes(graph: Graph) -> Graph:
    """Refuse what torch would refuse while it computes."""
    for node in graph.fx.nodes:
        places = ALIKE.get(node.target, ())
        operands = [node.args[i] for i in places if i < len(node.args) and isinstance(node.args[i], fx.Node)]
        if len({operand.meta["val"].dtype for operand in operands}) > 1:
            raise CaptureError(
                f"{node.target} takes tensors of one dtype and gets {', '.join(map(told, operands))}"
                + (f"\n  from {node.meta['source']}" if node.meta.get("source") else "")
                + "\n  try: cast one, x.to(y.dtype); under precision= buffers and constants keep their dtype, and what "
                "is computed from them has the wider one"
            )
    return graph


def told(node: fx.Node) -> str:
    val: torch.Tensor = node.meta["val"]
    return f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}"
