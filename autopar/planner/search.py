"""The search around the integer programme: over meshes, and over points in time at which memory is watched.

In: a graph, a cluster, a budget, a strategy.  Out: the best `Plan`, and why every other lost.  Next: `program.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from autopar.axes import Axes, analyse
from autopar.cluster import ClusterSpec
from autopar.cost.bill import bill
from autopar.cost.comm import seconds
from autopar.cost.memory import Memory, memory
from autopar.cost.optimizer import state_copies
from autopar.cost.price import price
from autopar.errors import InputError, NoPlan, UnsupportedError
from autopar.graph import Graph
from autopar.layout import STAGE, Mesh
from autopar.pins import NONE, Pins
from autopar.plan import ParameterPlan, Plan
from autopar.planner.budget import Budgeted, Found, Smallest
from autopar.planner.pinned import Pinned
from autopar.planner.program import Programme
from autopar.planner.stages import stages
from autopar.planner.units import FREE, Problem, Restriction, problem
from autopar.uncollected import uncollected

NAMES = ("data", "model")
SOLVING = 0.7  # of the time that is left goes to one mesh; the rest to finding what would fit

BUCKET_BYTES = 25 * 2**20
SPARE_BYTES = 2**20  # with less left over nothing is bucketed
BUCKET_COPIES = 6  # a bucket of up to twice its size: what goes in, what is sent, what arrives


def meshes(devices: int, axes: int = 2) -> list[Mesh]:
    """Every mesh of up to two axes; one axis of all devices first."""
    found = [Mesh(NAMES[:1], (devices,))]
    if axes > 1:
        found += [Mesh(NAMES, (devices // n, n)) for n in range(2, devices) if devices % n == 0]
    return found


@uncollected()
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
    pins: Pins = NONE,
) -> Plan:
    """The fastest plan that fits.

    graph         as `passes.copy_views` leaves it
    mesh          plan on this mesh only; otherwise on every factorisation of the devices into one or two axes
    strategy      from `autopar.strategies`
    memory_bytes  budget of one device; by default the cluster's
    optimizer     its class, name, or the number of parameter-sized tensors in its state
    local         names of input nodes that arrive cut along dim 0
    stored        parameters, by first name, that are kept in one way already because another program of the same module
                  decided so; needs its mesh
    pins          what is fixed beforehand; stronger than the strategy where they speak

    Raises NoPlan if nothing fits, UnsupportedError if the strategy or a pin cannot be followed, InputError if a pin
    names what is not there.
    """
    axes = analyse(graph) if axes is None else axes
    budget = cluster.memory_bytes if memory_bytes is None else memory_bytes
    candidates = [mesh] if mesh is not None else candidates_for(cluster.devices, strategy, pins)
    started, known = time.monotonic(), Known(budget, optimizer, seed, frozenset(local))

    def left() -> float:
        return max(1.0, time_limit - (time.monotonic() - started))

    failed, refused = [], []
    for candidate in candidates:
        if known.best is not None and left() <= 1.0:
            known.tried.append({"mesh": str(candidate), "untried": "the time limit was reached"})
            continue
        try:
            check_whole(candidate, known.local)
            restriction = restricted(graph, axes, candidate, strategy, pins, stored)
            copies = state_copies(optimizer)
            made = problem(graph, axes, candidate, cluster, restriction, fold=fold, local=local, copies=copies)
        except UnsupportedError as error:
            refused.append(error)
            known.tried.append({"mesh": str(candidate), "untried": str(error).partition("\n")[0]})
            continue
        if not solve(made, known, SOLVING * left()):
            failed.append(made)
    if known.best is None and refused and not failed:
        raise refused[0]
    if known.best is None:
        try:
            smallest(failed, known, max(left(), (1 - SOLVING) * time_limit))
        except NoPlan as error:
            fewer = partial(plan, graph, cluster, mesh=mesh, strategy=strategy, memory_bytes=memory_bytes, axes=axes)
            blamed = conflict(pins, partial(fewer, optimizer=optimizer, seed=seed, local=local, fold=fold), time_limit)
            raise NoPlan(f"{error}{blamed}", error.needed_bytes, error.budget_bytes) from None
    found = known.best
    assert found is not None
    if strategy is not None and stored is None and not strategy.shows(found):
        raise UnsupportedError(f"{strategy} finds nothing to cut in this model on {found.mesh}")
    total = {"seconds": time.monotonic() - started, "tried": known.tried}
    return replace(found, certificate=MappingProxyType({**found.certificate, **total}))


def candidates_for(devices: int, strategy: Any, pins: Pins) -> list[Mesh]:
    """The meshes to plan on: the strategy's, or every one; of these, those on which the pins can be followed."""
    if strategy is None:
        return pins.meshes(devices, meshes(devices))
    if pins.mesh and not strategy.fits(pins.pinned_mesh(devices)):
        raise InputError(f"{pins.where}: mesh: {pins.pinned_mesh(devices)} does not fit the strategy {strategy}")
    return pins.meshes(devices, [] if pins.mesh else [strategy.mesh(devices)])


def conflict(pins: Pins, plan_with: Callable[..., Plan], time_limit: float) -> str:
    """A line that names the pins because of which nothing fits: without any one of them something does."""
    stop, kept = time.monotonic() + time_limit, pins

    def fits(some: Pins) -> bool:
        try:
            plan_with(pins=some, time_limit=max(1.0, stop - time.monotonic()))
        except NoPlan:
            return False
        return True

    if not pins.all or not fits(Pins(pins.mesh, where=pins.where)):
        return ""
    for pin in pins.all:
        if time.monotonic() < stop and not fits(kept.without(pin)):
            kept = kept.without(pin)
    return f"\n  it fits without {' or without '.join(map(str, kept.all))}"


def check_whole(mesh: Mesh, local: Iterable[str]) -> None:
    """Every stage of a pipeline takes its microbatches from the whole batch."""
    if STAGE in mesh.names and any(True for _ in local):
        raise UnsupportedError(
            "a pipeline needs the whole batch on every rank, and an input is Local\n  try: pass the global batch"
        )


def restricted(
    graph: Graph,
    axes: Axes,
    mesh: Mesh,
    strategy: Any,
    pins: Pins = NONE,
    stored: Mapping[str, ParameterPlan] | None = None,
) -> Restriction:
    """What a strategy, pins and an earlier program leave to choose from on one mesh."""
    pinned = Pinned(pins, axes, mesh) if pins else None
    if pinned is not None:
        pinned.check(graph)
    free = FREE if strategy is None else strategy.restriction(graph, axes, mesh)
    return replace(free, pins=pinned, stored=MappingProxyType(dict(stored or {})))


@dataclass
class Known:
    """What one search is for, and what it knows so far: the best plan, and what became of every mesh."""

    budget: float
    optimizer: Any
    seed: int
    local: frozenset[str]
    best: Plan | None = None
    tried: list[dict[str, Any]] = field(default_factory=list)

    def add(self, made: Problem, programme: Programme, found: Found) -> None:
        """Note the plan of one mesh; keep it if it is the fastest."""
        one = finished(made, programme, found, self.budget, self.optimizer)
        self.tried.append({"mesh": str(made.mesh), "step_s": one.costs["step_s"], **one.certificate})
        if self.best is None or one.costs["step_s"] < self.best.costs["step_s"] * (1 - 1e-9):
            self.best = one


def solve(made: Problem, known: Known, time_limit: float) -> bool:
    """Note the fastest plan on one mesh that fits; false where there is none.

    A mesh whose bound is above the best plan so far has lost, whatever it needs in memory.
    """
    programme = Programme(made)
    cutoff = float("inf") if known.best is None else known.best.certificate.get("objective_s", float("inf"))
    search = Budgeted(programme, known.budget, known.optimizer, known.local, known.seed, cutoff)
    found = search.solve(time_limit)
    if found.solution.status == "cut off":
        known.tried.append({"mesh": str(made.mesh), "step_s": found.solution.bound, "bound_s": found.solution.bound})
        return True
    if found.plan is None:
        if known.best is not None:
            known.tried.append({"mesh": str(made.mesh)})
        return known.best is not None
    known.add(made, programme, found)
    return True


def smallest(failed: list[Problem], known: Known, time_limit: float) -> None:
    """The plans that need least, if one of them fits after all; otherwise refuse with the least of their needs."""
    least: list[tuple[int, Problem, Found]] = []
    for made in failed:
        programme = Programme(made)
        found = Smallest(programme, known.optimizer, known.local, known.seed).solve(time_limit / len(failed))
        if found.memory is None:
            continue
        least.append((found.memory.peak, made, found))
        if found.memory.peak <= known.budget:
            known.add(made, programme, found)
    if known.best is None:
        if not least:
            raise NoPlan(
                f"no plan was found within the time limit; the budget is {_gib(known.budget)}", 0, int(known.budget)
            )
        _, made, found = min(least, key=lambda entry: entry[0])
        assert found.memory is not None
        raise too_small(made, found.memory, known.budget)


def finished(made: Problem, programme: Programme, found: Found, budget: float, optimizer: object) -> Plan:
    """A plan with its costs and certificate."""
    assert found.plan is not None and found.program is not None and found.memory is not None
    spare = max(0, int(min(budget - found.memory.peak, 2.0**62)))
    bucket = min(BUCKET_BYTES, spare // BUCKET_COPIES) if spare >= SPARE_BYTES else 0
    plan = replace(found.plan, bucket_bytes=bucket, copied_bytes=min(bucket, worth_copying(made)))
    if STAGE in plan.mesh.names:
        plan = replace(plan, stages=MappingProxyType(stages(made.graph, made.axes, plan, made.cluster)))
    program = replace(found.program, plan=plan)
    sum_s = price(program, made.graph, made.axes, made.cluster, made.copies)
    solution, held = found.solution, memory(program, optimizer)
    certificate = {
        "objective_s": sum_s,
        "bound_s": max(0.0, min(solution.bound, sum_s)),
        "gap": max(0.0, 1 - max(0.0, solution.bound) / sum_s) if sum_s else 0.0,
        "rounds": found.rounds,
        "solve_s": solution.seconds,
        "variables": programme.model.size,
        "rows": programme.model.rows,
        "programme_s": solution.objective,
    }
    if plan.stages:  # cut by a rule outside the programme, whose bound is none for the whole
        certificate = {key: value for key, value in certificate.items() if key not in ("objective_s", "bound_s", "gap")}
    costs = bill(program, held, made.graph, made.axes, made.cluster, optimizer=optimizer, budget_bytes=budget)
    return replace(plan, costs=MappingProxyType(costs), certificate=MappingProxyType(certificate))


def worth_copying(made: Problem) -> int:
    """Bytes up to which a tensor is copied into a bucket in less time than a reduction of its own takes to start."""
    space, cluster = made.mesh.space, made.cluster
    started = max(seconds("all_reduce", 0, cluster.topology(space, axis)) for axis in space.names)
    return int(started * cluster.device.memory_bytes_per_s)


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
        lines.append(
            f"  and then %{tensor.name}: {_gib(tensor.bytes)}" + (f", from {tensor.source}" if tensor.source else "")
        )
    lines.append(f"  try: memory_bytes={least.peak}, more devices, or a smaller batch")
    return NoPlan("\n".join(lines), least.peak, int(budget))


def _gib(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"
