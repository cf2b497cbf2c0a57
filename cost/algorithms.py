"""How collectives are carried out, each way written once as an expression in seconds.

In: nothing.  Out: `ONE_LEVEL`, `Algorithm`, `expression`.  Next: `comm.py`, `schedules.py`.

On one level, `n` devices take part, `b` is the bytes of the whole tensor on a device (the larger end), `a` the latency
of a message, `w` bytes per second and direction of a device, `c` the number of chunks where a way is pipelined. In each
step a device sends at most one message and receives at most one; a step takes `a` plus its bytes over `w`.

ring                  Patarasuk & Yuan 2009; also how NCCL and gloo do it
halving_doubling      Thakur, Rabenseifner & Gropp 2005: partners at distance n/2, n/4, ..., 1 swap halves. With
                      n = 2^k + r devices, r give all they have to a partner first and get the result last
tree                  Sanders, Speck & Traff 2009: two binary trees, each for half of the bytes in c chunks, a device
                      inside one of them is a leaf of the other. All chunks go up, then down. An edge is used every
                      second step, so that no device sends twice in one; `f` steps bring the first chunk to all
in_network            the switch adds (NVLink SHARP): a chunk goes up while the sum of the chunk before comes down,
                      `v` bytes per second
chain                 broadcast from neighbour to neighbour, pipelined
binomial              broadcast in which all that have the tensor send it on, in `l` = ceil(log2 n) steps

Over several levels (numbered from the innermost: n1, a1, w1, n2, ...) an `Algorithm` is a list of phases:

hierarchical          inside, then across, then inside again: an all-reduce is a reduce-scatter inside, an all-reduce of
                      1/n1 of the bytes across, an all-gather inside
rings                 n1 rings over all devices, each of which leaves every host by another device, so that all network
                      cards are in use; this is what NCCL calls channels
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import sympy

n, b, a, w, c, k, l, f, v, s = sympy.symbols("n b a w c k l f v s", positive=True)  # noqa: E741

_ring = (n - 1) * (a + b / n / w)
_halving = k * a + (n - 1) / n * b / w
_p = 2**k
ONE_LEVEL: dict[str, dict[str, sympy.Expr]] = {
    "all_reduce": {
        "ring": 2 * _ring,
        "halving_doubling": 2 * (sympy.Min(1, n - _p) * (a + b / w) + k * a + (_p - 1) / _p * b / w),
        "tree": 2 * (sympy.Min(2, n - 1) * (c - 1) + f) * (a + b / (2 * c * w)),
        "in_network": (c + 1) * (a + b / (c * v)),
    },
    "reduce_scatter": {"ring": _ring, "halving": _halving},
    "all_gather": {"ring": _ring, "doubling": _halving},
    "all_to_all": {"pairwise": _ring},
    "broadcast": {"chain": (n - 2 + c) * (a + b / (c * w)), "binomial": l * (a + b / w)},
    "send_recv": {"direct": a + b / w},
}
CHUNKED = ("tree", "in_network", "chain")
POWERS_OF_TWO = ("halving", "doubling")  # of 2^k devices only; k = floor(log2 n)
ANY_LEVELS = ("ring", "pairwise", "direct")  # flat also over several levels; others then are phases of a nested one
OPPOSITE = {"ring": "ring", "halving": "doubling"}

Style = Literal["flat", "hierarchical", "rings"]


@dataclass(frozen=True)
class Algorithm:
    """A collective in one style: `outer` is what the outermost level does (the only one when flat), `inner` the others.

    Of an all-reduce, `inner` is the way of the reduce-scatter; the all-gather goes the opposite way.
    """

    collective: str
    style: Style
    outer: str
    inner: str = ""

    @property
    def name(self) -> str:
        """As it is printed: `ring`, or `hierarchical(ring, tree)` from the inside out."""
        return f"hierarchical({self.inner}, {self.outer})" if self.style == "hierarchical" else self.outer

    @property
    def chunked(self) -> bool:
        """Whether it has a number of chunks to choose."""
        return self.outer in CHUNKED or self.inner in CHUNKED

    def exists(self, sizes: tuple[int, ...]) -> bool:
        """Whether there is one for levels of these sizes."""
        if self.style == "flat" and (len(sizes) == 1 or self.outer in ANY_LEVELS):
            ways: tuple[str, ...] = (self.outer,)
            sizes = (math.prod(sizes),)
        elif (self.style == "hierarchical" and len(sizes) > 1) or (self.style == "rings" and len(sizes) == 2):
            ways = (*(self.inner for _ in sizes[1:]), self.outer)
        else:
            return False
        return all(way not in POWERS_OF_TWO or size & (size - 1) == 0 for way, size in zip(ways, sizes, strict=True))


@dataclass(frozen=True)
class Phase:
    """A collective on every group of one level, on 1 / (product of the sizes of `shares` inner levels) of the bytes."""

    collective: str
    way: str
    level: int
    shares: int


def phases(algorithm: Algorithm, levels: int) -> list[Phase]:
    """What a hierarchical algorithm does, one after the other."""
    kind, inside, top = algorithm.collective, range(levels - 1), levels - 1
    shares = 0 if kind in ("all_to_all", "broadcast") else top
    across = [Phase(kind, algorithm.outer, top, shares)]
    if kind == "all_reduce":
        down = [Phase("reduce_scatter", algorithm.inner, i, i) for i in inside]
        up = [Phase("all_gather", OPPOSITE[algorithm.inner], i, i) for i in reversed(inside)]
        return [*down, *across, *up]
    single = [Phase(kind, algorithm.inner, i, i if shares else 0) for i in inside]
    return [*across, *reversed(single)] if kind in ("all_gather", "broadcast") else [*single, *across]


def at(symbol: sympy.Symbol, level: int) -> sympy.Symbol:
    """The symbol of one of several levels: n1, a1, w1 belong to the innermost."""
    return sympy.Symbol(f"{symbol.name}{level + 1}", positive=True)


def expression(algorithm: Algorithm, levels: int) -> sympy.Expr:
    """Seconds of an algorithm over so many levels, `s` before the first byte included."""
    if algorithm.style == "flat":
        return s + ONE_LEVEL[algorithm.collective][algorithm.outer]
    if algorithm.style == "rings":
        return s + _rings(algorithm.collective)
    return s + sum((_phase(p) for p in phases(algorithm, levels)), sympy.Integer(0))


def _phase(phase: Phase) -> sympy.Expr:
    share = sympy.prod([at(n, i) for i in range(phase.shares)])
    put = {x: at(x, phase.level) for x in LEVEL_SYMBOLS}
    return ONE_LEVEL[phase.collective][phase.way].subs({**put, b: b / share}, simultaneous=True)


def _rings(kind: str) -> sympy.Expr:
    """All devices in n1 rings: in a step a device sends n1 - 1 pieces to its neighbour inside, one across."""
    (g, a1, w1), (m, a2, w2) = ([at(x, level) for x in (n, a, w)] for level in (0, 1))
    piece = b / (g * m) / g
    hops = (2 if kind == "all_reduce" else 1) * (g * m - 1)
    return hops * sympy.Max(a1 + (g - 1) * piece / w1, a2 + piece / w2)


LEVEL_SYMBOLS = (n, k, l, f, a, w, v)


@cache
def function(algorithm: Algorithm, levels: int) -> Callable[..., float]:
    """An expression as a function of (b, c, s, then `LEVEL_SYMBOLS` of every level)."""
    count = 1 if algorithm.style == "flat" else levels
    symbols = [x if algorithm.style == "flat" else at(x, i) for i in range(count) for x in LEVEL_SYMBOLS]
    made: Any = sympy.lambdify((b, c, s, *symbols), expression(algorithm, levels), "math", cse=True)
    return made  # type: ignore[no-any-return]


def _flat(kind: str) -> list[Algorithm]:
    return [Algorithm(kind, "flat", way) for way in ONE_LEVEL[kind]]


def _hierarchical(kind: str, *ways: str) -> list[Algorithm]:
    return [Algorithm(kind, "hierarchical", way, way) for way in ways]


def _scattered(kind: str, recursive: str) -> tuple[Algorithm, ...]:
    return (*_flat(kind), Algorithm(kind, "rings", "rings"), *_hierarchical(kind, "ring", recursive))


ALGORITHMS: dict[str, tuple[Algorithm, ...]] = {
    "all_reduce": (
        *_flat("all_reduce"),
        Algorithm("all_reduce", "rings", "rings"),
        *(Algorithm("all_reduce", "hierarchical", top, way) for way in OPPOSITE for top in ONE_LEVEL["all_reduce"]),
    ),
    "reduce_scatter": _scattered("reduce_scatter", "halving"),
    "all_gather": _scattered("all_gather", "doubling"),
    "all_to_all": (*_flat("all_to_all"), *_hierarchical("all_to_all", "pairwise")),
    "broadcast": (*_flat("broadcast"), *_hierarchical("broadcast", "chain", "binomial")),
    "send_recv": tuple(_flat("send_recv")),
}

# What a library is known to do, by name; "any" does everything. NCCL: src/graph/tuning.cc, where trees span hosts and
# are chains inside; here their inside is a ring's. gloo, as torch calls it: gloo/allreduce.cc, gloo/broadcast.cc.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "nccl": (
        "ring",
        "rings",
        "tree",
        "in_network",
        "hierarchical(ring, tree)",
        "pairwise",
        "chain",
        "hierarchical(chain, chain)",
        "direct",
    ),
    "gloo": ("ring", "pairwise", "binomial", "hierarchical(binomial, binomial)", "direct"),
}


def known(collective: str, library: str) -> tuple[Algorithm, ...]:
    """The algorithms of a collective that a library may pick from."""
    every = ALGORITHMS[collective]
    return every if library == "any" else tuple(x for x in every if x.name in LIBRARIES[library])
