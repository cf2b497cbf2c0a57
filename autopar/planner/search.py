"""The search around the integer programme: over meshes, and over points in time at which memory is watched.

In: a graph, a cluster, a budget, a strategy.  Out: the best `Plan`, and why every other lost.  Next: `program.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from autopar.axes import Axes, analyse
from autopar.cluster import ClusterSpec
from autopar.cost.memory import Memory
from autopar.cost.price import price
from autopar.errors import NoPlan, UnsupportedError
from autopar.graph import Graph
from autopar.layout import Mesh
from autopar.plan import ParameterPlan, Plan
from autopar.planner.budget import Budgeted, Smallest
from autopar.planner.program import Programme
from autopar.planner.units import FREE, Problem, problem

NAMES = ("data", "model")

BUCKET_BYTES = 25 * 2**20
BUCKET_COPIES = 6  # a bucket of up to twice its size: what goes in, what is sent, what arrives


def meshes(devices: int, axes: int = 2) -> list[Mesh]:
    """Every mesh of up to two axes; one axis of all devices first."""
    found = [Mesh(NAMES[:1], (devices,))]
    if axes > 1:
        found += [Mesh(NAMES, (devices // n, n)) for n in range(2, devices) if devices % n == 0]
    return found


def plan(
    graph: Graph,
    cluster: ClusterSpec,
    *,
    mesh: Mesh | None = None,
    strategy: Any = None,
    memory_bytes: float | None = None,
    optimizer: Any = "AdamW",
    time_limit: float = 60,
    seed: int = 0,
    axes: Axes | None = None,
    local: Iterable[str] = (),
    fold: bool = True,
    stored: Mapping[str, ParameterPlan] | None = None,
) -> Plan:
    """The fastest plan that fits.

    graph         as `passes.copy_views` leaves it
    mesh          plan on this mesh only; otherwise on every factorisation of the devices into one or two axes
    strategy      from `autopar.strategies`
    memory_bytes  budget of one device; by default the cluster's
    optimizer     its class, name, or the number of parameter-sized tensors in its state
    local         names of input nodes that arrive cut along dim 0
    stored        parameters that are kept in a given way already (by first name); needs their mesh
    stored        parameters that are kept in one way already (another program of the same module decided so)

    Raises NoPlan if nothing fits, UnsupportedError if the strategy cannot be followed.
    """
    axes = analyse(graph) if axes is None else axes
    budget = cluster.memory_bytes if memory_bytes is None else memory_bytes
    found, certificate, refused = None, [], None
    candidates = [mesh] if mesh is not None else meshes(cluster.devices)
    if strategy is not None:
        candidates = [strategy.mesh(cluster.devices)] if mesh is None else [mesh]
    started = time.monotonic()
    for candidate in candidates:
        restriction = FREE if strategy is None else strategy.restriction(graph, axes, candidate)
        restriction = replace(restriction, stored=MappingProxyType(dict(stored or {})))
        made = problem(graph, axes, candidate, cluster, restriction, fold=fold, local=local)
        left = max(1.0, time_limit - (time.monotonic() - started))
        try:
            one = solve(made, budget, optimizer, left, seed, frozenset(local))
        except NoPlan as error:
            certificate.append({"mesh": str(candidate), "needed_bytes": error.needed_bytes})
            refused = error if refused is None or error.needed_bytes < refused.needed_bytes else refused
            continue
        certificate.append({"mesh": str(candidate), "step_s": one.costs["step_s"], **one.certificate})
        if found is None or one.costs["step_s"] < found.costs["step_s"] * (1 - 1e-9):
            found = one
    if found is None:
        assert refused is not None
        raise refused
    if strategy is not None and not strategy.shows(found):
        raise UnsupportedError(f"{strategy} finds nothing to cut in this model on {found.mesh}")
    total = {"seconds": time.monotonic() - started, "tried": certificate}
    return replace(found, certificate=MappingProxyType({**found.certificate, **total}))


def solve(
    made: Problem, budget: float, optimizer: Any, time_limit: float, seed: int, local: frozenset[str]
) -> Plan:
    """The fastest plan on one mesh that fits."""
    programme = Programme(made)
    found = Budgeted(programme, budget, optimizer, local, seed).solve(time_limit)
    if found.plan is None:
        found = Smallest(Programme(made), optimizer, local, seed).solve(time_limit)
        assert found.memory is not None
        if found.memory.peak > budget:
            raise too_small(made, found.memory, budget)
    assert found.plan is not None and found.program is not None and found.memory is not None
    paid = price(found.program, made.graph, made.axes, made.cluster)
    costs = {**paid, "peak_bytes": float(found.memory.peak), "budget_bytes": float(budget)}
    costs |= {f"{kind}_bytes": float(n) for kind, n in found.memory.persistent.items()}
    solution = found.solution
    certificate = {
        "objective_s": paid["step_s"], "bound_s": min(solution.bound, paid["step_s"]),
        "gap": max(0.0, 1 - solution.bound / paid["step_s"]) if paid["step_s"] else 0.0, "rounds": found.rounds,
        "solve_s": solution.seconds, "variables": programme.model.size, "rows": programme.model.rows,
        "programme_s": solution.objective,
    }  # fmt: skip
    spare = int(budget - found.memory.peak)
    return replace(
        found.plan,
        costs=MappingProxyType(costs),
        certificate=MappingProxyType(certificate),
        bucket_bytes=min(BUCKET_BYTES, spare // BUCKET_COPIES),
    )


def too_small(made: Problem, least: Memory, budget: float) -> NoPlan:
    """The refusal: what is needed, the budget, what is largest at the peak, what to try."""
    lines = [
        f"nothing fits in {_gib(budget)} on {made.mesh.devices} devices as {made.mesh}; "
        f"the least peak found is {_gib(least.peak)}"
    ]
    lines[0] += f", at %{least.worst.node}" if least.worst is not None else ""
    held = sorted(((n, kind) for kind, n in least.persistent.items() if n), reverse=True)
    lines.append("  it stays: " + ", ".join(f"{kind} {_gib(n)}" for n, kind in held))
    for tensor in least.alive[:3]:
        lines.append(f"  and then %{tensor.name}: {_gib(tensor.bytes)}" + (f", from {tensor.source}" if tensor.source else ""))
    lines.append(f"  try: memory_bytes={least.peak}, more devices, or a smaller batch")
    return NoPlan("\n".join(lines), least.peak, int(budget))


def _gib(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"
