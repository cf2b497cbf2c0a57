"""Models drawn from the rule table: captured, planned at random, run on simulated ranks, equal to plain eager torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from autopar.axes import analyse
from autopar.capture import capture
from autopar.layout import Mesh
from autopar.passes import copy_views, emit
from autopar.planner.random_plan import random_plan
from autopar.random import replay
from autopar.verify.simulate import run
from tests.harness.generated import Generated, Move, batch, moves
from tests.harness.reference import errors, values_of

MESHES = (Mesh(("a",), (2,)), Mesh(("a",), (3,)), Mesh(("a", "b"), (2, 2)))


def eager(model: torch.nn.Module, scale: float = 0.7) -> dict[str, torch.Tensor]:
    """Loss and gradients of the plain model in float64."""
    model.double()
    tensors = batch()
    with replay(3, 1):
        loss = model(*tensors)
    (loss * scale).backward()
    named = dict(model.named_parameters())
    return {"loss": loss.detach()} | {name: p.grad for name, p in named.items() if p.grad is not None}


@settings(
    max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, phases=(Phase.generate,)
)
@given(plan=moves(), classify=st.booleans(), tied=st.booleans(), seed=st.integers(0, 1000))
def test_a_generated_model_equals_eager_torch_under_a_random_plan(
    plan: list[Move], classify: bool, tied: bool, seed: int
) -> None:
    graph = copy_views(capture(Generated(plan, classify, tied), batch(), double=True))
    model = Generated(plan, classify, tied)
    wanted = eager(model)
    axes = analyse(graph)
    bucket, copied = ((0, 0), (300, 300), (1 << 20, 0), (1 << 20, 1 << 20))[seed % 4]
    drawn = replace(random_plan(graph, axes, MESHES, seed), bucket_bytes=bucket, copied_bytes=copied)
    found, _ = run(
        emit(graph, axes, drawn),
        values_of(graph, model, batch()),
        [torch.tensor(0.7, dtype=torch.float64)],
    )
    expected = [wanted.get("loss" if o.kind == "loss" else o.name) for o in graph.outputs]
    worst = errors(graph, found, expected)
    assert max(worst.values()) < 1e-9, worst
