"""What a plan carries as its costs.

In: an emitted `Program`, its `Memory`, a cluster.  Out: seconds of a step by kind, bytes by kind.  Next: `timeline.py`.
"""

from __future__ import annotations

from autopar.axes import Axes
from autopar.cluster import ClusterSpec
from autopar.cost.memory import Memory
from autopar.cost.optimizer import state_copies
from autopar.cost.timeline import timeline
from autopar.graph import Graph
from autopar.program import Program


def bill(
    program: Program,
    held: Memory,
    graph: Graph,
    axes: Axes,
    cluster: ClusterSpec,
    *,
    optimizer: object,
    budget_bytes: float,
) -> dict[str, float]:
    """Seconds: of a step, and of its parts (`Timeline`); bytes: that stay on a device, at the peak, of the budget."""
    told = timeline(program, graph, axes, cluster, state_copies(optimizer))
    parts = ("step", "compute", "exposed", "communication", "optimizer", "overhead")
    seconds = {f"{part}_s": float(getattr(told, f"{part}_s")) for part in parts}
    kept = {f"{kind}_bytes": float(n) for kind, n in held.persistent.items()}
    return {**seconds, "peak_bytes": float(held.peak), "budget_bytes": float(budget_bytes), **kept}
