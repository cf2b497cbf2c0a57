"""Letters whose dims do not agree about their factors stay whole, and so does what stands beside them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.axes import analyse
from autopar.capture import capture
from autopar.layout import Mesh
from autopar.passes import copy_views, emit
from autopar.planner.random_plan import random_plan
from autopar.verify.simulate import run
from tests.harness.reference import errors, values_of


class GroupsAndHeads(nn.Module):
    """Twelve channels are two groups for the convolution and three heads behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Conv1d(12, 12, 1, groups=2, dtype=torch.float64)
        self.scale = nn.Parameter(torch.randn(3, 1, 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.mix(x).unflatten(1, (3, 4)) * self.scale).softmax(2).square().sum()


@pytest.mark.parametrize("seed", range(12))
def test_groups_of_channels_that_are_no_heads(seed: int) -> None:
    model, x = GroupsAndHeads(), torch.randn(3, 12, 5, dtype=torch.float64)
    graph = copy_views(capture(model, (x,), double=True))
    axes = analyse(graph)
    plan = random_plan(graph, axes, (Mesh(("a",), (2,)), Mesh(("a", "b"), (2, 2))), seed)
    found, _ = run(emit(graph, axes, plan), values_of(graph, model, (x,)), [torch.tensor(1.0, dtype=torch.float64)])
    loss = model(x)
    named = dict(model.named_parameters())
    wanted = {"loss": loss, **dict(zip(named, torch.autograd.grad(loss, [*named.values()]), strict=True))}
    expected = [wanted["loss" if o.kind == "loss" else o.name].detach() for o in graph.outputs]
    worst = errors(graph, found, expected)
    assert max(worst.values()) < 1e-9, worst
