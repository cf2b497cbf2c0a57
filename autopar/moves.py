"""What a program moves between devices, told beforehand.

In: an emitted `Program`.  Out: tensors and bytes by (kind of collective, mesh axis, phase).  Next: `verify/count.py`,
which counts the same on running ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from autopar.layout import MICRO, Mesh, Step
from autopar.passes.buckets import buckets
from autopar.program import Program

Key = tuple[str, str, str]  # kind, mesh axis, phase


@dataclass(frozen=True)
class Moved:
    """What goes by one kind of collective, along one mesh axis, in one phase.

    tensors   how many
    bytes     at the larger end, pieces padded to the largest
    calls     collectives that carry them: fewer than tensors where some share a bucket
    about     some carry rows of experts, whose number depends on what the tokens choose; `bytes` if all get as many
    """

    tensors: int = 0
    bytes: int = 0
    calls: int = 0
    about: bool = False

    def plus(self, tensors: int, size: int, calls: int, about: bool = False) -> Moved:
        return Moved(self.tensors + tensors, self.bytes + size, self.calls + calls, self.about or about)


def moves(program: Program, stage: int = 0) -> dict[Key, Moved]:
    """Everything that one step moves by collectives; in a pipeline, on the ranks of one stage.

    The copies of parameters at ZeRO 1 and 2 are gathered before forward.
    """
    out: dict[Key, Moved] = {}
    mesh = program.plan.mesh
    for phase, graph, times in parts(program, stage):
        for node, step in collectives(graph):
            key = step.kind, step.axis, phase
            size, about = elements(step, mesh) * itemsize(node), step.before.rows is not None
            out[key] = out.get(key, Moved()).plus(times, times * size, times, about)
        for bucket in buckets(graph, program.plan):
            step = bucket.nodes[0].meta["step"]
            key = step.kind, step.axis, phase
            out[key] = out[key].plus(0, 0, times * (1 - len(bucket.nodes)))
    return dict(sorted(out.items()))


def parts(program: Program, stage: int) -> Iterator[tuple[str, fx.Graph, int]]:
    """What runs: when, and how often. A pipeline runs its backward before forward returns."""
    yield "forward", program.refresh, 1
    if program.pipeline is None:
        yield "forward", program.forward, 1
        yield "backward", program.backward, 1
        return
    for phase in (program.pipeline.forward, program.pipeline.backward):
        yield "forward", phase.bodies[stage].graph, program.plan.mesh.size(MICRO)
        yield "forward", phase.ends[stage].graph, 1


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
