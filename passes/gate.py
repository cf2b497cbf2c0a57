"""Let what needs no other rank run before something is known about all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from autopar.reduce_scatter import SUMMED


@dataclass(eq=False)
class Gate:
    """What is waited for before a program's first collective: given for a run, done once."""

    pending: Callable[[], object] | None = None

    def passing(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending()


def insert_gate(graph: fx.Graph, gate: Gate) -> fx.Graph:
    """Wait at the gate before the first collective.

        %h = mm(%x, %w);  %s = all_reduce(%h)
    becomes
        %h = mm(%x, %w);  passing();  %s = all_reduce(%h)

    Needs: a bound graph.  Leaves: the same values.
    """
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") == "_c10d_functional" or node.target is SUMMED:
            with graph.inserting_before(node):
                graph.call_function(gate.passing)
            break
    return graph
