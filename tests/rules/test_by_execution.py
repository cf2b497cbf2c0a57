"""Every rule is run under every cut, on real numbers, and compared with the whole op.

How is told in `autopar/verify/cuts.py`; here are the ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.axes import computes
from autopar.capture import capture
from autopar.graph import Graph
from autopar.layout import Mesh
from autopar.models import awkward, encoder, gpt, llama, mlp, resnet, t5, unet, vit
from autopar.rules.core import RULES, operands
from autopar.rules.document import called
from autopar.rules.experts import INDEX_AT
from autopar.rules.table import lookup
from autopar.verify.cuts import cuts, single
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


PARTS = 20


@cache
def cases() -> dict[str, fx.Node]:
    return dict(samples())


def check(node: fx.Node) -> int:
    """Number of (mesh, choice) pairs that were run and agreed."""
    graph, count = single(node), 0
    for cut in cuts(graph, values_of(node, graph), MESHES):
        assert cut.error < 1e-9, f"{node.target} under {cut} on {cut.mesh}: {cut.problem or cut.errors}"
        count += 1
    return count


@pytest.mark.parametrize("part", range(PARTS))
def test_every_cut_of_every_rule_equals_the_whole_op(part: int) -> None:
    for case, node in list(cases().items())[part::PARTS]:
        assert check(node) > 0, case


def test_every_row_of_the_table_is_run() -> None:
    covered = {case.rsplit("-", 1)[0] for case in cases()} | {str(op) for op in INDEX_AT}  # rows: tests/test_experts.py
    assert {str(op) for op, rule in RULES.items() if not rule.given} <= covered
