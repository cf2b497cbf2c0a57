"""Models and calls at the edge of what there is a program for: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autopar._torch import settle_pending_items
from autopar.capture import capture
from autopar.errors import UnsupportedError
from autopar.verify.pool import Pool
from tests.reports.harness import TINY, Made, deliver, parity


class Of(nn.Module):
    """A forward written as a function of the module."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def nests(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    return {"loss": y.square().mean(), "none": None, "view": y[:, :2], "top": x.argmax(-1), "empty": x[:0], "l": [3]}


def in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.mul_(2).add_(1)
    h[:, 1] = 0.0
    h[1:3] *= 3
    return nn.functional.relu(h, inplace=True).square().mean()


def conv_net() -> Made:
    conv, head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(64, 3)
    model = Of(lambda m, x: m.h(m.p(m.c(x).relu()).flatten(1)).square().mean(), c=conv, p=nn.MaxPool2d(2), h=head)
    return model.double(), (torch.randn(5, 3, 8, 8).double(),), {}


def nested() -> Made:
    return Of(nests, a=nn.Linear(3, 5)).double(), (torch.randn(5, 3).double(),), {}


def written() -> Made:
    return Of(in_place, a=nn.Linear(3, 5)).double(), (torch.randn(5, 3).double(),), {}


def lookup(**options: Any) -> Made:
    model = Of(lambda m, i: m.e(i).square().mean(), e=nn.Embedding(7, 4, **options)).double()
    return model, (torch.randint(0, 7, (5, 6)),), {}


def by_frequency() -> Made:
    return lookup(scale_grad_by_freq=True, padding_idx=-3)


def normalised() -> Made:
    model = Of(lambda m, x: m.n(m.a(x)).square().mean(), a=nn.Linear(3, 5), n=nn.BatchNorm1d(5)).double()
    return model, (torch.randn(7, 3).double(),), {}


class Small(nn.Module):
    """Nothing but scalars and tensors of size 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.tensor([2.0]))
        self.layer, self.row = nn.Linear(1, 1), nn.Embedding(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return ((self.layer(x) * self.scalar + self.one) * self.row.weight).square().mean()


def small() -> Made:
    return Small().double(), (torch.randn(5, 1).double(),), {}


@pytest.mark.parametrize(
    ("make", "family", "world"),
    [
        (conv_net, "tensor", 2), (nested, "zero2", 2), (nested, "auto", 3), (written, "zero3", 2),
        (written, "tensor", 2), (by_frequency, "ddp", 2), (by_frequency, "auto", 3), (normalised, "zero2", 2),
        (small, "ddp", 2), (small, "auto", 3),
    ],
)  # fmt: skip
def test_unusual_models_equal_one_device(ranks: Pool, make: Any, family: str, world: int) -> None:
    for gaps in ranks.run(parity, make, family, world=world, steps=2):
        assert max(gaps.values()) < TINY and gaps["ranks"] == 0, gaps


def test_an_embedding_that_is_changed_in_place_or_sparse_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"changes parameter e\.weight in place in its forward"):
        capture(*lookup(max_norm=1.0)[:2])
    with pytest.raises(UnsupportedError, match=r"gives a sparse tensor(.|\n)*from test_unusual\.py:"):
        capture(*lookup(sparse=True)[:2])


def test_a_batch_smaller_than_the_ranks_is_refused_by_a_forced_family_with_both_numbers(ranks: Pool) -> None:
    for outcome in ranks.outcomes(deliver, written, "zero3", world=4):
        assert outcome.error == "UnsupportedError"
        assert "a batch of 5 (args[0]) cannot be cut over 4 devices" in outcome.message


@pytest.mark.parametrize("kind", (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW))
def test_fused_optimizers_take_the_handles(ranks: Pool, kind: type[torch.optim.Optimizer]) -> None:
    for gaps in ranks.run(fused, kind, world=2):
        assert max(gaps.values()) < TINY, gaps


def fused(kind: type[torch.optim.Optimizer]) -> dict[str, float]:
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {"eps": 1e-6}
    return parity(written, "zero3", optimizer=lambda p: kind(p, lr=0.01, fused=True, **options))  # type: ignore[call-arg]


@pytest.mark.parametrize("gradient", (Replicate(), Shard(0)), ids=str)
def test_a_fused_step_takes_gradients_that_lie_otherwise(ranks: Pool, gradient: Placement) -> None:
    assert ranks.run(stepped_apart, gradient, world=2) == [0.0, 0.0]


def stepped_apart(gradient: Placement) -> float:
    """How far a fused step on a whole DTensor is from the one on a plain tensor."""
    settle_pending_items()
    mesh = init_device_mesh("cpu", (2,))
    given = torch.arange(8.0).reshape(4, 2)
    plain, spread = (nn.Parameter(t) for t in (given.clone(), DTensor.from_local(given.clone(), mesh, [Replicate()])))
    whole = DTensor.from_local(given + 1, mesh, [Replicate()])
    plain.grad, spread.grad = given + 1, whole.redistribute(placements=[gradient])
    for parameter in (plain, spread):
        torch.optim.AdamW([parameter], fused=True).step()
    local = spread.detach()
    assert isinstance(local, DTensor)
    return float((local.to_local() - plain.detach()).abs().max())
