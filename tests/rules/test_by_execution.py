"""Every rule is run under every cut, on real numbers, and compared with the whole op.

Pending sums come split 60/40 with mixed signs. A wrong rule fails: dropping a letter, or passing on a sum that does not
pass, shows as a wrong number.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.axes import Axes, analyse, computes, is_getitem
from autopar.capture import capture
from autopar.choices import choices
from autopar.graph import Graph, Input, Output
from autopar.layout import Mesh
from autopar.models import awkward, encoder, gpt, llama, mlp, resnet, t5, unet, vit
from autopar.passes import emit
from autopar.plan import Plan
from autopar.rules.core import RULES, operands, results
from autopar.rules.document import called
from autopar.rules.table import lookup
from autopar.verify.compare import largest
from tests.harness.simulate import run
from tests.rules.snippets import SNIPPETS

MODELS = (
    mlp.tiny,
    gpt.tiny,
    llama.tiny,
    resnet.tiny,
    unet.tiny,
    vit.tiny,
    encoder.tiny,
    t5.tiny,
    awkward.square,
    awkward.scores,
    awkward.gram,
    awkward.recurrent,
    awkward.fused,
)
MESHES = (Mesh(("a",), (2,)), Mesh(("a",), (3,)), Mesh(("a", "b"), (2, 2)))


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


def values_of(node: fx.Node, graph: Graph) -> dict[str, Tensor]:
    """Real operands: small integers that index something, booleans, or positive numbers."""
    generator = torch.Generator().manual_seed(len(node.name))
    top = min([3, *(n for operand in operands(node) for n in operand.meta["val"].shape if n > 1)])
    found = {}
    for entry in graph.inputs:
        val = graph.node(entry.node).meta["val"]
        if entry.node == "rng":
            found[entry.node] = torch.tensor([7, 3])
        elif val.dtype == torch.bool:
            found[entry.node] = torch.rand(val.shape, generator=generator) < 0.6
        elif val.dtype.is_complex:
            found[entry.node] = torch.rand(val.shape, generator=generator, dtype=val.dtype) + 0.3
        elif not val.dtype.is_floating_point:
            found[entry.node] = torch.randint(0, top, val.shape, generator=generator, dtype=val.dtype)
        else:
            found[entry.node] = torch.rand(val.shape, generator=generator, dtype=torch.float64).to(val.dtype) + 0.3
    return found


def key(node: fx.Node) -> Any:
    """What makes two nodes the same case: the op, its letters, and which of them may be cut."""
    found, _ = lookup(node)
    return str(node.target), found.inputs, found.outputs, found.whole, found.linear, found.groups


def traced(function: Any, inputs: tuple[Tensor, ...]) -> Iterator[fx.Node]:
    """The ops of a snippet."""
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    for node in graph.nodes:
        if computes(node):
            node.meta["phase"] = "forward"
            yield node


def samples() -> Iterator[tuple[str, fx.Node]]:
    """One node for every op and way to cut it, in the joint graphs of the models and in the snippets."""
    seen: dict[Any, fx.Node] = {}
    for function, inputs in SNIPPETS.values():
        for node in traced(function, inputs):
            seen.setdefault(key(node), node)
    for build in MODELS:
        graph = capture(*called(build()), double=True)
        for node in graph.fx.nodes:
            if computes(node):
                seen.setdefault(key(node), node)
    counts: dict[str, int] = {}
    for node in seen.values():
        op = str(node.target)
        counts[op] = counts.get(op, 0) + 1
        yield f"{op}-{counts[op]}", node


CASES = dict(samples())


def whole_results(graph: Graph, values: dict[str, Tensor]) -> list[Tensor]:
    module = fx.GraphModule({}, graph.fx)
    return list(fx.Interpreter(module).run(*(values[e.node] for e in graph.inputs)))


def check(node: fx.Node) -> int:
    """Number of (mesh, choice) pairs that were run and agreed."""
    graph = single(node)
    axes: Axes = analyse(graph)
    values = values_of(node, graph)
    expected = whole_results(graph, values)
    op = next(n for n in graph.fx.nodes if computes(n) and not is_getitem(n))
    count = 0
    for mesh in MESHES:
        for choice in choices(axes, op, mesh):
            layouts = dict(zip((o.name for o in operands(op)), choice.inputs, strict=True))
            if len(set(zip((o.name for o in operands(op)), choice.inputs, strict=True))) != len(layouts):
                continue  # one value wanted in two layouts: covered by the models
            plan = Plan(mesh, {op.name: choice.roles}, {}, inputs=layouts)
            found, _ = run(emit(graph, axes, plan), values, [])
            for i, (got, want) in enumerate(zip(found, expected, strict=True)):
                got, want = (torch.view_as_real(t) if t.is_complex() else t for t in (got, want))
                scale = max(largest(want), 1e-30) if want.is_floating_point() else 1.0
                apart = (got.double() - want.double()).abs().masked_fill(got == want, 0.0)  # infinities too may agree
                error = float(apart.max()) / scale if want.numel() else 0.0
                assert error < 1e-9, f"{node.target} result {i} under {choice.roles} on {mesh}: off by {error:.1e}"
            count += 1
    return count


@pytest.mark.parametrize("case", CASES)
def test_every_cut_of_every_rule_equals_the_whole_op(case: str) -> None:
    assert check(CASES[case]) > 0


def test_every_row_of_the_table_is_run() -> None:
    covered = {case.rsplit("-", 1)[0] for case in CASES}
    assert {str(op) for op in RULES} <= covered
