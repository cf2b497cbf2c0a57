"""From a MODEL on the command line to a plan and everything that led to it.

In: a target, a cluster, options.  Out: `Made`.  Next: `dump.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar import _torch
from autopar.api import Compiler
from autopar.axes import Axes
from autopar.cluster import ClusterSpec
from autopar.cost.optimizer import STATE_COPIES
from autopar.cost.timeline import Timeline, timeline
from autopar.graph import Graph
from autopar.passes import emit
from autopar.pins import NONE, Pins
from autopar.plan import Plan
from autopar.verify.target import Built, Target


@dataclass(frozen=True)
class Made:
    """A plan with what it was made from."""

    graph: Graph
    axes: Axes
    plan: Plan
    cluster: ClusterSpec
    strategy: Any = None
    pins: Pins = NONE

    def timeline(self) -> Timeline:
        """When everything happens in a step of it."""
        program = emit(self.graph, self.axes, self.plan)
        return timeline(program, self.graph, self.axes, self.cluster, STATE_COPIES["AdamW"])


def plan_target(
    target: Target,
    cluster: ClusterSpec,
    *,
    strategy: Any = None,
    pins: Pins = NONE,
    memory_bytes: float | None = None,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Made:
    """Capture and plan; nothing is allocated, unless building the model asks for values."""
    compiler = Compiler(
        cluster, strategy=strategy, pins=pins, memory_bytes=memory_bytes, time_limit=time_limit, seed=seed
    )
    progress("capturing")
    built = built_from(target)
    graph = compiler.graph(built.model, built.args, built.kwargs)
    progress(f"planning {len(graph.fx.nodes)} operations")
    plan = compiler.made(graph, frozenset(), None)
    return Made(graph, compiler.axes(graph), plan, cluster, strategy, pins)


def built_from(target: Target) -> Built:
    """The model on fake tensors, or a real one where its constructor reads values (rates by `linspace(...).item()`)."""
    try:
        with _torch.fake_mode():
            return target.build()
    except _torch.DataDependent:
        return target.build()
