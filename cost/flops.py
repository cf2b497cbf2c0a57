"""Floating-point operations of a captured training step, as its rules count them.

In: a captured graph.  Out: `Flops` by phase and op.  Next: `compute.py`, which divides them by what a plan cuts.

A multiplication and an addition are two operations. Products of matrices, convolutions, attention and expert layers
count; what torch's `FlopCounterMode` leaves out (pointwise ops, reductions, lookups) counts nothing here either. The
numbers are those of the algorithm on whole tensors: a causal mask takes nothing off, padding is worked on like the
rest, and attention's backward makes its scores again, so that it is 2.5 times its forward (Dao et al. 2022).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.axes import computes
from autopar.graph import Graph
from autopar.rules.table import lookup


@dataclass(frozen=True)
class Flops:
    """Floating-point operations by (phase, op), "forward" or "backward" and the op as it prints."""

    by: Mapping[tuple[str, str], int]

    @property
    def total(self) -> int:
        return sum(self.by.values())

    def phase(self, name: str) -> int:
        """Of one phase."""
        return sum(n for (phase, _), n in self.by.items() if phase == name)

    def __str__(self) -> str:
        lines = [f"{phase:8}  {op:40} {n:20,}" for (phase, op), n in sorted(self.by.items())]
        return "\n".join([*lines, f"{'both':8}  {'':40} {self.total:20,}"])


def flops(graph: Graph) -> Flops:
    """Floating-point operations of one step on one device."""
    found: Counter[tuple[str, str]] = Counter()
    for node in graph.fx.nodes:
        if computes(node) and (work := work_of(node)):
            found[node.meta["phase"], str(node.target)] += work
    return Flops(dict(found))


def work_of(node: fx.Node) -> int:
    """Floating-point operations of one node: what the `flops=` of its rule makes of its sizes."""
    instance, _ = lookup(node)
    if instance.flops is None:
        return 0
    number, letters = instance.flops
    return round(number * math.prod(instance.sizes[x] for x in letters))
