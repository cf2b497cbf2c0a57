"""When every tensor of a step is made and when it goes.

In: an emitted `Program`.  Out: `Lives`: the life of every storage on the first device, point by point.
Next: `memory.py`, which adds them up.

A value lives from the node that makes it to the last node that reads it or a view of it; forward's results and
gradients live to the end of the step. A collective takes several points, one for each buffer on its way. Collectives
that run as one bucket run at its place: what they wait for stays until then, and what ops write into a bucket lies in
its memory, which is there from the first of them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, ops

from autopar.attention import MASK_AT
from autopar.cost.compute import owns
from autopar.cost.staging import chain, copies_slice, moved, packed, unpacked
from autopar.layout import MICRO, Layout, Mesh, Step
from autopar.passes.buckets import Bucket, buckets, writer
from autopar.passes.in_place import alone
from autopar.program import Program
from autopar.rules.core import operands

aten = ops.aten


@dataclass(eq=False)
class Life:
    """One storage: its name and the user's line, bytes, and the points between which it is there."""

    name: str
    source: str
    bytes: int
    first: int
    last: int
    result: int = 0


Held = list[Life]


@dataclass
class Lives:
    """The lives of all storages of a step.

    points      (node, phase) of every point
    lives       in the order in which they are made
    casts       of shards to the dtype that a step computes in
    saved       what forward makes and keeps for backward
    gradients   storages in which gradients of parameters lie when the step ends
    """

    program: Program
    points: list[tuple[str, str]] = field(default_factory=list)
    lives: Held = field(default_factory=list)
    casts: Held = field(default_factory=list)
    saved: Held = field(default_factory=list)
    gradients: Held = field(default_factory=list)

    def __post_init__(self) -> None:
        graph = self.program.graph
        ends = [o for o in graph.outputs if "gradient" not in o.kind]
        first = _Sweep(self, "forward").run(self.program.forward, self.cast())
        saved = dict(zip(self.program.saved, first[len(ends) :], strict=True))
        second = _Sweep(self, "backward").run(self.program.backward, saved)
        self.saved = list(dict.fromkeys(x for held in saved.values() for x in held if x not in self.casts))
        late = [o for o in graph.outputs if "gradient" in o.kind]
        for kept in (*first[: len(ends)], *second):
            for life in kept:
                life.last = len(self.points)
        kinds = zip(late, second, strict=True)
        self.gradients = list(dict.fromkeys(x for o, kept in kinds if o.kind == "gradient" for x in kept))

    @property
    def mesh(self) -> Mesh:
        return self.program.plan.mesh

    def cast(self) -> dict[str, Held]:
        """Shards are cast when forward begins, where no copies stay (ZeRO 1 and 2) that have the dtype already."""
        found: dict[str, Held] = {}
        graph = self.program.graph
        for entry in graph.inputs:
            kept = self.program.plan.parameters.get(entry.name) if entry.kind == "parameter" else None
            dtype = graph.node(entry.node).meta["val"].dtype
            if kept is not None and kept.level in (0, 3) and graph.stored.get(entry.name, dtype) != dtype:
                life = Life(entry.node, "", size_of(kept.stored, dtype, self.mesh), 0, 0)
                found[entry.node] = [life]
                self.lives.append(life)
                self.casts.append(life)
        return found

    def bytes_at(self) -> list[int]:
        """Bytes alive at every point."""
        change = [0] * (len(self.points) + 2)
        for life in self.lives:
            change[life.first] += life.bytes
            change[life.last + 1] -= life.bytes
        found, live = [], 0
        for i in range(len(self.points)):
            live += change[i]
            found.append(live)
        return found


@dataclass
class _Sweep:
    """One walk over the graph of a phase."""

    lives: Lives
    phase: str
    mine: dict[fx.Node, Held] = field(default_factory=dict)
    owners: dict[fx.Node, Bucket] = field(default_factory=dict)
    writers: dict[fx.Node, Bucket] = field(default_factory=dict)
    memory: dict[Bucket, Life] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.lives.mesh

    def run(self, graph: fx.Graph, given: Mapping[str, Held]) -> list[Held]:
        """The storages of the graph's results."""
        groups = buckets(graph, self.lives.program.plan)
        self.owners = {node: group for group in groups for node in group.nodes}
        made = {group: [writer(n) for n in group.nodes] for group in groups if group.in_place}
        self.writers = {node: group for group, nodes in made.items() for node in nodes if node is not None}
        copied = [group for group in groups if not group.in_place]
        for node in graph.nodes:
            if node.op == "placeholder":
                self.mine[node] = given.get(node.name, [])
            elif node.op == "output":
                return [self.mine[r] if r is not None else [] for r in node.args[0]]
            elif node not in self.owners:
                self.mine[node] = self.step(node) if "step" in node.meta else self.op(node)
            elif self.owners[node].in_place:
                self.put(node)
            else:
                self.together(copied, node)
        return []

    # --- points ---

    def new(self, node: fx.Node, size: int, what: str = "", result: int = 0) -> Life:
        """A storage that is made at the point to come."""
        now = len(self.lives.points)
        life = Life(node.name + what, node.meta.get("source", ""), size, now, now, result)
        self.lives.lives.append(life)
        return life

    def point(self, node: fx.Node, read: Iterable[Life]) -> None:
        """A point at which these are there."""
        for life in read:
            life.last = max(life.last, len(self.lives.points))
        self.lives.points.append((node.name, self.phase))

    def read(self, node: fx.Node) -> Held:
        return [life for operand in node.all_input_nodes for life in self.mine[operand]]

    def buffers(self, node: fx.Node, held: Held, sizes: Sequence[int], what: str = "") -> Held:
        """Buffers made one from the other, each at a point of its own; the last one."""
        for i, size in enumerate(sizes):
            made = self.new(node, size * width(node), what if i + 1 < len(sizes) else "")
            self.point(node, held)
            held = [made]
        return held

    # --- nodes ---

    def op(self, node: fx.Node) -> Held:
        """An op that is no collective."""
        made = self.made(node)
        self.point(node, self.read(node))
        return made

    def made(self, node: fx.Node) -> Held:
        if node.op == "get_attr":
            return []
        first = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(first, fx.Node):
            found = self.mine[first]
            return [life for life in found if life.result == node.args[1]] or found[:0]
        if not owns(node) or adds_bias(node) or spared(node):
            return self.mine[first] if isinstance(first, fx.Node) else []
        if node in self.writers:
            return [self.slot(self.writers[node])]
        val = node.meta.get("val")
        tensors = list(val) if isinstance(val, (list, tuple)) else [val]
        return [
            self.new(node, size_of(layout, tensor.dtype, self.mesh), result=i)
            for i, (tensor, layout) in enumerate(zip(tensors, node.meta.get("layouts", ()), strict=False))
            if isinstance(tensor, torch.Tensor)
        ]

    def step(self, node: fx.Node) -> Held:
        """A step of a conversion that runs alone."""
        step, operand = node.meta["step"], node.args[0]
        assert isinstance(operand, fx.Node)
        if stays(step, operand, self.mesh):
            self.point(node, self.read(node))
            return self.mine[operand]
        return self.buffers(node, self.read(node), chain(step, self.mesh), " in flight")

    # --- buckets ---

    def slot(self, bucket: Bucket) -> Life:
        """The memory of a bucket that is filled in place; the first member makes it."""
        if bucket not in self.memory:
            sizes = (moved(n.meta["step"], self.mesh) * width(n) for n in bucket.nodes)
            self.memory[bucket] = self.new(bucket.nodes[0], sum(sizes), f" and {len(bucket.nodes) - 1} more")
        return self.memory[bucket]

    def put(self, node: fx.Node) -> None:
        """A member of such a bucket."""
        self.mine[node] = [self.slot(self.owners[node])]
        self.point(node, [*self.read(node), *self.mine[node]])

    def together(self, groups: Sequence[Bucket], node: fx.Node) -> None:
        """At the place of a bucket of copies it runs, and after one that runs early the next of these."""
        here = next((i for i, group in enumerate(groups) if group.place is node), None)
        if here is None:
            return
        ahead = next((g for g in groups[here + 1 :] if g.early), None) if groups[here].early else None
        for group in (groups[here], ahead):
            if group is not None and group.nodes[0] not in self.mine:
                self.joined(group)

    def joined(self, bucket: Bucket) -> None:
        """Members packed, put side by side, moved, taken apart and unpacked."""
        first, steps = bucket.nodes[0], [n.meta["step"] for n in bucket.nodes]
        what = f" and {len(steps) - 1} more in flight"
        sent: Held = []
        for node, step in zip(bucket.nodes, steps, strict=True):
            sent += self.buffers(node, self.read(node), packed(step, self.mesh), " in flight")
        sizes = [(packed(s, self.mesh) or (s.before.local_numel(self.mesh),))[-1] for s in steps]
        held = [self.new(first, sum(sizes) * width(first), what)]
        self.point(first, sent)
        if first.meta["step"].kind != "all_reduce":
            arrived = self.new(first, sum(moved(s, self.mesh) for s in steps) * width(first), what)
            self.point(first, held)
            held = [arrived]
        for node, step in zip(bucket.nodes, steps, strict=True):
            strips = (moved(step, self.mesh),) if step.kind == "all_gather" else ()
            self.mine[node] = self.buffers(node, held, (*strips, *unpacked(step, self.mesh)), " in flight")


def width(node: fx.Node) -> int:
    """Bytes of an element."""
    return int(node.meta["val"].dtype.itemsize)


def size_of(layout: Layout, dtype: torch.dtype, mesh: Mesh) -> int:
    """Bytes of the largest piece."""
    return layout.local_numel(mesh) * dtype.itemsize


def stays(step: Step, operand: fx.Node, mesh: Mesh) -> bool:
    """Whether a step leaves its result where its operand lies."""
    if step.kind == "all_reduce":
        return step.axis != MICRO and alone(operand)
    return step.kind == "relabel" or (step.kind == "slice" and not copies_slice(step, mesh))


def spared(node: fx.Node) -> bool:
    """Whether the reshape after an attention op copies nothing, as its kernel has the heads beside their elements.

    Torch's fused kernels write [b, q, h, f] in memory; gradients of keys that query heads share are sums in order.
    """
    turned: Any = node.args[0] if node.target is aten.reshape.default else None
    if turned is None or turned.target is not aten.permute.default or list(turned.args[1]) != [0, 2, 1, 3]:
        return False
    picked: Any = turned.args[0]
    if picked.target is not operator.getitem or not fused(picked.args[0]):
        return False
    attention, result = picked.args
    q, k, _ = shapes(attention)
    return result == 0 or q[1] == k[1]


def fused(node: Any) -> bool:
    """Whether a fused kernel runs an attention op or its backward, see `kernels.py`."""
    if node.target not in MASK_AT:
        return False
    mask, causal, _, dropout = node.args[MASK_AT[node.target] :][:4]
    q, k, v = shapes(node)
    return mask is None and not dropout and (not causal or q[2] == k[2]) and q[3] == v[3]


def shapes(node: Any) -> list[torch.Size]:
    """Of the queries, keys and values of an attention op or its backward."""
    first = 0 if node.target is ops.autopar.attention.default else 1
    return [x.meta["val"].shape for x in node.args[first : first + 3]]


def adds_bias(node: fx.Node) -> bool:
    """Whether a bias is added inside the product before it, see `passes/fuse_bias.py`."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return False
    read = operands(node)
    vector = len(read) == 2 and read[1].meta["val"].dim() == 1
    return vector and read[0].target is aten.mm.default and len(read[0].users) == 1
