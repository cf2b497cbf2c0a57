"""Hand-written strategies as constraints: what they show, what they count, what they refuse."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from autopar.axes import Axes, analyse
from autopar.capture import capture
from autopar.cluster import ClusterSpec
from autopar.errors import PlanError, UnsupportedError
from autopar.graph import Graph
from autopar.models import moe
from autopar.models.gpt import build
from autopar.passes import copy_views, emit
from autopar.plan import Plan
from autopar.planner import plan
from autopar.strategies import Strategy, ddp, expert, fsdp, hsdp, megatron, tensor, zero

CLUSTER = ClusterSpec.preset("cpu-gloo", devices=4)
ALL = [
    ddp(), zero(1), zero(2), zero(3), fsdp(reshard=False), hsdp(2), tensor(4), megatron(4), megatron(4, sp=True),
    ddp(2) * tensor(2), zero(3, 2) * megatron(2, sp=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def case() -> tuple[Graph, Axes]:
    model, args = build(b=12, s=8, v=48, d=36, heads=12, f=60, layers=2)
    graph = copy_views(capture(model, args, {}))
    return graph, analyse(graph)


def counted(graph: Graph, axes: Axes, found: Plan) -> Counter[str]:
    """Collectives per phase and kind."""
    program = emit(graph, axes, found)
    parts = {"refresh": program.refresh, "forward": program.forward, "backward": program.backward}
    return Counter(
        f"{phase} {node.meta['step'].kind}"
        for phase, part in parts.items()
        for node in part.nodes
        if "step" in node.meta and not node.meta["step"].free
    )


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_every_strategy_shows_and_is_priced_exactly(case: tuple[Graph, Axes], strategy: Strategy) -> None:
    graph, axes = case
    found = plan(graph, CLUSTER, axes=axes, strategy=strategy)
    assert strategy.shows(found)
    assert found.certificate["programme_s"] == pytest.approx(found.certificate["objective_s"], rel=1e-9)


def test_ddp_reduces_every_gradient_once(case: tuple[Graph, Axes]) -> None:
    graph, axes = case
    found = plan(graph, CLUSTER, axes=axes, strategy=ddp())
    assert counted(graph, axes, found)["backward all_reduce"] == len(found.parameters)


def test_zero_3_gathers_in_both_phases_and_scatters_every_gradient_once(case: tuple[Graph, Axes]) -> None:
    graph, axes = case
    found = plan(graph, CLUSTER, axes=axes, strategy=zero(3))
    counts = counted(graph, axes, found)
    assert counts["backward reduce_scatter"] == len(found.parameters)
    assert counts["forward all_gather"] >= len(found.parameters)
    assert counts["backward all_gather"] > 0
    kept = counted(graph, axes, plan(graph, CLUSTER, axes=axes, strategy=fsdp(reshard=False)))
    assert kept["backward all_gather"] == 0


def test_a_megatron_block_has_two_reductions_a_phase(case: tuple[Graph, Axes]) -> None:
    graph, axes = case
    counts = counted(graph, axes, plan(graph, CLUSTER, axes=axes, strategy=megatron(4)))
    assert counts["forward all_reduce"] == 2 * 2
    assert counts["backward all_reduce"] == 2 * 2 + 1  # and the head's input


def test_sequence_parallel_scatters_and_gathers(case: tuple[Graph, Axes]) -> None:
    graph, axes = case
    counts = counted(graph, axes, plan(graph, CLUSTER, axes=axes, strategy=megatron(4, sp=True)))
    assert counts["forward reduce_scatter"] >= 4
    assert counts["forward all_gather"] >= 4
    assert counts["forward all_reduce"] == 0


def test_heads_that_do_not_suffice_are_refused_in_one_line() -> None:
    model, args = build(b=8, s=8, v=48, d=36, heads=2, f=60, layers=1)
    graph = copy_views(capture(model, args, {}))
    with pytest.raises(UnsupportedError) as refused:
        plan(graph, CLUSTER, strategy=tensor(4))
    first = str(refused.value).splitlines()[0]
    assert first == "tensor(4): 2 KV heads cannot be cut over 4 devices, some would have none; use at most 2"
    assert plan(graph, CLUSTER, mesh=None).ops


def test_heads_do_not_matter_to_experts_and_the_refusal_names_a_number_that_does() -> None:
    model, args = moe.build(b=7, s=5, v=37, d=24, heads=4, f=12, e=8, k=2, layers=2)
    graph, three = copy_views(capture(model, args, {})), ClusterSpec.preset("cpu-gloo", devices=3)
    assert plan(graph, three, strategy=expert()).ops
    with pytest.raises(UnsupportedError, match=r"4 KV heads cannot be cut over 3 devices.*use at most 2"):
        plan(graph, three, strategy=tensor())


@pytest.mark.parametrize("strategy", [None, ddp(), zero(3)], ids=str)
def test_a_parameter_without_elements_is_kept_whole(strategy: Any) -> None:
    model = nn.Linear(6, 4)
    model.register_parameter("none", nn.Parameter(torch.empty(0)))
    graph = copy_views(capture(model, (torch.ones(8, 6),), {}, loss_fn=lambda y: y.square().mean()))
    made = plan(graph, CLUSTER, strategy=strategy)
    assert "none" not in made.parameters or not made.parameters["none"].stored.axes


def test_a_batch_that_does_not_suffice_is_refused(case: tuple[Graph, Axes]) -> None:
    model, args = build(b=5, s=8, v=48, d=36, heads=2, f=60, layers=1)
    graph = copy_views(capture(model, args, {}))
    with pytest.raises(UnsupportedError, match=r"ddp\(\): a batch of 5 \(args\[0\]\) cannot be cut over 4 devices"):
        plan(graph, CLUSTER, strategy=ddp())


def test_sizes_must_make_up_the_cluster() -> None:
    with pytest.raises(PlanError, match=r"ddp\(3\): 3 devices do not make up the 4 of the cluster"):
        ddp(3).mesh(4)
    with pytest.raises(PlanError, match="both rule the mesh axis 'model'"):
        tensor(2) * megatron(2)
    assert str((ddp(2) * megatron(sp=True)).mesh(8)) == "mesh(data=2, model=4)"
    with pytest.raises(PlanError, match="the level is 1, 2 or 3"):
        zero(4)
