"""From a graph and a plan to the program that every rank runs.

In: a captured graph, its axes, a plan.  Out: a `Program`, and its `Bound` form for one rank.  Next: any pass.
"""

from __future__ import annotations

from autopar.axes import Axes
from autopar.graph import Graph
from autopar.passes.bind import Bound, BoundStage, bind, bind_stage, lowered
from autopar.passes.copy_views import copy_views
from autopar.passes.cut_stages import cut_stages
from autopar.passes.expand_local import expand_local
from autopar.passes.insert_conversions import insert_conversions
from autopar.passes.split_phases import split_phases
from autopar.passes.verify import verify
from autopar.plan import Plan
from autopar.program import Program
from autopar.uncollected import uncollected

PIPELINE = (insert_conversions, expand_local)


@uncollected()
def emit(graph: Graph, axes: Axes, plan: Plan) -> Program:
    """The program of `plan`; the graph is left as it was."""
    for step in PIPELINE:
        graph = verify(step(graph, axes, plan), after=step.__name__)
    return cut_stages(split_phases(graph, axes, plan))


__all__ = [
    "PIPELINE",
    "Bound",
    "BoundStage",
    "bind",
    "bind_stage",
    "copy_views",
    "cut_stages",
    "emit",
    "expand_local",
    "insert_conversions",
    "lowered",
    "split_phases",
    "verify",
]
