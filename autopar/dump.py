"""Everything the compiler made on the way to a plan, as text files.

In: a `Made`.  Out: a folder.  Next: `passes/__init__.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import fx

from autopar import files
from autopar.fingerprint import type_text
from autopar.passes import PIPELINE, emit
from autopar.planning import Made


def dump(made: Made, folder: Path) -> None:
    """Write the graph after every pass, the final program, the plan as JSON and as text."""
    folder.mkdir(parents=True, exist_ok=True)
    graph = made.graph
    (folder / "00-captured.txt").write_text(graph_text(graph.fx))
    for number, step in enumerate(PIPELINE, 1):
        graph = step(graph, made.axes, made.plan)
        (folder / f"{number:02}-{step.__name__}.txt").write_text(graph_text(graph.fx))
    program = emit(made.graph, made.axes, made.plan)
    for part in ("refresh", "forward", "backward"):
        (folder / f"program-{part}.txt").write_text(graph_text(getattr(program, part)))
    files.save(made.plan, folder / "plan.json")
    (folder / "plan.txt").write_text(f"{made.plan}\n")


def graph_text(graph: fx.Graph) -> str:
    """One node a line: `%y : f32[b@data, d] = mm(%x, %w)   # blocks.0.up`."""
    return "\n".join(node_text(node) for node in graph.nodes) + "\n"


def node_text(node: fx.Node) -> str:
    """One line."""
    if node.op == "output":
        return f"return {argument(node.args[0])}"
    value = node.meta.get("val")
    first = next((v for v in value if v is not None), None) if isinstance(value, (tuple, list)) else value
    kind = type_text(first) if hasattr(first, "dtype") else ""
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
