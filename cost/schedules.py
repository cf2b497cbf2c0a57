"""Collectives as schedules: in each step, which device sends which pieces to which, to be added or copied.

In: an algorithm, the sizes of its levels, a number of chunks.  Out: `Schedule`.  Next: `network.py`.

Devices are numbered with the innermost level running fastest: device 11 of (8, 2) is number 3 of the second host. The
tensor is cut into pieces; piece x belongs to device x // (pieces / devices) where each device gets a part. Of an
all-to-all the pieces are pairs: x = source * devices + target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from autopar.cost.algorithms import Algorithm, Phase, phases
from autopar.cost.trees import timetable

SWITCH = -1  # the switch of a level that adds by itself; it receives from all and sends to all at a time


@dataclass(frozen=True)
class Message:
    """`source` sends `pieces` to `target`, which adds them to its own or replaces its own."""

    source: int
    target: int
    pieces: tuple[int, ...]
    add: bool = False


Step = tuple[Message, ...]
Pieces = tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """Steps one after the other; each piece is `share` of the bytes of the whole tensor."""

    devices: int
    pieces: int
    share: Fraction
    steps: tuple[Step, ...]


def schedule(algorithm: Algorithm, sizes: tuple[int, ...], chunks: int = 1) -> Schedule:
    """The schedule of an algorithm on levels of these sizes, innermost first."""
    n = math.prod(sizes)
    if algorithm.collective == "all_to_all":
        steps = _pairs(n) if algorithm.style == "flat" else _nested(algorithm, sizes, chunks, n * n)
        return Schedule(n, n * n, Fraction(1, n), tuple(steps))
    if algorithm.style == "rings":
        pieces = n * sizes[0]
        steps = _rings(algorithm.collective, sizes[0], sizes[1])
    else:
        pieces = n * _parts(algorithm, n if algorithm.style == "flat" else sizes[-1], chunks)
        if algorithm.style == "flat":
            work = Work(tuple(range(n)), tuple(range(pieces)), chunks)
            steps = WAYS[algorithm.collective, algorithm.outer](work)
        else:
            steps = _nested(algorithm, sizes, chunks, pieces)
    return Schedule(n, pieces, Fraction(1, pieces), tuple(step for step in steps if step))


def _parts(algorithm: Algorithm, devices: int, chunks: int) -> int:
    """Into how many pieces the part of one device has to be cut."""
    halves = 2 ** (devices.bit_length() - 1) if algorithm.outer == "halving_doubling" else 1
    return halves * (2 * chunks if algorithm.outer == "tree" else chunks if algorithm.chunked else 1)


@dataclass(frozen=True)
class Work:
    """What one group does in a phase: `pieces` are cut into a block for each device, in order of the devices."""

    devices: tuple[int, ...]
    pieces: Pieces
    chunks: int

    def cut(self, parts: int) -> list[Pieces]:
        """The pieces in equal runs."""
        size, rest = divmod(len(self.pieces), parts)
        assert not rest, f"{len(self.pieces)} pieces in {parts} parts"
        return [self.pieces[i * size : (i + 1) * size] for i in range(parts)]

    @cached_property
    def blocks(self) -> list[Pieces]:
        """One run of pieces for each device."""
        return self.cut(len(self.devices))


def ring_reduce_scatter(work: Work) -> list[Step]:
    """Block j starts at device j + 1 and collects the terms of all on its way to device j."""
    return [_around(work, -t - 1, add=True) for t in range(len(work.devices) - 1)]


def ring_all_gather(work: Work) -> list[Step]:
    """Block j goes from device j to all that follow."""
    return [_around(work, -t, add=False) for t in range(len(work.devices) - 1)]


def _around(work: Work, shift: int, add: bool) -> Step:
    """Device i sends block i + shift to the next."""
    n, blocks, following = len(work.devices), work.blocks, (*work.devices[1:], work.devices[0])
    pairs = enumerate(zip(work.devices, following, strict=True))
    return tuple(Message(device, to, blocks[(i + shift) % n], add) for i, (device, to) in pairs)


def halving(work: Work) -> list[Step]:
    """Partners at distance n/2, n/4, ..., 1: each gives the half of the blocks that is on the other's side."""
    return [_swap(work, distance, give=distance, add=True) for distance in reversed(_powers(len(work.devices)))]


def doubling(work: Work) -> list[Step]:
    """Partners at distance 1, 2, ..., n/2: each gives all the blocks that it has."""
    return [_swap(work, distance, give=0, add=False) for distance in _powers(len(work.devices))]


def _swap(work: Work, distance: int, give: int, add: bool) -> Step:
    """Device i gives i ^ distance the run of `distance` blocks that holds block i ^ give."""
    at, found = work.devices, []
    for i, device in enumerate(at):
        first = (i ^ give) // distance * distance
        pieces = tuple(p for block in work.blocks[first : first + distance] for p in block)
        found.append(Message(device, at[i ^ distance], pieces, add))
    return tuple(found)


def _powers(n: int) -> list[int]:
    """1, 2, 4, ... below the number of devices."""
    return [2**i for i in range((n - 1).bit_length())]


def halving_doubling(work: Work) -> list[Step]:
    """The first 2^k devices halve and double; a surplus device gives its terms to one of them and gets the result."""
    core = 2 ** (len(work.devices).bit_length() - 1)
    inner = Work(work.devices[:core], work.pieces, work.chunks)
    surplus = list(zip(work.devices[core:], work.devices))
    fold = tuple(Message(extra, d, work.pieces, add=True) for extra, d in surplus)
    unfold = tuple(Message(d, extra, work.pieces) for extra, d in surplus)
    return [fold, *halving(inner), *doubling(inner), unfold]


def tree(work: Work) -> list[Step]:
    """Chunk c of each tree uses an edge 2 c steps after the first; up in the reverse order of down."""
    edges, blocks = timetable(len(work.devices)), work.cut(2 * work.chunks)
    down: dict[int, list[tuple[int, int, Pieces]]] = {}
    for edge in edges:
        for c in range(work.chunks):
            block = blocks[edge.tree * work.chunks + c]
            down.setdefault(edge.step + 2 * c, []).append((work.devices[edge.parent], work.devices[edge.child], block))
    steps = [down[t] for t in sorted(down)]
    up = [tuple(Message(child, parent, block, add=True) for parent, child, block in s) for s in reversed(steps)]
    return [*up, *(tuple(Message(*edge) for edge in s) for s in steps)]


def in_network(work: Work) -> list[Step]:
    """All send chunk t up while the switch sends the sum of chunk t - 1 down."""
    blocks = work.cut(work.chunks)
    up = [tuple(Message(d, SWITCH, block, add=True) for d in work.devices) for block in blocks]
    down = [tuple(Message(SWITCH, d, block) for d in work.devices) for block in blocks]
    return [(*first, *second) for first, second in zip([*up, ()], [(), *down], strict=True)]


def chain(work: Work) -> list[Step]:
    """Chunk c passes the i-th edge in step c + i."""
    blocks, edges = work.cut(work.chunks), list(zip(work.devices, work.devices[1:]))
    steps = range(len(edges) - 1 + work.chunks)
    return [tuple(Message(*e, blocks[t - i]) for i, e in enumerate(edges) if 0 <= t - i < work.chunks) for t in steps]


def binomial(work: Work) -> list[Step]:
    """In step t the first 2^t devices send to the next 2^t."""
    at, n, spans = work.devices, len(work.devices), _powers(len(work.devices))
    return [tuple(Message(at[i], at[i + d], work.pieces) for i in range(min(d, n - d))) for d in spans]


def direct(work: Work) -> list[Step]:
    """From the first device to the last."""
    return [(Message(work.devices[0], work.devices[-1], work.pieces),)]


WAYS: dict[tuple[str, str], Callable[[Work], list[Step]]] = {
    ("all_reduce", "ring"): lambda work: [*ring_reduce_scatter(work), *ring_all_gather(work)],
    ("all_reduce", "halving_doubling"): halving_doubling,
    ("all_reduce", "tree"): tree,
    ("all_reduce", "in_network"): in_network,
    ("reduce_scatter", "ring"): ring_reduce_scatter,
    ("reduce_scatter", "halving"): halving,
    ("all_gather", "ring"): ring_all_gather,
    ("all_gather", "doubling"): doubling,
    ("broadcast", "chain"): chain,
    ("broadcast", "binomial"): binomial,
    ("send_recv", "direct"): direct,
}


def _pairs(n: int) -> list[Step]:
    """In step t device i sends what is for device i + t."""
    return [tuple(Message(i, (i + t) % n, (i * n + (i + t) % n,)) for i in range(n)) for t in range(1, n)]


def _nested(algorithm: Algorithm, sizes: tuple[int, ...], chunks: int, pieces: int) -> list[Step]:
    """Phase after phase, in each of them all groups of its level side by side."""
    steps: list[Step] = []
    for phase in phases(algorithm, len(sizes)):
        groups = _groups(phase.level, sizes)
        if phase.collective == "all_to_all":
            parts = [_forward(phase, group, sizes) for group in groups]
        else:
            senders = [
                g for g in groups if phase.collective != "broadcast" or not any(_digits(g[0], sizes)[: phase.level])
            ]
            parts = [WAYS[phase.collective, phase.way](_work(phase, g, sizes, pieces, chunks)) for g in senders]
        steps += [sum(together, ()) for together in zip(*parts, strict=True)]
    return steps


def _digits(device: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Number of a device within each level, innermost first."""
    found = []
    for size in sizes:
        device, digit = divmod(device, size)
        found.append(digit)
    return tuple(found)


def _groups(level: int, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Devices that differ on one level only, for every choice of the other levels."""
    stride, size = math.prod(sizes[:level]), sizes[level]
    firsts = [d for d in range(math.prod(sizes)) if _digits(d, sizes)[level] == 0]
    return [tuple(first + i * stride for i in range(size)) for first in firsts]


def _work(phase: Phase, group: tuple[int, ...], sizes: tuple[int, ...], pieces: int, chunks: int) -> Work:
    """The pieces of owners that agree with the group on the `shares` inner levels, those of its first device first."""
    n = math.prod(sizes)
    mine = _digits(group[0], sizes)[: phase.shares]
    kept = [p for p in range(pieces) if _digits(p * n // pieces, sizes)[: phase.shares] == mine]
    kept.sort(key=lambda p: _digits(p * n // pieces, sizes)[phase.level])
    return Work(group, tuple(kept), chunks)


def _forward(phase: Phase, group: tuple[int, ...], sizes: tuple[int, ...]) -> list[Step]:
    """A pairwise exchange along one level, of all that has reached its target on the levels below."""
    n, level, count = math.prod(sizes), phase.level, len(group)

    def held(device: int) -> list[tuple[int, int]]:
        here = _digits(device, sizes)
        every = ((s, t) for s in range(n) for t in range(n))
        return [
            (s, t)
            for s, t in every
            if _digits(t, sizes)[:level] == here[:level] and _digits(s, sizes)[level:] == here[level:]
        ]

    def toward(source: int, target: int) -> Pieces:
        return tuple(s * n + t for s, t in held(source) if _digits(t, sizes)[level] == _digits(target, sizes)[level])

    turns = [[(d, group[(i + t) % count]) for i, d in enumerate(group)] for t in range(1, count)]
    return [tuple(Message(source, target, toward(source, target)) for source, target in turn) for turn in turns]


def _rings(kind: str, inside: int, hosts: int) -> list[Step]:
    """One ring for each device of a host: ring r leaves every host by its device r and enters the next at r + 1."""
    n = inside * hosts
    orders = [[h * inside + (r + 1 + i) % inside for h in range(hosts) for i in range(inside)] for r in range(inside)]
    rings = []
    for r, order in enumerate(orders):
        pieces = tuple(device * inside + r for device in order)  # piece r of each device's part
        work = Work(tuple(order), pieces, 1)
        reduce, gather = ring_reduce_scatter(work), ring_all_gather(work)
        rings.append({"reduce_scatter": reduce, "all_gather": gather, "all_reduce": [*reduce, *gather]}[kind])
    assert all(len(steps) == len(rings[0]) for steps in rings) and n == len(orders[0])
    return [_merged(sum(together, ())) for together in zip(*rings, strict=True)]


def _merged(messages: Step) -> Step:
    """Messages between the same two devices as one."""
    found: dict[tuple[int, int, bool], Pieces] = {}
    for m in messages:
        found[m.source, m.target, m.add] = found.get((m.source, m.target, m.add), ()) + m.pieces
    return tuple(Message(source, target, pieces, add) for (source, target, add), pieces in found.items())
