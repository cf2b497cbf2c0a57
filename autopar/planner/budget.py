"""The fastest decision that fits in a memory budget.

In: a `Programme`, a budget.  Out: `Found`: a plan, its program, its memory, a bound.  Next: `watch.py`.

Without memory rows the relaxation of the programme is almost always whole, so one linear programme is enough. Where that
plan does not fit, rows of the points at which it does not are added and the programme is solved again, until the emitted
program fits by the exact sweep of its tensors: the rows never exclude what fits, so the last solution is the best one.

With rows the relaxation is fractional. A small programme is branched whole. A large one is branched over its kernel: the
options that the relaxation uses, or that are best once memory has a price (the rows' dual prices, and multiples of them);
the relaxation still gives the bound.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cost.memory import Memory, memory, state_copies
from autopar.passes import emit
from autopar.plan import Plan
from autopar.planner.decide import decision
from autopar.planner.program import Programme
from autopar.planner.solver import Solution
from autopar.planner.watch import Watch
from autopar.program import Program

BRANCHED_WHOLE = 1500  # variables
MULTIPLES = (1.0, 1.5, 3.0, 10.0, 100.0)
SUPPORT = 1e-6


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
    """One programme under one budget."""

    programme: Programme
    budget: float
    optimizer: object
    local: frozenset[str] = frozenset()
    seed: int = 0
    kernel: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.watch = Watch(self.programme, state_copies(self.optimizer), self.budget)
        self.bound = float("-inf")

    def solve(self, time_limit: float) -> Found:
        """The fastest plan that fits, or the last solution without a plan."""
        stop = time.monotonic() + time_limit
        rounds = 0
        while True:
            left = max(1.0, stop - time.monotonic())
            solution = self.minimise(left)
            if not solution.found:
                return Found(solution, rounds=rounds)
            found = self.emitted(solution, rounds)
            assert found.memory is not None
            if found.memory.peak <= self.budget:
                return found
            if time.monotonic() > stop and rounds > 3:
                return Found(Solution("unknown", bound=self.bound), rounds=rounds)
            rounds += 1
            assert found.program is not None
            self.watch.add(found.program, found.memory, self.programme.picked(solution))

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
        self.kernel |= self.support(relaxed)
        for multiple in MULTIPLES:
            priced = self.priced(relaxed.prices, multiple, time_limit)
            if priced.found:
                self.kernel |= self.support(priced)
                if self.watch.fits(priced):
                    break
        left = max(1.0, time_limit - (time.monotonic() - started)) / 2
        closed = [v for v in model.binaries if v not in self.kernel]
        best = model.branch(left, self.seed, closed)
        if not best.found:
            best = model.branch(left, self.seed)
        seconds = time.monotonic() - started
        return Solution(best.status, best.values, best.objective, min(self.bound, best.objective), seconds, True)

    def support(self, solution: Solution) -> set[int]:
        return {v for v in self.programme.model.binaries if solution.values[v] > SUPPORT}

    def priced(self, prices: Mapping[int, float], multiple: float, time_limit: float) -> Solution:
        """The programme without rows of memory, each byte at their dual price times `multiple`."""
        model = self.programme.model
        costs = dict(model.costs)
        for row, terms in self.watch.terms.items():
            for v, factor in terms.items():
                costs[v] = costs.get(v, 0.0) - multiple * prices.get(row, 0.0) * factor
        with self.watch.lifted():
            return model.relax(time_limit, self.seed, costs)

