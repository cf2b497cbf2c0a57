"""From a solution of the programme to a `Plan`.

In: a `Programme`, values of its variables.  Out: a `Plan` without costs.  Next: `budget.py`.
"""

from __future__ import annotations

from types import MappingProxyType

from autopar.plan import ParameterPlan, Plan
from autopar.planner.program import Programme
from autopar.planner.solver import Solution
from autopar.planner.units import input_layout


def decision(programme: Programme, solution: Solution, local: frozenset[str]) -> Plan:
    """The plan that a solution stands for."""
    made = programme.problem
    picked = programme.picked(solution)
    ops: dict[str, tuple[str, ...]] = {}
    parameters: dict[str, ParameterPlan] = {}
    entries = {entry.node: entry.name for entry in made.graph.inputs}
    for unit in made.units:
        label = made.options_of(unit)[picked[unit.shape]].label
        if unit.kind == "op":
            ops[unit.name] = label
        elif unit.kind == "parameter":
            parameters[entries[unit.name]] = label
    inputs = {name: input_layout(made.axes, made.mesh, name, True) for name in sorted(local)}
    return Plan(made.mesh, MappingProxyType(ops), MappingProxyType(parameters), MappingProxyType(inputs))
