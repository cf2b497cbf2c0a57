"""Everything the compiler made on the way to a plan, as text files.

In: a `Made`.  Out: a folder.  Next: `passes/__init__.py`.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autopar import files
from autopar.fingerprint import type_text
from autopar.passes import PIPELINE, emit
from autopar.planner.program import Programme
from autopar.planner.search import restricted
from autopar.planner.units import problem
from autopar.planning import Made


def dump(made: Made, folder: Path) -> None:
    """Write the graph after every pass, the final program, the integer programme, the plan as JSON and as text."""
    folder.mkdir(parents=True, exist_ok=True)
    graph = made.graph
    (folder / "00-captured.txt").write_text(graph_text(graph.fx))
    for number, step in enumerate(PIPELINE, 1):
        graph = step(graph, made.axes, made.plan)
        (folder / f"{number:02}-{step.__name__}.txt").write_text(graph_text(graph.fx))
    program = emit(made.graph, made.axes, made.plan)
    for part in ("refresh", "forward", "backward"):
        (folder / f"program-{part}.txt").write_text(graph_text(getattr(program, part)))
    if program.pipeline is not None:
        for phase in ("forward", "backward"):
            cut = getattr(program.pipeline, phase)
            for stage, cells in enumerate(zip(cut.bodies, cut.ends, strict=True)):
                for name, cell in zip(("body", "end"), cells, strict=True):
                    (folder / f"stage-{stage}-{phase}-{name}.txt").write_text(graph_text(cell.graph))
    (folder / "solver.lp").write_text(programme_text(made))
    files.save(made.plan, folder / "plan.json")
    (folder / "plan.txt").write_text(f"{made.plan}\n")


def programme_text(made: Made) -> str:
    """The integer programme of the plan's mesh in LP format; rows about memory are added to it while it is solved."""
    mesh = made.plan.mesh
    restriction = restricted(made.graph, made.axes, mesh, made.strategy, made.pins)
    programme = Programme(problem(made.graph, made.axes, mesh, made.cluster, restriction))
    model = programme.model
    units: dict[int, list[str]] = defaultdict(list)
    for unit in programme.problem.units:
        units[unit.shape].append(unit.name)
    notes = [
        f"\\ x{sums[0]}: {name(units[c])} as {option.label}"
        for c, options in enumerate(programme.problem.options)
        for option, sums in zip(options, programme.option_sums(c), strict=True)
        if len(sums) == 1
    ]
    terms: dict[int, list[str]] = defaultdict(list)
    for row, column, factor in zip(model.row_ids, model.column_ids, model.factors, strict=True):
        terms[row].append(f"{factor:+g} x{column}")
    rows = []
    for row in range(model.rows):
        lower, upper, left = model.row_lower[row], model.row_upper[row], " ".join(terms[row])
        if lower == upper:
            rows.append(f" r{row}: {left} = {lower:g}")
            continue
        rows += [f" r{row}: {left} >= {lower:g}"] if lower > float("-inf") else []
        rows += [f" r{row}: {left} <= {upper:g}"] if upper < float("inf") else []
    cost = " ".join(f"{amount:+.9g} x{v}" for v, amount in sorted(model.costs.items()) if amount)
    bounds = [f" 0 <= x{v} <= {upper:g}" for v, upper in enumerate(model.upper)]
    binaries = " ".join(f"x{v}" for v in model.binaries)
    parts = [
        *notes,
        "Minimize",
        f" seconds: {cost}",
        "Subject To",
        *rows,
        "Bounds",
        *bounds,
        "Binaries",
        f" {binaries}",
        "End",
    ]
    return "\n".join(parts) + "\n"


def name(units: list[str]) -> str:
    """A class of units by its first member."""
    return units[0] + (f" and {len(units) - 1} more" if len(units) > 1 else "")


def graph_text(graph: fx.Graph) -> str:
    """One node a line: `%y : f32[b@data, d] = mm(%x, %w)   # blocks.0.up`."""
    return "\n".join(node_text(node) for node in graph.nodes) + "\n"


def node_text(node: fx.Node) -> str:
    """One line."""
    if node.op == "output":
        return f"return {argument(node.args[0])}"
    value = node.meta.get("val")
    first = next((v for v in value if v is not None), None) if isinstance(value, (tuple, list)) else value
    kind = type_text(first) if isinstance(first, torch.Tensor) else ""
    layouts = node.meta.get("layouts")
    if layouts and kind:
        kind = kind.split("[")[0] + str(layouts[0])
    words = [argument(a) for a in node.args] + [f"{k}={argument(v)}" for k, v in node.kwargs.items()]
    name = node.op if node.op in ("placeholder", "get_attr") else getattr(node.target, "__name__", str(node.target))
    target = f" {node.target}" if node.op in ("placeholder", "get_attr") else f"({', '.join(words)})"
    where = f"   # {node.meta['module']}" if node.meta.get("module") else ""
    return f"%{node.name} : {kind} = {name}{target}{where}"


def argument(value: Any) -> str:
    """An operand as it prints."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(argument(v) for v in value) + "]"
    return str(value)
