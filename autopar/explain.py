"""What a collective costs on a cluster, and why: formulas, the algorithm chosen by size, a plot.

In: a collective, a cluster.  Out: text, or the same as plain data.  Next: `cost/comm.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import sympy

from autopar.cluster import ClusterSpec
from autopar.cost.algorithms import ALGORITHMS, expression
from autopar.cost.comm import Candidate, Choice, bus_bytes, candidates, choose
from autopar.errors import InputError
from autopar.links import Topology

SIZES = tuple(2**i for i in range(10, 35, 2))  # 1 KiB to 16 GiB
BAR = 40


@dataclass(frozen=True)
class Crossover:
    """From `bytes` on, algorithm `after` is cheaper than `before`."""

    bytes: int
    before: str
    after: str


@dataclass(frozen=True)
class Explained:
    """A collective over all devices of a cluster."""

    collective: str
    cluster: ClusterSpec
    topology: Topology

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The algorithms that exist there."""
        return candidates(self.collective, self.topology)

    def choice(self, count: int) -> Choice:
        """What is chosen for so many bytes."""
        return choose(self.collective, count, self.topology)

    def crossovers(self) -> list[Crossover]:
        """Bytes at which the choice changes, each found by halving between two powers of two."""
        found, edges = [], [2**i for i in range(SIZES[0].bit_length() - 1, SIZES[-1].bit_length())]
        for low, high in pairwise(edges):
            before, after = self.choice(low).name, self.choice(high).name
            while before != after and high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self.choice(middle).name == before else (low, middle)
            if before != after:
                found.append(Crossover(high, before, self.choice(high).name))
        return found

    def json(self) -> dict[str, Any]:
        """As plain data; seconds and bytes."""
        levels = [
            {"devices": x.devices, "behind": x.behind, "groups": x.groups, **x.link.model_dump(exclude={"devices"})}
            for x in self.topology.levels
        ]
        return {
            "collective": self.collective,
            "cluster": self.cluster.name,
            "devices": self.topology.devices,
            "library": self.cluster.library,
            "levels": levels,
            "algorithms": [{"name": x.algorithm.name, "formula": str(self._formula(x))} for x in self.candidates],
            "choices": [
                {"bytes": size, **asdict(self.choice(size)), "bus_bytes_per_s": self._bus(size)} for size in SIZES
            ],
            "crossovers": [asdict(crossover) for crossover in self.crossovers()],
        }

    def text(self) -> str:
        """For people: levels, formulas, choices with a bar as long as the bus bandwidth, crossovers."""
        lines = [f"{self.collective} on {self.topology.devices} devices of {self.cluster.name}, {self.cluster.library}"]
        lines += [f"  level {i}: {_level(self.topology, i - 1)}" for i in range(1, len(self.topology.levels) + 1)]
        for candidate in self.candidates:
            lines += [
                "",
                f"{candidate.algorithm.name} [s] =",
                _indented(sympy.pretty(self._formula(candidate), num_columns=110)),
            ]
        lines += ["", f"{'bytes':>9} {'seconds':>11} {'bus GB/s':>9}"]
        most = max(self._bus(size) for size in SIZES)
        for size in SIZES:
            choice, bus = self.choice(size), self._bus(size)
            name = choice.name + (f" in {choice.chunks} chunks" if choice.chunks > 1 else "")
            bar = "#" * round(BAR * bus / most)
            lines.append(f"{_bytes(size):>9} {choice.seconds:>11.3g} {bus / 1e9:>9.3g}  {bar:<{BAR}}  {name}")
        lines += ["", *(f"from {x.bytes} bytes on: {x.after} instead of {x.before}" for x in self.crossovers())]
        return "\n".join(lines).rstrip() + "\n" + LEGEND

    def _formula(self, candidate: Candidate) -> sympy.Expr:
        return expression(candidate.algorithm, len(self.topology.levels))

    def _bus(self, size: int) -> float:
        return bus_bytes(self.collective, size, self.topology.devices) / self.choice(size).seconds


LEGEND = (
    "\nb bytes, n devices, a latency, w bytes/s of a device, s start, c chunks, k = floor(log2 n), l = ceil(log2 n),\n"
    "f steps of the first chunk down two trees, v bytes/s where the switch adds; 1 is the innermost level"
)


def explain(collective: str, cluster: ClusterSpec) -> Explained:
    """A collective over all devices of a cluster; `InputError` for one that does not exist, or a single device."""
    if collective not in ALGORITHMS:
        raise InputError(f"no collective {collective!r}; there are {', '.join(ALGORITHMS)}")
    if cluster.devices == 1:
        raise InputError(f"{cluster.name} has 1 device, which moves nothing; give more devices")
    return Explained(collective, cluster, cluster.way(1, cluster.devices))


def _level(topology: Topology, index: int) -> str:
    level = topology.levels[index]
    link, sharing = level.link, level.behind * level.groups
    text = f"{level.devices} {'devices' if index == 0 else 'groups'}, latency {link.latency_s * 1e6:g} us"
    text += f", start {link.start_s * 1e6:g} us" if link.start_s else ""
    text += f", {link.bytes_per_s / 1e9:g} GB/s" + (f" for {sharing} devices" if sharing > 1 else "")
    return text + (f", {link.in_network_bytes_per_s / 1e9:g} GB/s where it adds" if link.in_network_bytes_per_s else "")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count / 2**10:g} KiB"
