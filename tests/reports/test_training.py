"""Frozen bases with trained additions, optimizers in every mode, and what frozen parameters cost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.verify.pool import Pool
from tests.reports.harness import TINY, Made, cluster, deliver, gap, gradients_gap, loss_of, state_gap, whole

FAMILIES = ("zero1", "zero3", "tensor", "pipeline", "auto")


class Adapted(nn.Module):
    """A frozen product and a trained one of rank 2 beside it."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.base = nn.Linear(inner, outer).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, inner) / inner)
        self.up = nn.Parameter(torch.randn(outer, 2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return y


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Adapted(7, 10), Adapted(10, 6)])
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.norm(x).square().mean() + x.mean()


def adapted() -> Made:
    return Stack().double(), (torch.randn(6, 7, dtype=torch.float64),), {}


# ---- a frozen base with trained additions ----------------------------------------------------------------------------


def additions(family: str) -> tuple[float, bool, bool]:
    """Gap after five steps; whether the base is as it was, bit for bit; whether it has no gradient."""
    ours, single, args, _ = deliver(adapted, family)
    pairs = [(m, torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), lr=0.05)) for m in (ours, single)]
    frozen = {name: whole(p).clone() for name, p in ours.named_parameters() if not p.requires_grad}
    worst = 0.0
    for _ in range(5):
        for module, _ in pairs:
            loss_of(module(*args)).backward()
        worst = max(worst, gradients_gap(ours, single))
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, state_gap(ours, single))
    now = dict(ours.named_parameters())
    same = all(torch.equal(whole(now[name]), before) for name, before in frozen.items())
    return worst, same, all(now[name].grad is None for name in frozen)


@pytest.mark.parametrize("family", FAMILIES)
def test_additions_train_and_their_base_stays(ranks: Pool, family: str) -> None:
    for worst, same, bare in ranks.run(additions, family, world=2):
        assert worst < TINY and same and bare


def thawed(family: str) -> float:
    """Freeze and thaw after `parallelize`: each time the call is another, and the numbers go on being right."""
    ours, single, args, _ = deliver(adapted, family)
    worst = 0.0
    for changed in ("layers.0.base.weight", "layers.1.up", "layers.0.base.weight"):
        for module in (ours, single):
            parameter = module.get_parameter(changed)
            parameter.requires_grad_(not parameter.requires_grad)
            module.zero_grad()
            loss_of(module(*args)).backward()
        worst = max(worst, gradients_gap(ours, single))
    return worst


@pytest.mark.parametrize("family", ("zero3", "tensor"))
def test_parameters_can_be_frozen_and_thawed_later(ranks: Pool, family: str) -> None:
    assert max(ranks.run(thawed, family, world=2)) < TINY


# ---- optimizers in every mode ----------------------------------------------------------------------------------------

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
MODES: dict[str, dict[str, Any]] = {
    "default": {}, "foreach": {"foreach": True}, "single": {"foreach": False}, "fused": {"fused": True},
}  # fmt: skip


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices alone."""
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def optimized(family: str, name: str, mode: str) -> float:
    ours, single, args, _ = deliver(adapted, family)
    made = [getattr(torch.optim, name)(groups(m), lr=0.05, **MODES[mode]) for m in (ours, single)]
    worst = 0.0
    for _ in range(3):
        for module, optimizer in zip((ours, single), made, strict=True):
            loss_of(module(*args)).backward()
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, state_gap(ours, single))
    return worst


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ("AdamW", "SGD"))
@pytest.mark.parametrize("family", ("zero2", "pipeline"))
def test_optimizers_work_in_every_mode_with_two_groups(ranks: Pool, family: str, name: str, mode: str) -> None:
    assert max(ranks.run(optimized, family, name, mode, world=2)) < TINY


# ---- what frozen parameters cost -------------------------------------------------------------------------------------


class Mostly(nn.Module):
    """Nine of ten layers are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(12, 12) for _ in range(10)))
        self.layers[:9].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def costs(strategy: str) -> tuple[dict[str, float], int, int, list[str]]:
    """The plan's costs; bytes of state and of gradients on this rank; names of frozen parameters with a gradient."""
    model, x = Mostly(), torch.randn(6, 12)
    ours = autopar.parallelize(copy.deepcopy(model), cluster(), example_inputs=(x,), strategy=strategy)
    optimizer = torch.optim.AdamW(ours.parameters())
    ours(x).backward()
    optimizer.step()
    state = [t for entry in optimizer.state.values() for t in entry.values() if t.dim()]
    held = [p.grad for p in ours.parameters() if p.grad is not None]
    wrong = [n for n, p in ours.named_parameters() if p.grad is not None and not p.requires_grad]
    assert gap(ours.get_parameter("layers.0.weight"), model.get_parameter("layers.0.weight")) == 0
    plan = ours.plan
    assert plan is not None
    return dict(plan.costs), local_bytes(state), local_bytes(held), wrong


def local_bytes(tensors: Iterable[Any]) -> int:
    return sum(t.to_local().numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("strategy", ("ddp()", "zero(2)", "zero(3)"))
def test_frozen_parameters_have_neither_gradients_nor_state(ranks: Pool, strategy: str) -> None:
    shards = 1 if strategy == "ddp()" else 2
    trained = (12 * 12 + 12) * 4 // shards
    for predicted, state, gradients, wrong in ranks.run(costs, strategy, world=2):
        assert predicted["optimizer_bytes"] == state == 2 * trained
        assert gradients == trained and not wrong
