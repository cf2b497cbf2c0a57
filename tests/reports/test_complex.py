"""Complex numbers: rotary positions as Llama's authors wrote them, transforms, outputs; random plans and families."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import UnsupportedError
from autopar.layout import Mesh
from autopar.passes import copy_views
from autopar.planner import random_plan
from autopar.runtime.compiler import Fixed
from autopar.runtime.module import ParallelModule
from autopar.verify.pool import Pool
from tests.reports.harness import TINY, Made, trained


class Rotary(nn.Module):
    """b=4, s=5, heads=2, head=4; labels with the classes in front of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 6)
        angles = torch.outer(torch.arange(5.0), 1.0 / 10 ** torch.tensor([0.0, 0.5]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles).to(torch.complex128))

    def turned(self, t: Tensor) -> Tensor:
        pairs = torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[None, :, None]).flatten(3).transpose(1, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(4, 5, 3, 2, 4).unbind(2)
        h = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v.transpose(1, 2), is_causal=True)
        return F.cross_entropy(self.out(h.transpose(1, 2).flatten(2)).transpose(1, 2), y)


class Spectrum(nn.Module):
    """Transforms, conjugates that are only marked as such, a complex output."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        c = torch.view_as_complex(h.view(4, 3, 2))
        waves = torch.fft.irfft(torch.fft.rfft(h) * 0.7, n=6)
        loss = (c * c.conj()).real.mean() + (c.conj() @ c.mT).abs().mean() + c.conj().imag.square().sum()
        return loss + waves.square().mean() + torch.fft.fft(h, dim=0).abs().sum(), c.conj() * 2


def rotary() -> Made:
    return Rotary().double(), (torch.randn(4, 5, 8).double(), torch.randint(6, (4, 5))), {}


def spectrum() -> Made:
    return Spectrum().double(), (torch.randn(4, 6).double(),), {}


def under_random_plans(make: Callable[[], Made], seeds: range) -> float:
    """Largest gap of two steps under several random plans."""
    worst = 0.0
    for seed in seeds:
        torch.manual_seed(0)
        model, args, kwargs = make()
        single = copy.deepcopy(model)
        graph = copy_views(capture(model, args, kwargs))
        n = dist.get_world_size()
        meshes = [Mesh(("data",), (n,)), *([Mesh(("data", "model"), (2, 2))] if n == 4 else [])]
        ours = ParallelModule(model, graph, random_plan(graph, None, meshes, seed), compiler=Fixed(0))
        worst = max(worst, *trained(ours, single, args, kwargs, steps=2).values())
    return worst


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("make", (rotary, spectrum))
def test_complex_numbers_move_between_devices(ranks: Pool, make: Callable[[], Made], world: int) -> None:
    assert max(ranks.run(under_random_plans, make, range(4), world=world)) < TINY


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.turn = nn.Linear(4, 3), nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale(x) * self.turn).abs().sum()


def test_a_complex_parameter_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"parameter turn is torch.complex64: (.|\n)*try: a real parameter with"):
        capture(Phases(), (torch.randn(5, 4),))
    model = Phases()
    model.turn.requires_grad_(False)
    capture(model, (torch.randn(5, 4),))
