"""The memory of buckets: ops write gradients side by side, and one collective sums them where they lie.

In: buckets that work in place, nodes as they are bound.  Out: nodes that fill and reduce them.  Next: `bind.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import getitem

import torch
from torch import Tensor, fx, ops

from autopar.passes.buckets import Bucket, writer
from autopar.passes.in_place import WRITES
from autopar.passes.lower import Lowering

aten = ops.aten


def parts(memory: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Contiguous tensors of these shapes, one behind the other."""
    flat = aten.split_with_sizes(memory, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]


@dataclass
class Filling:
    """Buckets of one graph that is being bound: %g = mm(%x, %y) of a bucket's first member becomes

        %memory = empty([sum of sizes]);  %slots = parts(%memory, ...);  %g = mm(%x, %y, out=%slots[0])

    and once the last is there  %sum = all_reduce_(%memory);  %done = wait_tensor(%sum);  %gs = parts(%done, ...)
    """

    lowering: Lowering
    device: torch.device
    buckets: Iterable[Bucket]
    members: dict[fx.Node, fx.Node] = field(default_factory=dict)
    owners: dict[fx.Node, Bucket] = field(default_factory=dict)
    memory: dict[Bucket, fx.Node] = field(default_factory=dict)
    slots: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for bucket in self.buckets:
            for node in bucket.nodes:
                self.owners[node] = bucket
                if (made := writer(node)) is not None:
                    self.members[made] = node

    def slot(self, member: fx.Node) -> fx.Node:
        """Where a member's operand goes; the first of a bucket makes its memory."""
        if member not in self.slots:
            bucket, dtype = self.owners[member], member.meta["val"].dtype
            shapes = [self.lowering.sent_shape(node.meta["step"]) for node in bucket.nodes]
            size = sum(map(math.prod, shapes))
            made = self.lowering.call(aten.empty.memory_format, [size], dtype=dtype, device=self.device)
            self.memory[bucket] = made
            self.slots.update(zip(bucket.nodes, self.views(made, shapes), strict=True))
        return self.slots[member]

    def views(self, memory: fx.Node, shapes: Sequence[list[int]]) -> list[fx.Node]:
        """The parts of a bucket."""
        together = self.lowering.call(parts, memory, shapes)
        return [self.lowering.call(getitem, together, i) for i in range(len(shapes))]

    def write(self, made: fx.Node, bound: fx.Node) -> fx.Node:
        """A bound op, writing into its slot if it is one that can."""
        member = self.members.get(made)
        if member is None or bound.target not in WRITES:
            return bound
        slot, graph = self.slot(member), bound.graph
        out = graph.call_function(WRITES[bound.target], bound.args, {**bound.kwargs, "out": slot})
        out.meta = dict(bound.meta)
        graph.erase_node(bound)
        return out

    def put(self, member: fx.Node, operand: fx.Node) -> None:
        """Copy an operand into its slot, unless it lies there already."""
        slot = self.slot(member)
        if operand.kwargs.get("out") is not slot:
            self.lowering.call(aten.copy_.default, slot, operand)

    def reduced(self, bucket: Bucket) -> dict[fx.Node, fx.Node]:
        """The members of a full bucket, summed."""
        step, lowering = bucket.nodes[0].meta["step"], self.lowering
        got = lowering.moved(self.memory[bucket], step, pairs=False, alone=True)
        out = self.views(got, [lowering.got_shape(node.meta["step"]) for node in bucket.nodes])
        lowering.tail = None
        return dict(zip(bucket.nodes, out, strict=True))
