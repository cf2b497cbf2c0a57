"""Bytes alive at one point of a step, as a row of the integer programme.

In: a `Programme`, a point in time.  Out: terms (variable, bytes) whose sum is what the emitted program holds there.
Next: `search.py`, which adds such a row wherever an emitted program is over its budget.

A point is (position of a unit, operand + j STEP): step j of the conversion of that operand is being made, or (position,
RUNS): the unit runs. The source of an edge is alive until the edge's conversion is made or, where the layouts agree,
until its target has run; a converted copy from its first reader's conversion to its last reader; what a view reads as
long as the view is. Each of these "alive" is a maximum of sums of variables, so it gets a variable of its own that is
at least each of them. What an op emitted as a subgraph holds inside is left out: the row is never too large, and the
exact sweep of `cost/memory.py` has the last word.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from autopar.cost.staging import copies_slice, staging_elements
from autopar.layout import Layout, Mesh, Step
from autopar.planner.program import Flow, Programme, Sum, scopes
from autopar.planner.units import Edge, State, Unit

Time = tuple[float, float]
Terms = dict[int, float]  # variable -> factor
Copy = tuple[Layout, Layout]  # what the reader wants, and what that is a slice of

RUNS = 1e6
AFTER = 2e6
STEP = 1 / 64  # between the steps of one conversion
END: Time = (math.inf, 0.0)


@dataclass
class Liveness:
    """Rows of one programme; variables made for one point are shared by equal blocks."""

    programme: Programme
    optimizer_copies: float
    forward_end: int = field(init=False)
    _flows: dict[tuple[int, int], dict[State, list[Flow]]] = field(default_factory=dict)
    _results: dict[tuple[int, int], dict[State, dict[State, None]]] = field(default_factory=dict)
    _sources: dict[tuple[int, int, Time], dict[State, Terms]] = field(default_factory=dict)
    _lasting: dict[int, tuple[Step, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        units = self.programme.problem.units
        backward = [u.index for u in units if u.kind == "op" and u.phase == "backward"]
        self.forward_end = min(backward, default=len(units)) - 1

    # --- what stays --------------------------------------------------------------------------------------------------

    def persistent(self) -> tuple[Terms, float]:
        """Bytes that every point has: terms of the parameters, and what no decision changes."""
        problem, terms, constant = self.programme.problem, defaultdict[int, float](float), 0.0
        trainable = {entry.node: entry.trainable for entry in problem.graph.inputs}
        dtypes = {entry.node: problem.graph.stored.get(entry.name) for entry in problem.graph.inputs}
        for unit in problem.units:
            if unit.kind == "parameter":
                for option, variables in zip(
                    problem.options_of(unit), self.programme.option_sums(unit.shape), strict=True
                ):
                    kept, itemsize = option.label, unit.itemsizes[0]
                    dtype = dtypes[unit.name]
                    stored = self.bytes(kept.stored, itemsize if dtype is None else dtype.itemsize)
                    cast = dtype is not None and dtype.itemsize != itemsize
                    copied = kept.home if kept.level in (1, 2) else kept.stored if cast else None
                    home = 0 if copied is None else self.bytes(copied, itemsize)
                    state = int(self.optimizer_copies * stored) if trainable[unit.name] else 0
                    for v in variables:
                        terms[v] += stored + home + state
            elif unit.kind == "input" and unit.name in trainable:
                constant += self.bytes(problem.options_of(unit)[0].outputs[0][0], unit.itemsizes[0])
        constant += sum(t.numel() * t.dtype.itemsize for t in problem.graph.attributes.values())
        return dict(terms), constant

    def bytes(self, layout: Layout, itemsize: int) -> int:
        return layout.local_numel(self.programme.problem.mesh) * itemsize

    # --- one point ---------------------------------------------------------------------------------------------------

    def at(self, time: Time) -> tuple[Terms, float]:
        """Terms and constant of the row of a point."""
        total, constant = self.persistent()
        terms = defaultdict[int, float](float, total)
        made: dict[Hashable, list[tuple[float, Terms]]] = {}
        for unit in self.programme.problem.units:
            if unit.index > time[0] and unit.kind == "op":
                continue
            for result in range(len(unit.itemsizes)):
                key = (unit.shape, result, self.signature(unit, result, time))
                if key not in made:
                    made[key] = list(self.held(unit, result, time))
                for size, alive in made[key]:
                    for v, factor in alive.items():
                        terms[v] += size * factor
        return {v: f for v, f in terms.items() if f}, constant

    def signature(self, unit: Unit, result: int, time: Time) -> Hashable:
        """What the life of a value at a point depends on; equal for values in equal places of equal blocks."""
        flags = self.programme.flags(unit.index, result)
        found = []
        for flag in flags:
            scoped = scopes(self.readers(unit, result), self.programme.problem, flag)
            for edges in scoped.values():
                found.append((flag, tuple(sorted(self._edge_signature(e, time) for e in edges))))
        here = time if unit.index == time[0] or any(e.target == time[0] for e in self.readers(unit, result)) else None
        return here, tuple(sorted(found))

    def _edge_signature(self, edge: Edge, time: Time) -> tuple[object, ...]:
        target = self.programme.problem.units[edge.target]
        deep = str(self.signature(target, 0, time)) if target.free and target.index < time[0] else ""
        return (
            edge.shape,
            self.converted(edge, "") < time,
            self.converted(edge, "") <= time,
            self.used(edge) >= time,
            deep,
        )

    def held(self, unit: Unit, result: int, time: Time) -> Iterable[tuple[float, Terms]]:
        """(bytes, alive) of a value in every layout in which it may be alive at a point."""
        itemsize = unit.itemsizes[result]
        if unit.kind == "op" and not unit.free:
            if unit.index == time[0]:
                if time[1] >= RUNS:
                    for state, variables in self.handed(unit, result).items():
                        yield self.bytes(state[0], itemsize), dict.fromkeys(variables, 1.0)
            else:
                for state, alive in self.source(unit, result, time).items():
                    yield self.bytes(state[0], itemsize), alive
        for elements, alive in self.copies(unit, result, time):
            yield elements * itemsize, alive

    # --- times -------------------------------------------------------------------------------------------------------

    def converted(self, edge: Edge, flag: str) -> Time:
        """When an edge's conversion begins."""
        target = self.programme.problem.units[edge.target]
        if target.kind == "op":
            return edge.target, edge.operand
        if target.kind == "parameter":
            return END if flag == "end" else (edge.source, AFTER)
        if target.phase == "backward":
            return END
        return self.forward_end, AFTER + edge.target

    def used(self, edge: Edge) -> Time:
        """When an edge's target has run; what leaves the program is used for ever."""
        target = self.programme.problem.units[edge.target]
        return (edge.target, RUNS) if target.kind == "op" else (math.inf, math.inf)

    # --- lives -------------------------------------------------------------------------------------------------------

    def flows(self, edge: Edge, side: int) -> dict[State, list[Flow]]:
        """The pairs of an edge by the layout at its source (0) or target (1)."""
        if (edge.shape, side) not in self._flows:
            found = self._flows[edge.shape, side] = {}
            for flow in self.programme.flow[edge.shape]:
                found.setdefault(flow[side], []).append(flow)  # type: ignore[arg-type]
        return self._flows[edge.shape, side]

    def readers(self, unit: Unit, result: int) -> list[Edge]:
        return self.programme.problem.readers.get((unit.index, result), [])

    def handed(self, unit: Unit, result: int) -> dict[State, Sum]:
        """Per layout in which a value is made, the variables that say so."""
        found: dict[State, Sum] = {}
        problem = self.programme.problem
        for option, variables in zip(problem.options_of(unit), self.programme.option_sums(unit.shape), strict=True):
            if variables:
                found[option.outputs[result]] = found.get(option.outputs[result], ()) + variables
        return found

    def source(self, unit: Unit, result: int, time: Time) -> dict[State, Terms]:
        """Whether a value as it was made is alive at a point, per layout in which it may have been made."""
        key = unit.index, result, time
        if key not in self._sources:
            self._sources[key] = self._source(unit, result, time)
        return self._sources[key]

    def _source(self, unit: Unit, result: int, time: Time) -> dict[State, Terms]:
        out = {}
        for state, whole in self.handed(unit, result).items():
            found: list[Terms] = []
            for edges in scopes(self.readers(unit, result), self.programme.problem, state[1]).values():
                for edge in edges:
                    found += self._needs(edge, edges, state, time)
            certain = dict.fromkeys(whole, 1.0)
            alive = certain if certain in found else self.maximum(found)
            if alive:
                out[state] = alive
        return out

    def _needs(self, edge: Edge, edges: list[Edge], state: State, time: Time) -> list[Terms]:
        """Reasons of one edge for the source to be alive."""
        steady, moving = Terms(), defaultdict[Layout, Terms](Terms)
        out = []
        for here, there, variables, path in self.flows(edge, 0).get(state, ()):
            lasting = self.lasting(path)
            if not lasting:
                if self.used(edge) >= time:
                    steady |= dict.fromkeys(variables, 1.0)
                else:
                    out += self._through_view(edge, {here}, there, time)
            elif self.converted(edge, there[1]) >= time:
                moving[there[0]] |= dict.fromkeys(variables, 1.0)
        earlier = [e for e in edges if self.converted(e, "") < time]
        if not earlier:
            out.append({**steady, **{v: f for terms in moving.values() for v, f in terms.items()}})
            return [terms for terms in out if terms]
        out.append(steady)
        out += [summed(terms, self._made(earlier, state, layout)) for layout, terms in moving.items()]
        return [terms for terms in out if terms]

    def _made(self, earlier: list[Edge], state: State, layout: Layout) -> Terms:
        """Minus one if an earlier reader wanted the same conversion."""
        done = Terms()
        for e in earlier:
            for _, there, variables, path in self.flows(e, 0).get(state, ()):
                if path and there[0] == layout:
                    for v in variables:
                        done[v] = done.get(v, 0.0) - 1.0
        return done

    def _through_view(self, edge: Edge, sources: set[State], there: State, time: Time) -> list[Terms]:
        """A view that has run keeps what it read alive as long as it lives itself."""
        target = self.programme.problem.units[edge.target]
        if not target.free:
            return []
        key = target.shape, edge.operand
        if key not in self._results:
            found = self._results.setdefault(key, defaultdict(dict))
            for option in self.programme.problem.options_of(target):
                found[option.inputs[edge.operand]][option.outputs[0]] = None
        results = self._results[key].get(there, {})
        alive = self.source(target, 0, time)
        others = Terms()
        for p, _, variables, _ in self.flows(edge, 1).get(there, ()):
            if p not in sources:
                for v in variables:
                    others[v] = others.get(v, 0.0) - 1.0
        return [summed(alive[r], others) for r in results if r in alive]

    def copies(self, unit: Unit, result: int, time: Time) -> Iterable[tuple[int, Terms]]:
        """(elements, alive) of every converted copy of a value that may be alive at a point, in every scope."""
        for flag in self.programme.flags(unit.index, result):
            for edges in scopes(self.readers(unit, result), self.programme.problem, flag).values():
                yield from self._copies(edges, flag, time)

    def _copies(self, edges: list[Edge], flag: str, time: Time) -> Iterable[tuple[int, Terms]]:
        reasons: dict[Copy, list[Terms]] = defaultdict(list)
        before: dict[Copy, list[Terms]] = defaultdict(list)
        after: dict[Copy, list[Terms]] = defaultdict(list)
        for edge in edges:
            for copy, made, needed, terms in self._copy_uses(edge, flag, time):
                (reasons if made and needed else before if made else after)[copy].append(terms)
            yield from self._passing(edge, edges, flag, time)
        for copy in {**reasons, **before}:
            both = [summed(b, a, constant=-1.0) for b in before[copy] for a in after[copy]]
            alive = self.maximum([*reasons[copy], *both])
            if alive:
                yield self.bytes(copy[1], 1), alive

    def _copy_uses(self, edge: Edge, flag: str, time: Time) -> Iterable[tuple[Copy, bool, bool, Terms]]:
        """Whether an edge has made a copy by then and whether it still needs it, per copy that it may ask for."""
        found: dict[tuple[Copy, bool, bool], Terms] = {}
        viewed: dict[tuple[Copy, State], set[State]] = defaultdict(set)
        for here, there, variables, path in self.programme.flow[edge.shape]:
            lasting = self.lasting(path)
            if here[1] != flag or not lasting:
                continue
            copy = there[0], lasting[-1].after
            start = self.converted(edge, there[1])
            made = (start[0], start[1] + (len(lasting) - 1) * STEP) <= time
            needed = self.used(edge) >= time
            if made or needed:
                found.setdefault((copy, made, needed), {}).update(dict.fromkeys(variables, 1.0))
            if made and not needed:
                viewed[copy, there].add(here)
        for (copy, made, needed), terms in found.items():
            yield copy, made, needed, terms
        for (copy, there), sources in viewed.items():
            for reason in self._through_view(edge, sources, there, time):
                yield copy, True, True, reason

    def _passing(self, edge: Edge, edges: list[Edge], flag: str, time: Time) -> Iterable[tuple[int, Terms]]:
        """What a conversion holds beside its ends while it is made: results between its steps, buffers of a step."""
        earlier = [e for e in edges if self.converted(e, "") < self.converted(edge, "")]
        mesh = self.programme.problem.mesh
        for here, there, variables, path in self.programme.flow[edge.shape]:
            start = self.converted(edge, there[1])
            lasting = self.lasting(path)
            step = round((time[1] - start[1]) / STEP) if start[0] == time[0] else -1
            if here[1] != flag or not 0 <= step < len(lasting):
                continue
            between = ([lasting[step - 1].after] if step else []) + [s.after for s in lasting[step : step + 1]]
            if step + 1 == len(lasting):
                between.pop()  # the copy itself
            elements = sum(self.bytes(layout, 1) for layout in between) + staging_elements(lasting[step], mesh)
            if elements:
                alive = summed(dict.fromkeys(variables, 1.0), self._made(earlier, here, there[0]))
                yield elements, self.maximum([alive])

    def lasting(self, path: tuple[Step, ...]) -> tuple[Step, ...]:
        """The steps of a conversion whose results have memory of their own."""
        if id(path) not in self._lasting:
            self._lasting[id(path)] = tuple(s for s in path if lasts(s, self.programme.problem.mesh))
        return self._lasting[id(path)]

    def maximum(self, found: list[Terms]) -> Terms:
        """A sum that is at least each of some sums and, where memory counts, no more."""
        distinct = [terms for i, terms in enumerate(found) if terms and terms not in found[:i]]
        if not distinct:
            return {}
        if len(distinct) == 1 and all(f > 0 for f in distinct[0].values()):
            return distinct[0]
        alive = self.programme.model.variable()
        for terms in distinct:
            constant = terms.get(CONSTANT, 0.0)
            rest = [(v, -f) for v, f in terms.items() if v != CONSTANT]
            self.programme.model.row([(alive, 1.0), *rest], constant)
        return {alive: 1.0}


CONSTANT = -1


def lasts(step: Step, mesh: Mesh) -> bool:
    """Whether the result of a step has memory of its own; a slice that is one run of its operand has not."""
    return step.kind != "slice" or copies_slice(step, mesh)


def summed(*parts: Terms, constant: float = 0.0) -> Terms:
    out: dict[int, float] = {}
    for terms in parts:
        for v, f in terms.items():
            out[v] = out.get(v, 0.0) + f
    if constant:
        out[CONSTANT] = out.get(CONSTANT, 0.0) + constant
    return out
