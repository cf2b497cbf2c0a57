"""One step of a conversion as torch ops on one device.

In: a `Step`, this device's coordinate, the name of the process group of every mesh axis.  Out: nodes in a graph.
Next: `bind.py`.

A collective works on the piece seen factor by factor: [..., length of the cut factor, ...]. Pieces are padded to
ceil(size / devices), as `torch.chunk` cuts them, and the padding, which is always at the end, is taken off again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx, ops

from autopar.layout import Layout, Mesh, Place, Step

aten = ops.aten
c10d = ops._c10d_functional


@dataclass(frozen=True)
class Lowering:
    """Where nodes go, and for which device."""

    graph: fx.Graph
    mesh: Mesh
    coordinate: Mapping[str, int]
    groups: Mapping[str, str]

    def call(self, op: object, *args: object, **kwargs: object) -> fx.Node:
        return self.graph.call_function(op, args, kwargs)  # type: ignore[arg-type]

    def step(self, x: fx.Node, step: Step) -> fx.Node:
        """The nodes of one step."""
        made: fx.Node = getattr(self, step.kind)(x, step)
        return made

    # --- pieces ---

    def sizes(self, layout: Layout) -> list[int]:
        """Local sizes of all factors, dims concatenated; one entry for a tensor without any."""
        flat = [n for dim in layout.local_factors(self.mesh, dict(self.coordinate)) for n in dim]
        return flat or [1]

    def shape(self, layout: Layout) -> list[int]:
        return list(layout.local_shape(self.mesh, dict(self.coordinate)))

    def reshape(self, x: fx.Node, before: list[int], after: list[int]) -> fx.Node:
        return x if before == after else self.call(aten.reshape.default, x, after)

    def pad(self, x: fx.Node, sizes: list[int], at: int, size: int) -> fx.Node:
        """Zeros at the end of dim `at` up to `size`."""
        missing = size - sizes[at]
        return x if not missing else self.call(aten.constant_pad_nd.default, x, [0, 0] * (len(sizes) - 1 - at) + [0, missing])

    def run(self, x: fx.Node, sizes: list[int], at: int, start: int, end: int) -> fx.Node:
        """A run of dim `at`, contiguous as every op's result is: some kernels take that for granted."""
        part = self.call(aten.slice.Tensor, x, at, start, end)
        return part if math.prod(sizes[:at]) == 1 else self.contiguous(part)

    def trim(self, x: fx.Node, sizes: list[int], at: int, size: int) -> fx.Node:
        """The first `size` of dim `at`."""
        return x if sizes[at] == size else self.run(x, sizes, at, 0, size)

    def wait(self, x: fx.Node) -> fx.Node:
        return self.call(c10d.wait_tensor.default, x)

    def contiguous(self, x: fx.Node) -> fx.Node:
        return self.call(aten.contiguous.default, x)

    # --- steps ---

    def slice(self, x: fx.Node, step: Step) -> fx.Node:
        place = landed(step)
        at, n = flat(step.before, place), self.mesh.size(step.axis)
        sizes = self.sizes(step.before)
        piece = -(-sizes[at] // n)
        start = min(sizes[at], piece * self.coordinate[step.axis])
        end = min(sizes[at], start + piece)
        cut = self.run(self.reshape(x, self.shape(step.before), sizes), sizes, at, start, end)
        return self.reshape(cut, [*sizes[:at], end - start, *sizes[at + 1 :]], self.shape(step.after))

    def to_pending(self, x: fx.Node, step: Step) -> fx.Node:
        """The value on the first device of the axis, zeros on the others."""
        return x if self.coordinate[step.axis] == 0 else self.call(aten.zeros_like.default, x)

    def relabel(self, x: fx.Node, step: Step) -> fx.Node:
        return x

    def all_reduce(self, x: fx.Node, step: Step) -> fx.Node:
        kind = dict(step.before.pending)[step.axis]
        return self.wait(self.call(c10d.all_reduce.default, self.contiguous(x), kind, self.groups[step.axis]))

    def all_gather(self, x: fx.Node, step: Step) -> fx.Node:
        place = left(step)
        at, n = flat(step.before, place), self.mesh.size(step.axis)
        mine, full = self.sizes(step.before), self.sizes(step.after)
        piece = -(-full[at] // n)
        padded = [*mine[:at], piece, *mine[at + 1 :]]
        x = self.contiguous(self.pad(self.reshape(x, self.shape(step.before), mine), mine, at, piece))
        x = self.wait(self.call(c10d.all_gather_into_tensor.default, x, n, self.groups[step.axis]))
        return self.reshape(self.front_to(x, padded, at, n, full[at]), full, self.shape(step.after))

    def front_to(self, x: fx.Node, padded: list[int], at: int, n: int, size: int) -> fx.Node:
        """Pieces stacked in front, [n * first dim, ...], become one dim `at` of `size`."""
        stacked = [n * padded[0], *padded[1:]]
        sizes = [*padded[:at], n * padded[at], *padded[at + 1 :]]
        if math.prod(padded[:at]) != 1:
            x = self.call(aten.reshape.default, x, [n, *padded])
            x = self.call(aten.permute.default, x, [*range(1, at + 1), 0, *range(at + 1, len(padded) + 1)])
            x = self.call(aten.reshape.default, x, sizes)
        else:
            x = self.reshape(x, stacked, sizes)
        return self.trim(x, sizes, at, size)

    def to_front(self, x: fx.Node, sizes: list[int], at: int, n: int) -> fx.Node:
        """Dim `at` becomes n pieces, stacked in front: [n * first dim, ...], dim `at` a piece."""
        piece = -(-sizes[at] // n)
        x = self.pad(x, sizes, at, n * piece)
        if math.prod(sizes[:at]) != 1:
            x = self.call(aten.reshape.default, x, [*sizes[:at], n, piece, *sizes[at + 1 :]])
            x = self.call(aten.permute.default, x, [at, *range(at), *range(at + 1, len(sizes) + 1)])
        stacked = [*sizes[:at], piece, *sizes[at + 1 :]]
        stacked[0] *= n
        return self.contiguous(self.call(aten.reshape.default, x, stacked))

    def reduce_scatter(self, x: fx.Node, step: Step) -> fx.Node:
        place = landed(step)
        at, n = flat(step.before, place), self.mesh.size(step.axis)
        full, mine = self.sizes(step.before), self.sizes(step.after)
        piece = -(-full[at] // n)
        stacked = self.to_front(self.reshape(x, self.shape(step.before), full), full, at, n)
        kind = dict(step.before.pending)[step.axis]
        out = self.wait(self.call(c10d.reduce_scatter_tensor.default, stacked, kind, n, self.groups[step.axis]))
        sizes = [*full[:at], piece, *full[at + 1 :]]
        return self.reshape(self.trim(out, sizes, at, mine[at]), mine, self.shape(step.after))

    def all_to_all(self, x: fx.Node, step: Step) -> fx.Node:
        source, target = flat(step.before, left(step)), flat(step.before, landed(step))
        n = self.mesh.size(step.axis)
        before, after = self.sizes(step.before), self.sizes(step.after)
        piece = -(-after[source] // n)
        x = self.pad(self.reshape(x, self.shape(step.before), before), before, source, piece)
        padded = [*before[:source], piece, *before[source + 1 :]]
        x = self.to_front(x, padded, target, n)
        part = -(-before[target] // n)
        padded[target] = part
        equal = [padded[0]] * n
        x = self.wait(self.call(c10d.all_to_all_single.default, x, equal, equal, self.groups[step.axis]))
        x = self.front_to(x, padded, source, n, after[source])
        padded[source] = after[source]
        return self.reshape(self.trim(x, padded, target, after[target]), after, self.shape(step.after))


def flat(layout: Layout, place: Place) -> int:
    """Number of a factor when the dims' factors are concatenated."""
    return sum(len(dim) for dim in layout.factors[: place[0]]) + place[1]


def left(step: Step) -> Place:
    """The factor that a gather or an all-to-all makes whole."""
    place = step.before.where(step.axis)
    assert isinstance(place, tuple)
    return place


def landed(step: Step) -> Place:
    """The factor that the step cuts."""
    place = step.after.where(step.axis)
    assert isinstance(place, tuple)
    return place
