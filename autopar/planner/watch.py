"""Which points of a step the programme watches.

In: an emitted program that is over its budget.  Out: rows in the programme that rule it out.  Next: `liveness.py`.

A row of a point bounds what every decision holds there. Where an emitted program is over the budget at a point that has
its row already, the row left something out: what an op emitted as a subgraph holds for a moment. A small programme then
forbids that one decision; a large one adds what was left out to the row, as bytes of the op's option.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import fx

from autopar.cost.memory import Memory, Point
from autopar.planner.liveness import AFTER, CONSTANT, RUNS, STEP, Liveness, Time, lasts
from autopar.planner.program import Programme
from autopar.planner.solver import Solution
from autopar.program import Program
from autopar.rules.core import operands

SMALL = 1500  # variables
POINTS = 3  # rows a round


@dataclass
class Watch:
    """Rows of points, added one round at a time."""

    programme: Programme
    optimizer_copies: float
    budget: float
    ceiling: int | None = None  # variable that stands for the budget, in units of `scale`
    rows: dict[Time, int] = field(default_factory=dict)
    terms: dict[int, dict[int, float]] = field(default_factory=dict)
    constants: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.liveness = Liveness(self.programme, self.optimizer_copies)
        self.units = {u.name: u for u in self.programme.problem.units}
        self.scale = max(self.budget, 1.0) / 1e3

    def add(self, program: Program, held: Memory, solution: Solution, budget: float) -> None:
        """Rule out a solution whose program is over the budget."""
        limit = budget - sum(held.persistent.values())
        points = worst(held, limit)
        fresh = [when for when in dict.fromkeys(self.when(program, p) for p in points) if when not in self.rows]
        for when in fresh:
            self.rows[when] = self.row(*self.liveness.at(when))
        if not fresh:
            self.sharpen(self.when(program, points[0]), points[0].bytes + budget - limit, solution)

    def sharpen(self, when: Time, peak: float, solution: Solution) -> None:
        """Make a row, or a cut, aware of what it left out."""
        model, programme = self.programme.model, self.programme
        picked = programme.picked(solution)
        unit = programme.problem.units[int(min(when[0], len(programme.problem.units) - 1))]
        blamed = programme.option_sums(unit.shape)[picked[unit.shape]] if unit.kind == "op" else ()
        if self.ceiling is None and (model.size < SMALL or not blamed):
            taken = dict.fromkeys(v for c, o in picked.items() for v in programme.option_sums(c)[o])
            model.row([(v, 1.0) for v in taken], upper=len(taken) - 1)
            return
        row = self.rows[when]
        terms = self.terms.pop(row)
        left = peak / self.scale - self.constants[row] - sum(solution.values[v] * f for v, f in terms.items())
        model.row_upper[row] = float("inf")
        for v in blamed[:1]:
            terms[v] = terms.get(v, 0.0) + max(left, 1e-6)
        self.rows[when] = self.row({v: f * self.scale for v, f in terms.items()}, self.constants[row] * self.scale)

    def row(self, terms: dict[int, float], constant: float) -> int:
        """A new row: what is alive at a point stays below the budget."""
        constant = (constant + terms.pop(CONSTANT, 0.0)) / self.scale
        scaled = {v: f / self.scale for v, f in terms.items()}
        top = [] if self.ceiling is None else [(self.ceiling, -1.0)]
        upper = (self.budget / self.scale if self.ceiling is None else 0.0) - constant
        made = self.programme.model.row([*scaled.items(), *top], upper=upper)
        self.terms[made], self.constants[made] = scaled, constant
        return made

    def fits(self, solution: Solution) -> bool:
        """Whether a solution of the programme without its rows keeps them."""
        upper = self.programme.model.row_upper
        return all(
            sum(solution.values[v] * f for v, f in terms.items()) <= upper[row] * (1 + 1e-9)
            for row, terms in self.terms.items()
        )

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Without the rows, for a while."""
        upper = self.programme.model.row_upper
        kept = {row: upper[row] for row in self.terms}
        for row in kept:
            upper[row] = float("inf")
        try:
            yield
        finally:
            for row, value in kept.items():
                upper[row] = value

    def when(self, program: Program, point: Point) -> Time:
        """The point of the programme at which a node of the emitted program runs."""
        graph = program.forward if point.phase == "forward" else program.backward
        node = next(n for n in graph.nodes if n.name == point.node and n.op == "call_function")
        if "step" not in node.meta or node.meta.get("origin") in self.units:
            return self.units[origin(node)].index, RUNS
        return self._conversion(node)

    def _conversion(self, node: fx.Node) -> Time:
        before, after = node, node
        step = 0
        while "step" in before.args[0].meta:  # type: ignore[union-attr]
            before = before.args[0]  # type: ignore[assignment]
            step += lasts(before.meta["step"], self.programme.problem.mesh)
        while True:
            readers = [u for u in after.users if u.op == "call_function"]
            if not readers:
                source = before.args[0]
                assert isinstance(source, fx.Node)
                if node.meta["phase"] == "forward":
                    return self.liveness.forward_end, AFTER + step * STEP
                index = self.units[origin(source)].index if origin(source) in self.units else 0
                return index, AFTER + step * STEP
            if "step" not in readers[0].meta:
                reader = readers[0]
                unit = self.units[origin(reader)]
                read = list(operands(reader))
                place = read.index(after) if after in read else 0
                return unit.index, place + step * STEP
            after = readers[0]


def origin(node: fx.Node) -> str:
    """The op of the captured graph that a node was emitted for; of a getitem, the op it picks from."""
    while node.target is not None and getattr(node.target, "__name__", "") == "getitem":
        node = node.args[0]  # type: ignore[assignment]
    return str(node.meta.get("origin", node.name))


def worst(held: Memory, limit: float) -> list[Point]:
    """The points furthest over a limit, the worst first, at most one of a run of neighbours."""
    over = sorted(
        (i for i, p in enumerate(held.timeline) if p.bytes > limit), key=lambda i: (-held.timeline[i].bytes, i)
    )
    found: list[int] = []
    for i in over:
        if all(abs(i - j) > 8 for j in found):
            found.append(i)
    return [held.timeline[i] for i in found[:POINTS]]
