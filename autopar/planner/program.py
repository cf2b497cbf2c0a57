"""The integer programme.

In: a `Problem`.  Out: the cheapest decision for every unit, with a bound.  Next: `liveness.py` (its memory rows).

Sets
    c        classes of units; o in O(c) options of a class; n(c) units in it
    k        classes of edges, from result r of class c to operand i of class d; S(k) distinct layouts in which options
             of c hand the value over, T(k) distinct layouts in which options of d want it
    g        values: a result and its readers in one phase (in one module too where a ZeRO-3 parameter is gathered)

Variables
    x[c, o]        one-hot: the option of a class                                       (0 or 1)
    e[k, P, L]     the value is handed over in P and wanted in L                        (follows from x)
    y[g, P, L]     value g is converted from P to L, once for all its readers           (follows from e)

Rows
    sum_o x[c, o] = 1
    sum_L e[k, P, L] = sum of x[c, o] that hand over in P          for every P in S(k)
    sum_P e[k, P, L] = sum of x[d, o] that want L                  for every L in T(k)
    y[g, P, L] >= e[k, P, L]                                       for every edge k of g
    memory at a point in time <= budget                            see `liveness.py`; added as they are violated

Objective, seconds
    sum_c n(c) seconds(o) x[c, o]  +  sum_g n(g) seconds(P to L) y[g, P, L]

Pairs (P, L) without a conversion have no e. A value with one edge needs no y, an edge with one layout at an end no e. A
view that one op reads has no x of its own: it follows its reader, which is lossless since it costs nothing and a
conversion before it costs the same as one behind it. A parameter is a unit whose options are the ways to keep it: it
hands out its compute copy and wants its gradient in the layout it is stored in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from autopar.cost.comm import step_s
from autopar.layout import Layout, Step, conversion
from autopar.planner.solver import Model, Solution
from autopar.planner.units import Edge, Problem, State, Unit
from autopar.precision import reduces_early

Sum = tuple[int, ...]  # of variables
Scope = tuple[str, str]  # phase, module


class Flow(NamedTuple):
    """A value handed over in one layout and wanted in another: the variables whose sum says so, the conversion."""

    here: State
    there: State
    variables: Sum
    path: tuple[Step, ...]


@dataclass
class Programme:
    """Variables and rows of one problem; `flow[k]` lists the pairs (P, L), `options[c][o]` are sums of variables."""

    problem: Problem
    model: Model = field(default_factory=Model)
    options: dict[int, tuple[Sum, ...]] = field(default_factory=dict)
    flow: dict[int, list[Flow]] = field(default_factory=dict)
    followers: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._members: dict[int, list[Unit]] = defaultdict(list)
        self._numbers: dict[State, int] = {}
        self._paths: dict[tuple[int, int], tuple[Step, ...] | None] = {}
        self._step_s: dict[tuple[int, int], float] = {}
        for unit in self.problem.units:
            self._members[unit.shape].append(unit)
        self._find_followers()
        for c in range(len(self.problem.options)):
            self.option_sums(c)
        for k in range(len(self.problem.shapes)):
            self._flow(k)
        self._seconds()

    # --- options -----------------------------------------------------------------------------------------------------

    def option_sums(self, c: int) -> tuple[Sum, ...]:
        """For every option of a class, the variables whose sum says whether it is taken."""
        if c not in self.options:
            ways = self.problem.options[c]
            if c in self.followers:
                k = self.followers[c]
                wanted = self.wanted(k)
                self.options[c] = tuple(wanted.get(o.outputs[0], ()) for o in ways)
            else:
                variables = [self.model.binary() for _ in ways]
                self.model.row([(v, 1.0) for v in variables], 1.0, 1.0)
                self.options[c] = tuple((v,) for v in variables)
        return self.options[c]

    def handed(self, k: int) -> dict[State, Sum]:
        """Per layout in which the source of an edge hands over, the variables that say so."""
        c, result, _, _ = self.problem.shapes[k]
        found: dict[State, Sum] = {}
        for option, variables in zip(self.problem.options[c], self.option_sums(c), strict=True):
            if variables:
                found[option.outputs[result]] = found.get(option.outputs[result], ()) + variables
        return found

    def wanted(self, k: int) -> dict[State, Sum]:
        """Per layout in which the target of an edge wants the value, the variables that say so."""
        _, _, d, operand = self.problem.shapes[k]
        found: dict[State, Sum] = {}
        for option, variables in zip(self.problem.options[d], self.option_sums(d), strict=True):
            if variables:
                found[option.inputs[operand]] = found.get(option.inputs[operand], ()) + variables
        return found

    def _find_followers(self) -> None:
        """Views read by one op of their own phase; they take the option that hands over what the op wants."""
        problem = self.problem
        for c, units in self._members.items():
            if units[0].kind != "op" or not units[0].free or len(problem.options[c][0].outputs) != 1:
                continue
            edges = [problem.readers.get((u.index, 0), []) for u in units]
            shapes = {e.shape for found in edges for e in found}
            if len(shapes) != 1 or any(len(found) != 1 for found in edges):
                continue
            reader = problem.units[edges[0][0].target]
            if reader.kind != "op" or reader.phase != units[0].phase or reader.shape == c:
                continue
            hands = [o.outputs[0] for o in problem.options[c]]
            wants = {o.inputs[edges[0][0].operand] for o in problem.options[reader.shape]}
            if len(set(hands)) == len(hands) and wants <= set(hands):
                self.followers[c] = shapes.pop()
        for c in list(self.followers):  # a cycle of folded views would follow itself
            seen, at = {c}, problem.shapes[self.followers[c]][2]
            while at in self.followers and at not in seen:
                seen.add(at)
                at = problem.shapes[self.followers[at]][2]
            if at in seen:
                del self.followers[c]

    # --- flows -------------------------------------------------------------------------------------------------------

    def paths(self, handed: Iterable[State], wanted: Iterable[State]) -> dict[tuple[int, int], tuple[Step, ...]]:
        """The conversions between two sets of ends, by position; pairs without one are left out."""
        ends = [[(self._numbers.setdefault(s, len(self._numbers)), s) for s in side] for side in (handed, wanted)]
        out = {}
        for i, (p, source) in enumerate(ends[0]):
            for j, (t, target) in enumerate(ends[1]):
                if (p, t) not in self._paths:
                    self._paths[p, t] = self._path(source, target)
                path = self._paths[p, t]
                if path is not None:
                    out[i, j] = path
        return out

    def _path(self, source: State, target: State) -> tuple[Step, ...] | None:
        if target[1] == "settled" and source[0].settled() != target[0]:
            return None
        return conversion(source[0], target[0], self.problem.mesh)

    def _flow(self, k: int) -> None:
        handed, wanted = self.handed(k), self.wanted(k)
        c = self.problem.shapes[k][0]
        if self.followers.get(c) == k:
            self.flow[k] = [Flow(state, state, variables, ()) for state, variables in wanted.items()]
            return
        sources, targets = list(handed), list(wanted)
        paths = self.paths(sources, targets)
        reader = self._members[self.problem.shapes[k][2]][0]
        paths = {pair: p for pair, p in paths.items() if not reduces_early(self.problem.graph, reader.name, p)}
        if len(sources) == 1 or len(targets) == 1:
            ends, side = (wanted, 1) if len(sources) == 1 else (handed, 0)
            sums = list(ends.values())
            self.flow[k] = [Flow(sources[p[0]], targets[p[1]], sums[p[side]], path) for p, path in paths.items()]
            for i in set(range(len(sums))) - {p[side] for p in paths}:
                for v in sums[i]:
                    self.model.forbid(v)
            return
        made = {pair: self.model.variable() for pair in paths}
        self.flow[k] = [Flow(sources[i], targets[j], (made[i, j],), path) for (i, j), path in paths.items()]
        for side, ends in ((0, handed), (1, wanted)):
            into: list[list[tuple[int, float]]] = [[(v, -1.0) for v in variables] for variables in ends.values()]
            for pair, v in made.items():
                into[pair[side]].append((v, 1.0))
            for terms in into:
                self.model.row(terms, 0.0, 0.0)

    # --- objective ---------------------------------------------------------------------------------------------------

    def _seconds(self) -> None:
        for c, ways in enumerate(self.problem.options):
            count = len(self._members[c])
            for option, variables in zip(ways, self.option_sums(c), strict=True):
                for v in variables:
                    self.model.cost(v, count * option.seconds)
        groups: dict[tuple[int, frozenset[int], str], int] = defaultdict(int)
        for (unit, result), edges in self.problem.readers.items():
            itemsize = self.problem.units[unit].itemsizes[result]
            for flag in self.flags(unit, result):
                for scoped in scopes(edges, self.problem, flag).values():
                    groups[itemsize, frozenset(e.shape for e in scoped), flag] += 1
        for (itemsize, shapes, flag), count in groups.items():
            self._conversions(sorted(shapes), itemsize, count, flag)

    def flags(self, unit: int, result: int) -> list[str]:
        """How a value may be handed over, over all options."""
        return list(dict.fromkeys(o.outputs[result][1] for o in self.problem.options_of(self.problem.units[unit])))

    def _conversions(self, shapes: list[int], itemsize: int, count: int, flag: str) -> None:
        uses: dict[tuple[int, Layout], dict[int, list[int]]] = {}
        paths: dict[tuple[int, Layout], tuple[Step, ...]] = {}
        for k in shapes:
            for here, there, variables, path in self.flow[k]:
                if path and here[1] == flag:
                    key = (self._numbers[here], there[0])
                    paths[key] = path
                    uses.setdefault(key, {}).setdefault(k, []).extend(variables)
        for key, by_edge in uses.items():
            seconds = count * sum(self.step_s(step, itemsize) for step in paths[key])
            if len(by_edge) == 1:
                for shared in by_edge.values():
                    for v in shared:
                        self.model.cost(v, seconds)
                continue
            y = self.model.variable()
            self.model.cost(y, seconds)
            for shared in by_edge.values():
                self.model.row([(y, 1.0), *((v, -1.0) for v in shared)], 0.0)

    def step_s(self, step: Step, itemsize: int) -> float:
        """Seconds of a step; steps are made once a mesh, so they are known by identity."""
        if (id(step), itemsize) not in self._step_s:
            self._step_s[id(step), itemsize] = step_s(step, itemsize, self.problem.mesh, self.problem.cluster)
        return self._step_s[id(step), itemsize]

    # --- solutions ---------------------------------------------------------------------------------------------------

    def picked(self, solution: Solution) -> dict[int, int]:
        """Class -> index of the option taken."""
        out = {}
        for c, sums in self.options.items():
            weights = [sum(solution.values[v] for v in variables) for variables in sums]
            out[c] = max(range(len(weights)), key=weights.__getitem__)
        return out


def scopes(edges: Iterable[Edge], problem: Problem, flag: str) -> dict[Scope, list[Edge]]:
    """Readers that share the conversions of a value: those of a phase; at ZeRO 3 also of one module."""
    found: dict[Scope, list[Edge]] = defaultdict(list)
    for edge in edges:
        target = problem.units[edge.target]
        phase = "" if flag == "keep" else "backward" if target.kind == "parameter" else target.phase
        found[phase, target.module if flag else ""].append(edge)
    return found
