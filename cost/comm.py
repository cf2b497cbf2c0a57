"""Seconds of a collective, from the bytes it moves and the link it uses.

In: `Step`s of a conversion, a cluster.  Out: seconds.  Next: `compute.py`.

Every formula is written once, as a sympy expression that prints and that tests can take apart, and is made a plain
function on first use. `n` devices of a group, `b` bytes of the whole local tensor (the larger end of the step), latency
`a` per message, `w` bytes per second and direction. Rings: Patarasuk & Yuan 2009.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import sympy

from autopar.cluster import ClusterSpec, Link
from autopar.layout import MICRO, Mesh, Step

n, b, a, w = sympy.symbols("n b a w", positive=True)

SECONDS: dict[str, sympy.Expr] = {
    "all_reduce": 2 * (n - 1) * a + 2 * (n - 1) / n * b / w,
    "all_gather": (n - 1) * a + (n - 1) / n * b / w,
    "reduce_scatter": (n - 1) * a + (n - 1) / n * b / w,
    "all_to_all": (n - 1) * a + (n - 1) / n * b / w,
}


@cache
def formula(kind: str) -> Callable[[float, float, float, float], float]:
    """The formula of a collective as a function of (n, b, a, w)."""
    function: Callable[[float, float, float, float], float] = sympy.lambdify((n, b, a, w), SECONDS[kind], "math")
    return function


def collective_s(kind: str, local_bytes: float, devices: int, link: Link) -> float:
    """Seconds of one collective; `local_bytes` at the larger end of it."""
    return float(formula(kind)(devices, local_bytes, link.latency_s, link.bytes_per_s))


def step_s(step: Step, itemsize: int, mesh: Mesh, cluster: ClusterSpec) -> float:
    """Seconds of one step of a conversion; what moves nothing between devices costs a pass over its result."""
    before, after = step.before.local_numel(mesh) * itemsize, step.after.local_numel(mesh) * itemsize
    if step.free or step.axis == MICRO:
        return cluster.device.launch_s + after / cluster.device.memory_bytes_per_s
    return axis_s(step.kind, max(before, after), step.axis, mesh, cluster)


def axis_s(kind: str, local_bytes: float, axis: str, mesh: Mesh, cluster: ClusterSpec) -> float:
    """Seconds of one collective along a mesh axis."""
    return cluster.device.launch_s + collective_s(kind, local_bytes, mesh.size(axis), cluster.link(mesh, axis))


def steps_s(steps: tuple[Step, ...], itemsize: int, mesh: Mesh, cluster: ClusterSpec) -> float:
    """Seconds of a whole conversion."""
    return sum((step_s(step, itemsize, mesh, cluster) for step in steps), 0.0)
