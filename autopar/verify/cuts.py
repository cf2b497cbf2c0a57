"""One op under every cut of its rule, on real numbers, beside the whole op.

In: a node, real operands, meshes.  Out: a `Cut` for every (mesh, choice).  Next: `simulate.py`.

Pending sums come split 60/40 with mixed signs. A wrong rule shows: a letter that is missing, or a sum passed on that
does not pass, is a wrong number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import getitem

import torch
from torch import Tensor, fx

from autopar.axes import analyse, computes
from autopar.choices import Choice, choices
from autopar.graph import Graph, Input, Output
from autopar.layout import Mesh
from autopar.passes import emit
from autopar.plan import Plan
from autopar.rules.core import operands, results
from autopar.verify.simulate import run


@dataclass(frozen=True)
class Cut:
    """What became of one choice on one mesh.

    errors    per result, the largest difference from the whole op's over its largest entry
    problem   why there are no numbers, where the op could not run on its pieces
    """

    mesh: Mesh
    choice: Choice
    errors: tuple[float, ...] = ()
    problem: str = ""

    @property
    def error(self) -> float:
        """The largest of all results; infinite where the op did not run."""
        return float("inf") if self.problem else max(self.errors, default=0.0)

    def __str__(self) -> str:
        """`b@data d@model`, or `whole`."""
        parts = [f"{role}@{axis}" for axis, role in zip(self.mesh.names, self.choice.roles, strict=True) if role]
        return " ".join(parts) or "whole"


def single(node: fx.Node) -> Graph:
    """A graph of one op: its operands come in, its results go out."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for operand in operands(node):
        if operand not in env:
            env[operand] = graph.placeholder(operand.name)
            env[operand].meta = {"val": operand.meta["val"], "phase": "forward"}
    op = graph.node_copy(node, env.__getitem__)
    op.meta = {**node.meta, "phase": "forward"}
    ends, outputs = [], []
    for i, value in enumerate(results(node)):
        if value is None:
            continue
        end = op
        if isinstance(node.meta["val"], (list, tuple)):
            end = graph.call_function(getitem, (op, i))
            end.meta = {"val": value, "phase": "forward"}
        ends.append(end)
        outputs.append(Output("output", f"result {i}", end.name))
    graph.output(tuple(ends))
    inputs = tuple(Input(n.name, "input", n.name) for n in env.values())
    return Graph(graph, inputs, tuple(outputs))


def cuts(graph: Graph, values: Mapping[str, Tensor], meshes: Iterable[Mesh]) -> Iterator[Cut]:
    """Every cut of the one op of a graph that `single` made; `values` are the operands by name."""
    axes = analyse(graph)
    expected = list(fx.Interpreter(fx.GraphModule({}, graph.fx)).run(*(values[e.node] for e in graph.inputs)))
    op = next(node for node in graph.fx.nodes if computes(node))
    for mesh in meshes:
        for choice in choices(axes, op, mesh):
            wanted = set(zip((o.name for o in operands(op)), choice.inputs, strict=True))
            layouts = dict(wanted)
            if len(wanted) != len(layouts):
                continue  # one value wanted in two layouts
            program = emit(graph, axes, Plan(mesh, {op.name: choice.roles}, {}, inputs=layouts))
            try:
                found, _ = run(program, values, [])
            except Exception as error:  # noqa: BLE001  (an op may raise anything on a piece that it cannot take)
                yield Cut(mesh, choice, problem=f"{type(error).__name__}: {first_line(error)}")
            else:
                yield Cut(mesh, choice, tuple(difference(a, b) for a, b in zip(found, expected, strict=True)))


def first_line(error: Exception) -> str:
    """What went wrong, in short."""
    return str(error).partition("\n")[0]


def difference(got: Tensor | None, want: Tensor) -> float:
    """Largest difference over the largest finite entry; infinite where one is finite and the other is not."""
    assert got is not None
    if got.shape != want.shape:
        return float("inf")
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (got, want))
    a, b = a.double(), b.double()
    off = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    if not off.numel():
        return 0.0
    finite = b.abs()[b.isfinite()]
    scale = float(finite.max()) if finite.numel() and want.dtype.is_floating_point | want.is_complex() else 1.0
    return float(off.max()) / max(scale, 1e-30)
