"""The links of a cluster, and which of them a group of devices uses.

In: levels of a cluster file; a mesh axis as (stride, size).  Out: `Link`, `Topology`.  Next: `cluster.py`.

A cluster is a nest of levels: devices in a host, hosts in a rack, ... . `Topology` says how many devices of a group lie
in each level, and how many of them send through one physical link at a time:

    way(links, stride=1, size=16, devices=32)   # hosts of 8: 8 devices inside, 2 hosts across
    way(links, stride=8, size=4, devices=32)    # one device of the group a host: 4 hosts across, 8 groups at a time
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from autopar.device import Count, NotNegative, Positive, Strict

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv"]
Library = Literal["any", "nccl", "gloo"]


def wrong(at: str, text: str) -> PydanticCustomError:
    """An error at a place below the one that a check was written for."""
    return PydanticCustomError("place", "{text}", {"text": text, "at": at})


class Curve(Strict):
    """Measured seconds of one collective on `devices` devices: points (bytes at the larger end, seconds)."""

    collective: Collective
    devices: Annotated[int, Field(ge=2)]
    points: Annotated[tuple[tuple[Positive, Positive], ...], Field(min_length=1)]

    @field_validator("points")
    @classmethod
    def _ascend(cls, points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
        for index, ((before, _), (after, _)) in enumerate(pairwise(points), 1):
            if after <= before:
                raise wrong(str(index), f"bytes must ascend, but {after} follow {before}")
        return points

    def seconds(self, count: float) -> float:
        """Seconds of `count` bytes: straight between points in log-log, in bytes beyond the last, constant before."""
        points = self.points
        if count <= points[0][0]:
            return points[0][1]
        if count >= points[-1][0]:
            return points[-1][1] * count / points[-1][0]
        (x0, y0), (x1, y1) = next(pair for pair in pairwise(points) if count <= pair[1][0])
        return y0 * math.exp(math.log(y1 / y0) * math.log(count / x0) / math.log(x1 / x0))


class Link(Strict):
    """One level of the network.

    devices                   how many devices a group of this level has
    latency_s                 of one message
    bytes_per_s               of one physical link, in each direction
    shared_by                 neighbouring devices that use one such link: 8 where a host of 8 has one network card
    start_s                   of any collective on this level before its first byte
    in_network_bytes_per_s    of a device in an all-reduce whose sums the switch makes (NVLink SHARP); None: it cannot
    measured                  curves that hold instead of the formulas, for their collective and number of devices
    """

    devices: Count
    latency_s: NotNegative
    bytes_per_s: Positive
    shared_by: Count = 1
    start_s: NotNegative = 0.0
    in_network_bytes_per_s: Positive | None = None
    measured: tuple[Curve, ...] = ()

    def __hash__(self) -> int:  # without the curves, which are long
        return hash((self.devices, self.latency_s, self.bytes_per_s, self.shared_by, self.start_s))


@dataclass(frozen=True)
class Level:
    """A level that a group spans.

    devices   how many groups of the level below (single devices on the first) it joins
    link      its link
    behind    devices of the group behind one physical link
    groups    groups that use one physical link at a time, each with as many devices
    """

    devices: int
    link: Link
    behind: int = 1
    groups: int = 1


@dataclass(frozen=True)
class Topology:
    """The levels that a group spans, innermost first; curves measured on such a group; the library that moves bytes."""

    levels: tuple[Level, ...] = ()
    measured: tuple[Curve, ...] = ()
    library: Library = "any"

    @cached_property
    def devices(self) -> int:
        """Devices of the group."""
        return math.prod(level.devices for level in self.levels)

    @cached_property
    def _hash(self) -> int:
        return hash((self.levels, self.measured, self.library))

    def __hash__(self) -> int:  # it is a key for every price
        return self._hash


def alone(link: Link, devices: int, library: Library = "any") -> Topology:
    """The topology of `devices` devices on one level of which nobody else uses the links."""
    if devices == 1:
        return Topology(library=library)
    level = Level(devices, link, behind=min(link.shared_by, devices))
    return Topology((level,), _curves(link, devices), library)


@lru_cache(maxsize=1 << 12)
def way(links: tuple[Link, ...], stride: int, size: int, devices: int, library: Library = "any") -> Topology:
    """The topology of groups of `size` devices that are `stride` apart, on a cluster of `devices` devices.

    Where groups do not fill blocks of a level alike (6 devices over hosts of 4), the whole group is taken to use the
    slowest level on its way, as if each of its devices were alone behind a link.
    """
    if size == 1:
        return Topology(library=library)
    counts = [_members(_reach(links, i, devices), stride, size) for i in range(len(links))]
    first = next((i for i, c in enumerate(counts) if c == size), len(links) - 1)
    if 0 in counts[:first] or counts[first] != size:
        link = links[first]
        return Topology((Level(size, link, 1, min(link.shared_by, devices)),), _curves(link, size), library)
    levels, inside = [], 1
    for link, count in zip(links[: first + 1], counts):
        if count > inside:
            shared = min(link.shared_by, devices)
            behind = _members(shared, stride, size) or 1
            levels.append(Level(count // inside, link, behind, max(1, shared // behind)))
            inside = count
    below = links[first - 1].devices if first else 1
    within = counts[first - 1] if first else 1
    usual = within == (1 if size <= below else below)  # how a curve of so many devices is measured
    return Topology(tuple(levels), _curves(links[first], size) if usual else (), library)


def _curves(link: Link, devices: int) -> tuple[Curve, ...]:
    return tuple(curve for curve in link.measured if curve.devices == devices)


def _reach(links: tuple[Link, ...], index: int, devices: int) -> int:
    return devices if index == len(links) - 1 else min(links[index].devices, devices)


def _members(block: int, stride: int, size: int) -> int:
    """Devices of each group within each aligned block that it meets; 0 where that is not one number."""
    if block <= stride:
        return 1 if stride % block == 0 else 0
    inside, rest = divmod(block, stride)
    if rest:
        return 0
    return size if inside % size == 0 else inside if size % inside == 0 else 0
