"""An op of the user's with a tensor that is given by keyword alone, between two layers, with and without a rule."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn, ops

import autopar
from autopar import strategies
from autopar.verify.pool import Pool
from tests.reports.harness import TINY, Made, parity

below_autograd = torch._C._AutoDispatchBelowAutograd


def define(name: str) -> Any:
    """`report::NAME(x, *, w)` and its backward, which `torch.library.custom_op` would not take."""
    torch.library.define(f"report::{name}", "(Tensor x, *, Tensor w) -> Tensor")
    torch.library.define(f"report::{name}_backward", "(Tensor grad, *, Tensor x, Tensor w) -> (Tensor, Tensor)")
    torch.library.impl(f"report::{name}", "CPU", lambda x, *, w: x * w)
    torch.library.impl(f"report::{name}_backward", "CPU", backward)
    torch.library.register_fake(f"report::{name}", lambda x, *, w: torch.empty_like(x))
    torch.library.register_fake(
        f"report::{name}_backward", lambda grad, *, x, w: (torch.empty_like(x), torch.empty_like(w))
    )

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            with below_autograd():
                return getattr(ops.report, name)(x, w=w)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            x, w = ctx.saved_tensors
            return getattr(ops.report, f"{name}_backward")(grad, x=x, w=w)

    torch.library.impl(f"report::{name}", "Autograd", lambda x, *, w: Scale.apply(x, w))
    return getattr(ops.report, name)


def backward(grad: Tensor, *, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return grad * w, (grad * x).flatten(0, -2).sum(0)


plain, ruled = define("plain"), define("ruled")
autopar.rule(ruled, "... d, d -> ... d", linear="each")
autopar.rule(ops.report.ruled_backward, "... d, ... d, d -> ... d, d", linear="0")


class Net(nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 4)
        self.w = nn.Parameter(torch.rand(10) + 0.5)
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.op(self.up(x), w=self.w)).square().mean()


def without_rule() -> Made:
    return Net(plain).double(), (torch.randn(7, 5, 6).double(),), {}


def with_rule() -> Made:
    return Net(ruled).double(), (torch.randn(7, 5, 6).double(),), {}


def planned(make: Any, strategy: Any) -> autopar.Plan:
    model, args, _ = make()
    there = autopar.ClusterSpec.preset("cpu-gloo", devices=2)
    return autopar.plan(model, there, example_inputs=args, strategy=strategy)


@pytest.mark.parametrize("strategy", [strategies.ddp(), strategies.tensor()], ids=str)
def test_the_op_is_cut_with_a_rule_and_whole_with_a_log_line_without(
    caplog: pytest.LogCaptureFixture, strategy: Any
) -> None:
    with caplog.at_level(logging.WARNING, "autopar"):
        whole, cut = planned(without_rule, strategy), planned(with_rule, strategy)
    letter = ".1" if str(strategy) == "ddp()" else "d"
    assert {name: roles for name, roles in whole.ops.items() if name.startswith("plain")} == {
        "plain": ("",),
        "plain_backward": ("",),
    }
    assert {name: roles for name, roles in cut.ops.items() if name.startswith("ruled")} == {
        "ruled": (letter,),
        "ruled_backward": (letter,),
    }
    told = [record.message.partition(",")[0] for record in caplog.records]
    assert told == [
        f"report.{name}.default has no rule and runs whole on every device" for name in ("plain", "plain_backward")
    ]


@pytest.mark.parametrize("make", [without_rule, with_rule])
@pytest.mark.parametrize("family", ["ddp", "zero3", "tensor"])
def test_training_equals_one_device(ranks: Pool, make: Any, family: str) -> None:
    for gaps in ranks.run(parity, make, family, world=2):
        assert max(gaps.values()) < TINY and gaps["ranks"] == 0, gaps
