"""Stages cut from a program: every op runs once, values go forward, gradients back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import ClusterSpec, InputError, PlanError, UnsupportedError, files, strategies
from autopar.api import Compiler
from autopar.axes import Axes
from autopar.graph import Graph
from autopar.layout import MICRO, STAGE, Layout, Mesh, conversion
from autopar.legality import check_legal
from autopar.models import gpt, moe, resnet
from autopar.passes import emit
from autopar.passes.cut_stages import FREE, settles
from autopar.plan import Plan
from autopar.planner.stages import places, without_parameters
from autopar.program import Pipeline, Program

Case = tuple[Graph, Axes, Plan, Program]
MESH = Mesh(("data", STAGE, MICRO), (2, 2, 3))


def compiled(model: nn.Module, args: tuple[Tensor, ...], strategy: strategies.Strategy, devices: int = 2) -> Case:
    compiler = Compiler(ClusterSpec.preset("cpu-gloo", devices=devices), strategy=strategy)
    graph = compiler.graph(model, args, {})
    plan = compiler.made(graph, frozenset(), None)
    return graph, compiler.axes(graph), plan, compiler.emit(graph, plan)


@pytest.fixture(scope="module")
def case() -> Case:
    model, args = gpt.build(b=6, s=5, v=11, d=12, heads=3, f=10, layers=3)
    return compiled(model, args, strategies.pipeline(3, microbatches=2), devices=3)


def pipeline_of(case: Case) -> Pipeline:
    found = case[3].pipeline
    assert found is not None
    return found


def test_every_op_with_parameters_runs_in_one_stage(case: Case) -> None:
    graph, _, plan, program = case
    once = without_parameters(graph)
    for phase, whole in ((pipeline_of(case).forward, program.forward), (pipeline_of(case).backward, program.backward)):
        ran = Counter(
            n.name for cell in (*phase.bodies, *phase.ends) for n in cell.graph.nodes if n.op == "call_function"
        )
        wanted = {n.name for n in whole.nodes if n.op == "call_function" and not settles(n)}
        wanted -= {n.name for n in whole.nodes if n.meta.get("step") and n.meta["step"].axis == STAGE}
        assert set(ran) == wanted
        assert all(count == 1 for name, count in ran.items() if plan.stages.get(name, FREE) != FREE)
    assert set(plan.stages) == {n.name for n in graph.fx.nodes if n.op == "call_function"} - once
    assert set(plan.stages.values()) == {0, 1, 2}


def test_values_go_to_later_stages_and_gradients_to_earlier_ones(case: Case) -> None:
    forward, backward = pipeline_of(case).forward.sends, pipeline_of(case).backward.sends
    assert [(s.source, s.target) for s in forward] == [(0, 1), (1, 2)]
    assert all(s.source > s.target for s in backward)
    tied = [s for s in backward if (s.source, s.target) == (2, 0)]
    assert len(tied) == 1, "the head's part of the gradient of the tied weight goes to the embedding's stage"


def test_gradients_are_there_when_all_microbatches_have_run(case: Case) -> None:
    graph, _, plan, _ = case
    backward = pipeline_of(case).backward
    names = [o.name for o in graph.outputs if o.kind == "gradient"]
    settled = {s.name: s for stage in backward.settled for s in stage}
    for name, result in zip(names, backward.results, strict=True):
        assert result is not None
        cut = STAGE in plan.parameters[name].stored.axes
        assert (result.step is not None) == cut
        assert result.name in settled or any(result.name in cell.gives for cell in backward.ends)


def test_what_the_stages_hold_is_settled_first_and_cut_last() -> None:
    source = Layout(((8,), (6,)), (((),), ((),)), (("data", "sum"), (MICRO, "sum")))
    target = Layout(((8,), (6,)), ((("stage",),), ((),)))
    steps = conversion(source, target, MESH)
    assert steps is not None
    assert [(s.kind, s.axis) for s in steps] == [("all_reduce", MICRO), ("all_reduce", "data"), ("slice", STAGE)]


def test_microbatches_are_no_devices() -> None:
    assert MESH.devices == 4 and MESH.space == Mesh(("data", STAGE), (2, 2))
    assert [MESH.coordinate(rank) for rank in (0, 3)] == [{"data": 0, STAGE: 0}, {"data": 1, STAGE: 1}]


def test_stages_take_equal_seconds_where_little_is_sent() -> None:
    seconds = [1.0] * 12
    assert list(places(seconds, [9] * 13, 3)) == [4, 8]
    assert list(places(seconds, [9, 9, 9, 1, 9, 9, 9, 9, 9, 1, 9, 9, 9], 3)) == [3, 9]
    assert list(places([100.0, 1.0, 1.0], [9] * 4, 3)) == [1, 2]


def test_the_plan_says_where_stages_are_and_reads_back(case: Case) -> None:
    plan = case[2]
    lines = str(plan).splitlines()
    assert any(line.startswith("stage 0: tokens") for line in lines)
    assert any(line.startswith("stage 2: blocks.2") or "head" in line for line in lines if line.startswith("stage 2"))
    assert files.loads(files.dumps(plan)).stages == plan.stages
    assert "gap" not in plan.certificate


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda stages: {**stages, min(stages): 7}, "there are stages 0 to 2"),
        (lambda stages: {name: 2 - stage for name, stage in stages.items()}, "comes after stage"),
        (lambda stages: {}, "there are stages 0 to 2"),
    ],
)
def test_stages_that_cannot_be_are_refused(case: Case, change: object, words: str, tmp_path: Path) -> None:
    graph, axes, plan, _ = case
    assert callable(change)
    with pytest.raises(PlanError, match=words):
        check_legal(replace(plan, stages=change(dict(plan.stages))), graph, axes, where="p.json")


def test_another_cut_between_stages_is_emitted_as_it_stands(case: Case) -> None:
    graph, axes, plan, _ = case
    moved = {name: min(stage, 1) for name, stage in plan.stages.items()}
    edited = replace(plan, stages=moved)
    check_legal(edited, graph, axes)
    found = emit(graph, axes, edited).pipeline
    assert found is not None
    assert [cell.graph for cell in found.forward.bodies if cell.takes] == [c.graph for c in found.forward.bodies[:2]]


class Centred(nn.Module):
    """Takes the mean over the batch off."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h - h.mean(0)).square().mean()


@pytest.mark.parametrize(
    ("build", "line"),
    [(lambda: (Centred(), (torch.randn(6, 4),)), "h - h.mean"), (resnet.tiny, "self.norm"), (moe.tiny, "to_experts")],
    ids=["mean", "batch norm", "routing"],
)
def test_what_the_whole_batch_decides_is_refused_by_name(build: Any, line: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"cannot be run in microbatches: .*\n  from .*{line}"):
        compiled(*build(), strategies.pipeline(2))


def test_wrong_pipelines_are_refused() -> None:
    with pytest.raises(InputError, match="microbatches=0"):
        strategies.pipeline(2, microbatches=0)
    with pytest.raises(PlanError, match="there is no ZeRO beside it yet"):
        strategies.zero(3, 2) * strategies.pipeline(2)
    model, args = gpt.build(b=4, s=5, v=11, d=12, heads=3, f=10, layers=1)
    with pytest.raises(UnsupportedError, match=r"a batch of 4 .* cannot be cut over 3 microbatches"):
        compiled(model, args, strategies.pipeline(2, microbatches=3))
