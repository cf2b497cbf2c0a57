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

from torch import Tensor, fx, ops

from autopar.layout import Layout, Mesh, Place, Step
from autopar.reduce_scatter import SUMMED

aten = ops.aten
c10d = ops._c10d_functional

MOVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def wait_tensor_of(moved: Tensor, sent: Tensor) -> Tensor:
    """The finished result of a collective that was given `sent`."""
    done: Tensor = c10d.wait_tensor(moved)
    return done


@dataclass
class Lowering:
    """Where nodes go, and for which device.

    `serial`: collectives run one at a time and are waited for at once, as on CPU.
    `tail` is the number of the collective whose result is being unpacked, None elsewhere; see `sink_waits.py`.
    Complex numbers, which gloo does not know, travel as pairs of real ones.
    """

    graph: fx.Graph
    mesh: Mesh
    coordinate: Mapping[str, int]
    groups: Mapping[str, str]
    serial: bool
    tail: int | None = None
    count: int = 0

    def call(self, op: object, *args: object, **kwargs: object) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)  # type: ignore[arg-type]
        if self.tail is not None:
            node.meta["tail"] = self.tail
        return node

    def step(self, x: fx.Node, step: Step, pairs: bool = False, alone: bool = False) -> fx.Node:
        """The nodes of one step; `pairs`: of complex numbers, `alone`: nobody else reads the memory of `x`."""
        if step.kind not in MOVES:
            return {"slice": self.slice, "to_pending": self.to_pending, "relabel": self.relabel}[step.kind](x, step)
        out = self.unpacked(self.moved(self.packed(x, step), step, pairs, alone), step)
        self.tail = None
        return out

    def moved(self, sent: fx.Node, step: Step, pairs: bool, alone: bool) -> fx.Node:
        """What arrives for what is sent; from here on the nodes unpack it."""
        sent = self.call(aten.view_as_real.default, sent) if pairs else sent
        started = self.move(sent, step, alone)
        self.tail, self.count = self.count, self.count + 1
        got = started if started.target is SUMMED else self.wait(started, sent, step)  # which waits by itself
        return self.call(aten.view_as_complex.default, got) if pairs else got

    def steps(self, xs: list[fx.Node], steps: list[Step], pairs: bool = False) -> list[fx.Node]:
        """Steps of one kind along one axis as one collective over what they send, side by side."""
        n, first = self.mesh.size(steps[0].axis), steps[0]
        rows = 1 if first.kind != "reduce_scatter" else n
        sent = [self.packed(x, step) for x, step in zip(xs, steps, strict=True)]
        shapes = [self.sent_shape(step) for step in steps]
        widths = [math.prod(shape) // rows for shape in shapes]
        flat_ = [self.call(aten.reshape.default, x, [rows, w]) for x, w in zip(sent, widths, strict=True)]
        joined = self.call(aten.reshape.default, self.call(aten.cat.default, flat_, 1), [rows * sum(widths)])
        got = self.moved(joined, first, pairs, alone=True)
        got = self.call(aten.reshape.default, got, [n if first.kind == "all_gather" else 1, sum(widths)])
        out, at = [], 0
        for step, width in zip(steps, widths, strict=True):
            part = self.contiguous(
                self.call(aten.slice.Tensor, got, 1, at, at + width)
            )  # no view, which would keep got
            part = self.call(aten.reshape.default, part, self.got_shape(step))
            out.append(self.unpacked(part, step))
            at += width
        self.tail = None
        return out

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
        amounts = [0, 0] * (len(sizes) - 1 - at) + [0, missing]
        return self.call(aten.constant_pad_nd.default, x, amounts) if missing else x

    def run(self, x: fx.Node, sizes: list[int], at: int, start: int, end: int) -> fx.Node:
        """A run of dim `at`, contiguous as every op's result is: some kernels take that for granted."""
        part = self.call(aten.slice.Tensor, x, at, start, end)
        return part if math.prod(sizes[:at]) == 1 else self.contiguous(part)

    def trim(self, x: fx.Node, sizes: list[int], at: int, size: int) -> fx.Node:
        """The first `size` of dim `at`."""
        return x if sizes[at] == size else self.run(x, sizes, at, 0, size)

    def wait(self, moved: fx.Node, sent: fx.Node, step: Step) -> fx.Node:
        """Wait for a collective. What it sends is read again, so that it stays until then; an all-reduce copies it."""
        if step.kind == "all_reduce":
            return self.call(c10d.wait_tensor.default, moved)
        return self.call(wait_tensor_of, moved, sent)

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

    # --- what moves between devices: packed, sent, unpacked ---

    def move(self, x: fx.Node, step: Step, alone: bool) -> fx.Node:
        """Start the collective on what is packed; a sum in the memory of its terms, where nobody else reads them."""
        n, group = self.mesh.size(step.axis), self.groups[step.axis]
        if step.kind == "all_gather":
            return self.call(c10d.all_gather_into_tensor.default, x, n, group)
        if step.kind == "all_to_all":
            equal = [self.sent_shape(step)[0] // n] * n
            return self.call(c10d.all_to_all_single.default, x, equal, equal, group)
        kind = dict(step.before.pending)[step.axis]
        if step.kind == "all_reduce":
            return self.call(c10d.all_reduce_.default if alone else c10d.all_reduce.default, x, kind, group)
        if self.serial:
            return self.call(SUMMED, x, kind, n, group)
        started = self.call(c10d.reduce_scatter_tensor.default, x, kind, n, group)
        started.meta["holds"] = self.count
        return started

    def padded(self, step: Step) -> list[int]:
        """Sizes of one device's packed piece, factor by factor."""
        n = self.mesh.size(step.axis)
        before, after = self.sizes(step.before), self.sizes(step.after)
        if step.kind in ("all_gather", "all_to_all"):
            at = flat(step.before, left(step))
            before = [*before[:at], -(-after[at] // n), *before[at + 1 :]]
        if step.kind in ("reduce_scatter", "all_to_all"):
            at = flat(step.before, landed(step))
            before = [*before[:at], -(-before[at] // n), *before[at + 1 :]]
        return before

    def sent_shape(self, step: Step) -> list[int]:
        """Shape of what is packed: for scattering, one piece per device in front."""
        if step.kind == "all_reduce":
            return self.shape(step.before) or [1]
        sizes = self.padded(step)
        return sizes if step.kind == "all_gather" else [self.mesh.size(step.axis) * sizes[0], *sizes[1:]]

    def got_shape(self, step: Step) -> list[int]:
        """Shape of what arrives."""
        if step.kind == "all_reduce":
            return self.shape(step.before)
        sizes = self.padded(step)
        return sizes if step.kind == "reduce_scatter" else [self.mesh.size(step.axis) * sizes[0], *sizes[1:]]

    def packed(self, x: fx.Node, step: Step) -> fx.Node:
        """What a step sends."""
        if step.kind == "all_reduce":
            return self.contiguous(x)
        before, n = self.sizes(step.before), self.mesh.size(step.axis)
        x = self.reshape(x, self.shape(step.before), before)
        if step.kind in ("all_gather", "all_to_all"):
            at = flat(step.before, left(step))
            piece = -(-self.sizes(step.after)[at] // n)
            x = self.pad(x, before, at, piece)
            before = [*before[:at], piece, *before[at + 1 :]]
        if step.kind == "all_gather":
            return self.contiguous(x)
        return self.to_front(x, before, flat(step.before, landed(step)), n)

    def unpacked(self, x: fx.Node, step: Step) -> fx.Node:
        """The piece after a step, from what arrived."""
        if step.kind == "all_reduce":
            return x
        sizes, after, n = self.padded(step), self.sizes(step.after), self.mesh.size(step.axis)
        if step.kind in ("all_gather", "all_to_all"):
            at = flat(step.before, left(step))
            x = self.front_to(x, sizes, at, n, after[at])
            sizes = [*sizes[:at], after[at], *sizes[at + 1 :]]
        if step.kind in ("reduce_scatter", "all_to_all"):
            at = flat(step.before, landed(step))
            x = self.trim(x, sizes, at, after[at])
        return self.reshape(x, after, self.shape(step.after))

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
