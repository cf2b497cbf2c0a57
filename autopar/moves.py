"""What a program moves between devices, told beforehand.

In: an emitted `Program`.  Out: tensors and bytes by (kind of collective, mesh axis, phase).  Next: `verify/count.py`,
which counts the same on running ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import fx

from autopar.layout import Mesh, Step
from autopar.program import Program

Key = tuple[str, str, str]  # kind, mesh axis, phase


def moves(program: Program) -> dict[Key, tuple[int, int]]:
    """Tensors and bytes of one step. The copies of parameters at ZeRO 1 and 2 are gathered before forward."""
    tensors: Counter[Key] = Counter()
    sizes: Counter[Key] = Counter()
    parts = (("forward", program.refresh), ("forward", program.forward), ("backward", program.backward))
    for phase, graph in parts:
        for node, step in collectives(graph):
            key = step.kind, step.axis, phase
            tensors[key] += 1
            sizes[key] += elements(step, program.plan.mesh) * itemsize(node)
    return {key: (tensors[key], sizes[key]) for key in sorted(tensors)}


def collectives(graph: fx.Graph) -> Iterator[tuple[fx.Node, Step]]:
    """Every node that moves something."""
    for node in graph.nodes:
        step = node.meta.get("step")
        if step is not None and not step.free:
            yield node, step


def elements(step: Step, mesh: Mesh) -> int:
    """Elements at the larger end of a collective; pieces are padded to the largest."""
    before, after, n = step.before.local_numel(mesh), step.after.local_numel(mesh), mesh.size(step.axis)
    if step.kind == "all_gather":
        return n * before
    if step.kind == "reduce_scatter":
        return n * after
    place = step.after.where(step.axis)
    if step.kind == "all_to_all" and isinstance(place, tuple):
        return n * step.before.with_cut(place, (*step.before.cut_at(place), step.axis)).local_numel(mesh)
    return before


def itemsize(node: fx.Node) -> int:
    """Bytes of one element of what a node computes."""
    value = node.meta["val"]
    first: torch.Tensor = value[0] if isinstance(value, (tuple, list)) else value
    return first.dtype.itemsize
