"""The fastest decision that fits in a memory budget.

In: a `Programme`, a budget.  Out: `Found`: a plan, its program, its memory, a bound.  Next: `watch.py`.

Without memory rows the relaxation of the programme is almost always whole, so one linear programme is enough. Where
that plan does not fit, rows of the points at which it does not are added and the programme is solved again, until the
emitted program fits by the exact sweep of its tensors: the rows never exclude what fits, so the last solution is the
best one.

With rows the relaxation is fractional. A small programme is branched whole. A large one is branched over its kernel:
the options that the relaxation uses, or that are best once memory has a price (the rows' dual prices, and multiples of
them); the relaxation still gives the bound.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.cost.memory import Memory, memory
from autopar.cost.optimizer import state_copies
from autopar.passes import emit
from autopar.plan import Plan
from autopar.planner.decide import decision
from autopar.planner.program import Programme
from autopar.planner.solver import BRANCHED_WHOLE, Solution
from autopar.planner.watch import Watch
from autopar.program import Program

MULTIPLES = (1.0, 3.0, 10.0, 100.0)
ROUNDS = 16
LEAST_S = 20.0  # for a first solution where there must be one


@dataclass(frozen=True)
class Found:
    """A decision and everything known about it; `plan` is None where nothing fits."""

    solution: Solution
    plan: Plan | None = None
    program: Program | None = None
    memory: Memory | None = None
    rounds: int = 0


@dataclass
class Budgeted:
    """One programme under one budget; above `cutoff` seconds nobody is interested."""

    programme: Programme
    budget: float
    optimizer: object
    local: frozenset[str] = frozenset()
    seed: int = 0
    cutoff: float = float("inf")
    kernel: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.watch = Watch(self.programme, state_copies(self.optimizer), self.budget)
        self.bound = float("-inf")
        self.best: Found | None = None

    def solve(self, time_limit: float) -> Found:
        """The fastest plan that fits; when the time is up the best so far, or the last solution without a plan."""
        stop, rounds = time.monotonic() + time_limit, 0
        while True:
            solution = self.minimise(max(1.0, stop - time.monotonic()))
            if not solution.found:
                return self.best or Found(solution, rounds=rounds)
            if solution.bound >= self.cutoff:
                return Found(replace(solution, status="cut off"), rounds=rounds)
            found = self.emitted(solution, rounds)
            assert found.memory is not None and found.program is not None
            if found.memory.peak <= self.budget:
                better = self.best is None or solution.objective < self.best.solution.objective
                return found if better or self.best is None else self.best
            if time.monotonic() > stop:
                return self.best or Found(Solution("unknown", bound=self.bound), rounds=rounds)
            rounds += 1
            self.watch.add(found.program, found.memory, solution, self.budget)

    def emitted(self, solution: Solution, rounds: int) -> Found:
        """The plan of a solution, its program and what that holds."""
        problem = self.programme.problem
        plan = decision(self.programme, solution, self.local)
        program = emit(problem.graph, problem.axes, plan)
        return Found(solution, plan, program, memory(program, self.optimizer), rounds)

    def minimise(self, time_limit: float) -> Solution:
        """The programme with the rows it has by now."""
        model, started = self.programme.model, time.monotonic()
        if not self.watch.rows or model.size <= BRANCHED_WHOLE:
            return model.minimise(time_limit, self.seed)
        relaxed = model.relax(time_limit, self.seed)
        if not relaxed.found or model.whole(relaxed):
            return relaxed
        self.bound = max(self.bound, relaxed.bound)
        self.kernel |= model.support(relaxed)
        for multiple in MULTIPLES:
            if time.monotonic() - started > time_limit / 2:
                break
            priced = self.priced(relaxed.prices, multiple, time_limit)
            if priced.found:
                self.kernel |= model.support(priced)
                if model.whole(priced) and self.watch.fits(priced):
                    self.remember(priced)
                    break
        left = max(1.0, time_limit - (time.monotonic() - started)) / 2
        closed = [v for v in model.binaries if v not in self.kernel]
        best = model.branch(left, self.seed, closed)
        if not best.found and time.monotonic() - started < time_limit:
            best = model.branch(left, self.seed)
        seconds = time.monotonic() - started
        return Solution(best.status, best.values, best.objective, min(self.bound, best.objective), seconds, True)

    def remember(self, solution: Solution) -> None:
        """Keep a solution that may be all there is when the time is up."""
        model = self.programme.model
        objective = sum(solution.values[v] * c for v, c in model.costs.items())
        if self.best is None or objective < self.best.solution.objective:
            solution = Solution("feasible", solution.values, objective, self.bound, solution.seconds, True)
            found = self.emitted(solution, 0)
            assert found.memory is not None
            self.best = found if found.memory.peak <= self.budget else self.best

    def priced(self, prices: Mapping[int, float], multiple: float, time_limit: float) -> Solution:
        """The programme without rows of memory, each byte at their dual price times `multiple`."""
        model = self.programme.model
        costs = dict(model.costs)
        for row, terms in self.watch.terms.items():
            for v, factor in terms.items():
                costs[v] = costs.get(v, 0.0) - multiple * prices.get(row, 0.0) * factor
        with self.watch.lifted():
            return model.relax(time_limit, self.seed, costs)


@dataclass
class Smallest:
    """The plan of one programme that needs the least memory, found by minimising the bound of the same rows."""

    programme: Programme
    optimizer: object
    local: frozenset[str] = frozenset()
    seed: int = 0

    def solve(self, time_limit: float) -> Found:
        """The least peak that was found, proved or not, when the time is up."""
        stop, model = time.monotonic() + time_limit, self.programme.model
        search = Budgeted(self.programme, float("inf"), self.optimizer, self.local, self.seed)
        first = model.minimise(max(time_limit, LEAST_S), self.seed)
        if not first.found:
            return Found(first)
        best = search.emitted(first, 0)
        assert best.memory is not None and best.program is not None
        ceiling = model.variable(upper=1e9)
        watch = Watch(self.programme, state_copies(self.optimizer), float(best.memory.peak), ceiling)
        search.watch = watch
        watch.add(best.program, best.memory, first, 0.0)
        seconds, model.costs = model.costs, {ceiling: 1.0}
        for rounds in range(1, ROUNDS):
            solution = search.minimise(max(1.0, stop - time.monotonic()))
            if not solution.found:
                break
            found = search.emitted(solution, rounds)
            assert found.memory is not None and found.program is not None and best.memory is not None
            best = found if found.memory.peak < best.memory.peak else best
            least = solution.objective * watch.scale
            if found.memory.peak <= least * (1 + 1e-6) + 1 or time.monotonic() > stop:
                break
            watch.add(found.program, found.memory, solution, least)
        model.costs = seconds
        paid = sum(best.solution.values[v] * c for v, c in seconds.items())
        return replace(best, solution=replace(best.solution, status="feasible", objective=paid, bound=0.0))
