"""Seconds of a collective: the cheapest algorithm for its bytes and the links it uses, or what was measured.

In: `Step`s of a conversion, a cluster.  Out: seconds.  Next: `algorithms.py`, `compute.py`.

Every price is computed once: planning asks for the same ones hundreds of thousands of times.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

from autopar.cluster import ClusterSpec
from autopar.cost.algorithms import Algorithm, function, known
from autopar.cost.staging import staging_elements
from autopar.cost.trees import first_chunk_steps
from autopar.layout import MICRO, Mesh, Step
from autopar.links import Link, Topology, alone

CHUNKS = tuple(2**i for i in range(13))  # numbers of chunks that a pipelined algorithm may use


@dataclass(frozen=True)
class Choice:
    """How a collective is carried out, in how many chunks, and the seconds it takes."""

    name: str
    chunks: int
    seconds: float


@dataclass(frozen=True)
class Candidate:
    """An algorithm on one topology: seconds as a function of bytes and chunks."""

    algorithm: Algorithm
    formula: Callable[..., float]
    values: tuple[float, ...]

    def seconds(self, count: float, chunks: int = 1) -> float:
        """Seconds of `count` bytes in so many chunks."""
        return float(self.formula(count, chunks, *self.values))

    def best(self, count: float) -> Choice:
        """The cheapest number of chunks; seconds have one minimum over it."""
        chunks, seconds = 1, self.seconds(count)
        for more in CHUNKS[1:] if self.algorithm.chunked else ():
            if (found := self.seconds(count, more)) >= seconds:
                break
            chunks, seconds = more, found
        return Choice(self.algorithm.name, chunks, seconds)


@cache
def candidates(kind: str, topology: Topology) -> tuple[Candidate, ...]:
    """The algorithms of a collective that a topology and its library allow."""
    sizes = tuple(level.devices for level in topology.levels)
    used = topology.levels[-1:] if kind == "send_recv" else topology.levels
    start = max((level.link.start_s for level in used), default=0.0)
    found = []
    for algorithm in known(kind, topology.library) if sizes else ():
        if not algorithm.exists(sizes):
            continue
        if algorithm.outer == "in_network" and topology.levels[-1].link.in_network_bytes_per_s is None:
            continue
        at = _flat(algorithm, topology) if algorithm.style == "flat" else _nested(algorithm, topology)
        found.append(Candidate(algorithm, function(algorithm, len(sizes)), (start, *at)))
    return tuple(found)


def choose(kind: str, count: float, topology: Topology) -> Choice:
    """The cheapest way for a collective of `count` bytes (at its larger end); a measured curve goes before all."""
    for curve in topology.measured:
        if curve.collective == kind:
            return Choice("measured", 1, curve.points.at(count))
    found = (candidate.best(count) for candidate in candidates(kind, topology))
    return min(found, key=lambda choice: choice.seconds, default=Choice("none", 1, 0.0))


@lru_cache(maxsize=1 << 17)
def seconds(kind: str, count: float, topology: Topology) -> float:
    """Seconds of the cheapest way for a collective of `count` bytes at its larger end; 0 for one device."""
    return choose(kind, count, topology).seconds


def bus_bytes(kind: str, count: float, devices: int) -> float:
    """Bytes that a collective of `count` bytes has to bring through each device's link (nccl-tests, PERFORMANCE.md)."""
    if kind in ("broadcast", "send_recv"):
        return count
    return (2 if kind == "all_reduce" else 1) * (devices - 1) / devices * count


def collective_s(kind: str, local_bytes: float, devices: int, link: Link) -> float:
    """Seconds of one collective on devices that one link joins; `local_bytes` at the larger end of it."""
    return seconds(kind, local_bytes, alone(link, devices))


def step_s(step: Step, itemsize: int, mesh: Mesh, cluster: ClusterSpec) -> float:
    """Seconds of one step of a conversion; what moves nothing between devices costs a pass over its result.

    So does a slice that is one run of memory, or it would be cheaper behind a view than before it.
    """
    before, after = step.before.local_numel(mesh) * itemsize, step.after.local_numel(mesh) * itemsize
    if step.free or step.axis == MICRO:
        return pass_s(2 * after, cluster)
    packed = staging_elements(step, mesh) * itemsize
    copying = pass_s(2 * packed, cluster) if packed else 0.0
    return copying + axis_s(step.kind, max(before, after), step.axis, mesh, cluster)


def axis_s(kind: str, count: float, axis: str, mesh: Mesh, cluster: ClusterSpec) -> float:
    """Seconds of one collective of `count` bytes along a mesh axis."""
    return cluster.crowding * cluster.device.launch_s + seconds(kind, count, cluster.topology(mesh, axis))


def pass_s(touched_bytes: float, cluster: ClusterSpec) -> float:
    """Seconds of a copy, which reads and writes."""
    device = cluster.device
    return cluster.crowding * (device.launch_s + touched_bytes / device.memory_bytes_per_s)


def steps_s(steps: tuple[Step, ...], itemsize: int, mesh: Mesh, cluster: ClusterSpec) -> float:
    """Seconds of a whole conversion."""
    return sum((step_s(step, itemsize, mesh, cluster) for step in steps), 0.0)


def _flat(algorithm: Algorithm, topology: Topology) -> list[float]:
    """All devices as one level: its latency is the largest on the way, its bandwidth the smallest.

    In a ring only one device of each inner group sends out of it. In step i of a pairwise exchange min(i, m, n - i) of
    m neighbouring devices do, on average m (n - m) / (n - 1).
    """
    inside, bandwidth, n = 1, math.inf, topology.devices
    for level in topology.levels:
        sending: float = math.ceil(level.behind / inside)
        if algorithm.outer == "pairwise":
            sending = level.behind * (n - min(level.behind, inside)) / (n - 1)
        bandwidth = min(bandwidth, level.link.bytes_per_s / (level.groups * sending))
        inside *= level.devices
    return _values(n, max(level.link.latency_s for level in topology.levels), bandwidth, topology.levels[-1].link)


def _nested(algorithm: Algorithm, topology: Topology) -> list[float]:
    """Level by level. All devices of the cluster send at a time, but in a broadcast one of each inner group."""
    values, inside = [], 1
    for level in topology.levels:
        behind = math.ceil(level.behind / inside) if algorithm.collective == "broadcast" else level.behind
        bandwidth = level.link.bytes_per_s / (level.groups * behind)
        values += _values(level.devices, level.link.latency_s, bandwidth, level.link)
        inside *= level.devices
    return values


def _values(devices: int, latency: float, bandwidth: float, link: Link) -> list[float]:
    """Values of the symbols of one level, in the order of `LEVEL_SYMBOLS`."""
    low, high = devices.bit_length() - 1, (devices - 1).bit_length()
    adds = link.in_network_bytes_per_s or math.inf
    return [devices, low, high, first_chunk_steps(devices), latency, bandwidth, adds]
