"""Two binary trees over the same devices, and the step in which each of their edges is used.

In: a number of devices.  Out: `timetable`.  Next: `schedules.py`.

Sanders, Speck & Traff 2009: a device that is inside one tree is a leaf of the other (or has one child in each), so in
both together it sends to at most two and receives from at most two. Colour the edges with 0 and 1, so that the two that
leave a device differ and the two that enter it differ; an edge of colour x then works in the steps x, x + 2, x + 4, ...
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Edge:
    """From `parent` to `child` in tree 0 or 1; `step` is when the first chunk uses it on its way down."""

    tree: int
    parent: int
    child: int
    step: int


def parents(devices: int) -> dict[int, int]:
    """The in-order binary tree over 0 .. devices - 1 with 0 on top: odd numbers are leaves."""
    found = {}
    for device in range(1, devices):
        low = device & -device
        above = (device ^ low) | (2 * low)
        found[device] = above if above < devices else device ^ low
    return found


def two_trees(devices: int) -> list[tuple[int, int, int]]:
    """(tree, parent, child): the tree, and its mirror image (an even number of devices) or itself one further."""
    one = parents(devices)
    other = [devices - 1 - x if devices % 2 == 0 else (x + 1) % devices for x in range(devices)]
    return [(0, p, d) for d, p in one.items()] + [(1, other[p], other[d]) for d, p in one.items()]


def colours(edges: list[tuple[int, int, int]]) -> dict[tuple[int, int, int], int]:
    """0 or 1 for every edge. Conflicts alternate between both ends of an edge, so they form no odd circle."""
    at = defaultdict(list)
    for edge in edges:
        at["from", edge[1]].append(edge)
        at["to", edge[2]].append(edge)
    found: dict[tuple[int, int, int], int] = {}
    for first in edges:
        waiting = [(first, found.get(first, 0))]
        while waiting:
            edge, colour = waiting.pop()
            if edge not in found:
                found[edge] = colour
                waiting += [
                    (other, 1 - colour) for other in (*at["from", edge[1]], *at["to", edge[2]]) if other != edge
                ]
    return found


@cache
def timetable(devices: int) -> tuple[Edge, ...]:
    """Every edge of both trees with the step of its first chunk."""
    edges = two_trees(devices)
    colour = colours(edges)
    above = {(tree, child): (tree, parent, child) for tree, parent, child in edges}
    step: dict[tuple[int, int], int] = {}

    def arrives(tree: int, device: int) -> int:
        if (tree, device) not in above:
            return -1
        if (tree, device) not in step:
            edge = above[tree, device]
            after = arrives(tree, edge[1]) + 1
            step[tree, device] = after + (after + colour[edge]) % 2
        return step[tree, device]

    return tuple(Edge(*edge, arrives(edge[0], edge[2])) for edge in edges)


def first_chunk_steps(devices: int) -> int:
    """Steps in which the first chunk of either tree moves, until all devices have it."""
    return len({edge.step for edge in timetable(devices)}) if devices > 1 else 0
