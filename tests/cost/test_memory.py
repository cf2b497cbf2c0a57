"""The sweep over an emitted program, against sums by hand."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from autopar.axes import analyse
from autopar.capture import capture
from autopar.cluster import ClusterSpec
from autopar.cost.memory import memory
from autopar.cost.optimizer import state_copies
from autopar.errors import PlanError
from autopar.models.mlp import build
from autopar.passes import copy_views, emit
from autopar.planner import plan
from autopar.strategies import ddp, zero

CLUSTER = ClusterSpec.preset("cpu-gloo", devices=4)
SIZES = {"d": 20, "f": 44, "g": 36, "o": 12}


def held(strategy: object, optimizer: object = "AdamW") -> dict[str, int]:
    model, args = build(b=8, **SIZES)
    graph = copy_views(capture(model, args, {}))
    axes = analyse(graph)
    found = plan(graph, CLUSTER, strategy=strategy, axes=axes, optimizer=optimizer)
    return dict(memory(emit(graph, axes, found), optimizer).persistent)


def parameter_bytes() -> int:
    return sum(p.numel() * 4 for p in build(b=8, **SIZES)[0].parameters())


def test_plain_data_parallel_holds_everything() -> None:
    bytes_ = held(ddp())
    assert bytes_["parameters"] == parameter_bytes()
    assert bytes_["optimizer"] == 2 * parameter_bytes()
    assert bytes_["copies"] == 0


@pytest.mark.parametrize("level", [1, 2, 3])
def test_zero_divides_what_it_says(level: int) -> None:
    bytes_ = held(zero(level))
    assert bytes_["parameters"] == parameter_bytes() // 4  # all sizes are multiples of 4
    assert bytes_["optimizer"] == 2 * parameter_bytes() // 4
    assert bytes_["copies"] == (parameter_bytes() if level < 3 else 0)


def test_the_state_of_the_optimizer_is_counted() -> None:
    assert held(ddp(), "SGD")["optimizer"] == parameter_bytes()
    assert held(ddp(), 0)["optimizer"] == 0
    assert held(ddp(), partial(torch.optim.SGD, lr=0.1))["optimizer"] == 0
    assert held(ddp(), partial(torch.optim.AdamW, amsgrad=True))["optimizer"] == 3 * parameter_bytes()
    assert state_copies(torch.optim.AdamW) == 2
    with pytest.raises(PlanError, match="the state of the optimizer Shampoo is not known"):
        state_copies("Shampoo")


def test_inputs_are_whole_on_every_device() -> None:
    assert held(ddp())["inputs"] == 8 * (20 + 12) * 4 + 16 + 4  # the batch, the random state, the loss gradient
