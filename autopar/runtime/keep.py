"""The storage of a first program, in the words of another graph.

In: the plan that decided how parameters are kept, another graph of the same module.  Out: the same decisions there.
Next: `module.py`.

Another graph may see other factors in the same dim: 24 rows as 24, or as 4 heads of 6. A layout is carried over by
looking for cuts of the new factors that give every device the same piece.
"""

from __future__ import annotations

from autopar.axes import Axes
from autopar.errors import UnsupportedError
from autopar.graph import Graph
from autopar.layout import Layout, Mesh
from autopar.placements import DimFactors, same_pieces
from autopar.plan import ParameterPlan, Plan


def kept_in(axes: Axes, graph: Graph, plan: Plan) -> dict[str, ParameterPlan]:
    """How every parameter of `graph` is kept already."""
    known = {entry.name: entry for entry in graph.inputs if entry.kind == "parameter"}
    out: dict[str, ParameterPlan] = {}
    for name, kept in plan.parameters.items():
        if name in known:
            factors = axes.factors[known[name].node, 0]
            home = carried(kept.home, factors, plan.mesh, name)
            stored = home if kept.stored == kept.home else carried(kept.stored, factors, plan.mesh, name)
            out[name] = ParameterPlan(kept.level, home, stored, kept.keep)
    return out


def carried(layout: Layout, factors: tuple[DimFactors, ...], mesh: Mesh, name: str) -> Layout:
    """The layout of the same pieces over other factors."""
    if layout.factors == factors:
        return layout
    cuts = []
    for old, cut, new in zip(layout.factors, layout.cuts, factors, strict=True):
        found = same_pieces(old, cut, new, mesh)
        if found is None:
            raise UnsupportedError(
                f"{name} is stored as {layout} since the first call; this call sees its dims as {factors}, in which "
                "there are no such pieces\n  try: parallelize with this kind of call as example_inputs"
            )
        cuts.append(found)
    return Layout(factors, tuple(cuts))
