"""Norms over parameters kept in different ways, copies that stay equal, tied weights that are cut unevenly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from autopar.verify.pool import Pool
from tests.reports.harness import (
    ON_FOUR,
    ON_TWO,
    TINY,
    Made,
    apart,
    deliver,
    gap,
    gradients_gap,
    loss_of,
    parity,
    state_gap,
    trained,
    whole,
)

# ---- the norm of gradients -------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Weights that are cut, norms that are not, a scalar, one parameter of size 1."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.first, self.norm, self.second = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 6)
        self.last = nn.LayerNorm(6)
        self.scalar, self.one = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor([1.3]))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.second(F.gelu(self.norm(self.first(self.emb(ids))))) * self.one
        logits = (self.last(h) * self.scalar) @ self.emb.weight.T
        return F.cross_entropy(logits.flatten(0, 1), ids.roll(1, 0).flatten())


def normed() -> Made:
    return Normed().double(), (torch.randint(0, 11, (7, 5)),), {}


def clipped(family: str, max_norm: float) -> dict[str, float]:
    """Gaps of the norms and the clipped gradients, of either function and for every order of norm."""
    ours, single, args, kwargs = deliver(normed, family)
    gaps = {}
    for order in (2.0, 1.0, math.inf):
        for whose in ("ours", "torch"):
            for module in (ours, single):
                module.zero_grad()
                loss_of(module(*args, **kwargs)).backward()
            expected = float(nn.utils.clip_grad_norm_(single.parameters(), max_norm, order))
            if whose == "ours":
                total = ours.clip_grad_norm_(max_norm, order)
                assert type(total) is float
            else:
                returned = nn.utils.clip_grad_norm_(ours.parameters(), max_norm, order)
                total = float(returned)
                assert returned.item() == total and f"{returned:.9e}" == f"{total:.9e}"
                assert float(whole(returned)) == pytest.approx(total, rel=1e-12)
            gaps[f"{whose} {order}"] = max(abs(total - expected) / expected, gradients_gap(ours, single))
            with torch.no_grad():
                for module in (ours, single):
                    for p in module.parameters():
                        p -= 0.1 * p.grad
    return {**gaps, "state": state_gap(ours, single)}


@pytest.mark.parametrize(
    ("family", "world"),
    [
        ("zero3 x megatron", 4), ("ddp x tensor", 4), ("hsdp", 4), ("zero3", 4), ("zero2", 2), ("megatron-sp", 2),
        ("auto", 3),
    ],
)  # fmt: skip
def test_clipping_gives_the_true_norm(ranks: Pool, family: str, world: int) -> None:
    for gaps in ranks.run(clipped, family, 0.05, world=world):
        assert max(gaps.values()) < TINY, gaps


def test_gradients_below_the_limit_are_left_alone(ranks: Pool) -> None:
    for gaps in ranks.run(clipped, "zero3 x megatron", 1e3, world=4):
        assert max(gaps.values()) < TINY, gaps


def spoiled(order: float) -> list[Any]:
    """A norm that is not finite, and what is told of it."""
    ours, _, args, _ = deliver(normed, "zero3")
    ours(*args).backward()
    with torch.no_grad():
        ours.first.weight.grad.to_local()[0, 0] = math.nan
    total = ours.clip_grad_norm_(0.5, order)
    try:
        ours.clip_grad_norm_(0.5, order, error_if_nonfinite=True)
    except RuntimeError as error:
        return [total, str(error)]
    return [total, ""]


@pytest.mark.parametrize("order", (2.0, math.inf))
def test_a_norm_that_is_not_finite_is_told_on_all_ranks(ranks: Pool, order: float) -> None:
    for total, message in ranks.run(spoiled, order, world=2):
        assert math.isnan(total) and "cannot be clipped" in message


# ---- copies on different ranks ---------------------------------------------------------------------------------------


class Sequence(nn.Module):
    """A norm between products, which sequence parallelism runs on pieces of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 6)
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.norm(self.first(x)) * self.scale) + self.shift
        return (y - x).square().mean()


def sequence() -> Made:
    return Sequence().double(), (torch.randn(7, 7, 6).double(),), {}


def copies(make: Any, family: str) -> list[float]:
    """Distance of copies from rank 0's after every backward and every step, and the gaps to one device."""
    ours, single, args, kwargs = deliver(make, family)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-6) for m in (ours, single)]
    distances, gaps, seen = [], [], 0
    for _ in range(5):
        for module in (ours, single):
            loss_of(module(*args, **kwargs)).backward()
        distances += [apart(p.grad) for p in ours.parameters()]
        seen += sum(all(x.is_replicate() for x in p.grad.placements) for p in ours.parameters())
        gaps.append(gradients_gap(ours, single))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        distances += [apart(p) for p in ours.parameters()]
        gaps.append(state_gap(ours, single))
    return [max(distances), max(gaps), float(seen)]


@pytest.mark.parametrize("make", (sequence, normed))
@pytest.mark.parametrize(
    ("family", "world"),
    [
        ("megatron-sp", 2), ("megatron-sp", 3), ("megatron", 2), ("tensor", 2), ("ddp", 4), ("ddp x tensor", 4),
        ("zero3 x megatron", 4),
    ],
)  # fmt: skip
def test_replicated_parameters_are_the_same_on_all_ranks(ranks: Pool, make: Any, family: str, world: int) -> None:
    for distance, difference, seen in ranks.run(copies, make, family, world=world):
        assert distance == 0 and difference < 1e-10 and seen > 0


# ---- a tied weight with an uneven cut --------------------------------------------------------------------------------


class TiedHead(nn.Module):
    """The head is the embedding."""

    def __init__(self, rows: int, bias: bool) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(rows, 4), nn.Linear(4, rows, bias=bias)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.emb(ids)), ids.roll(1))


def five_rows() -> Made:
    return TiedHead(5, True).double(), (torch.tensor([4, 0, 3, 1, 2, 4, 4]),), {}


def seven_rows() -> Made:
    return TiedHead(7, False).double(), (torch.tensor([6, 4, 0, 3, 1, 2, 5]),), {}


def rows_moved(make: Any, family: str) -> list[float]:
    """The smallest change of a row of the tied weight, and the largest gap to one device."""
    ours, single, args, _ = deliver(make, family)
    before = whole(ours.emb.weight).clone()
    gaps = trained(ours, single, args, {}, steps=1)
    after = whole(ours.emb.weight)
    assert ours.emb.weight is ours.head.weight
    return [float((after - before).abs().amax(1).min()), max(gaps.values())]


@pytest.mark.parametrize("make", (five_rows, seven_rows))
@pytest.mark.parametrize(
    ("family", "world"),
    [("zero3", 2), ("zero3", 4), ("zero1", 4), ("zero2", 3), ("fsdp-keep", 4), ("tensor", 2), ("hsdp", 4), ("auto", 4)],
)
def test_every_row_of_a_tied_weight_is_updated(ranks: Pool, make: Any, family: str, world: int) -> None:
    for moved, difference in ranks.run(rows_moved, make, family, world=world):
        assert moved > 1e-6 and difference < TINY


# ---- everything at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", (normed, sequence))
@pytest.mark.parametrize(("family", "world"), [*ON_TWO, *ON_FOUR])
def test_training_equals_one_device(ranks: Pool, make: Any, family: str, world: int) -> None:
    for gaps in ranks.run(parity, make, family, world=world):
        assert max(gaps.values()) < TINY and gaps["ranks"] == 0, gaps


def mean_of_copies() -> bool:
    """The helper of these tests sees a copy that differs."""
    ours, _, _, _ = deliver(sequence, "ddp")
    parameter = ours.scale
    assert isinstance(parameter, DTensor)
    with torch.no_grad():
        parameter.to_local().add_(torch.distributed.get_rank())
    return apart(parameter) == 1.0 and gap(torch.tensor(math.nan), torch.tensor(0.0)) == math.inf


def test_a_copy_that_differs_is_seen(ranks: Pool) -> None:
    assert all(ranks.run(mean_of_copies, world=2))
