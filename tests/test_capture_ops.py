"""Capture, op by op: what is rewritten, and computes what torch computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar import UnsupportedError
from autopar.capture import capture
from tests.graphs import ops, run_eager, run_graph, worst


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


class Makes(nn.Module):
    """Every way to make a tensor of one number, with and without a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        f32, aten = torch.float32, torch.ops.aten
        made = [
            *(h.new_full((5,), 2.5), h.new_full((5,), 3, dtype=torch.int64), torch.full((5,), 1.5)),
            *(torch.full((5,), True), torch.full_like(h, 4), torch.full_like(h, 1.7, dtype=torch.int32)),
            *(h.new_ones(5), h.new_ones((5,), dtype=torch.int64), torch.ones(5), torch.ones_like(h, dtype=f32)),
            *(h.new_zeros(5), torch.zeros(5, dtype=torch.int32), torch.zeros_like(h), h.detach().clone().zero_()),
            *(h.detach().clone().fill_(0.5), h.new_empty(5).fill_(7), torch.empty(5).fill_(0.3), aten.fill(h, 2)),
            *(torch.empty_like(h).fill_(-1), torch.empty_strided((6, 5), (1, 6)).fill_(0.7)),
        ]
        keep = torch.bernoulli(h.new_full((h.shape[0], 1), 0.7)) / 0.7  # as in stochastic depth
        loss = F.binary_cross_entropy(h.sigmoid(), torch.full_like(h, 0.3)) + torch.lerp(h, h * h, 0.2).sum()
        return sum((i * (m * h).sum() for i, m in enumerate(made)), start=loss) + (keep * h).sum()


def test_every_way_to_make_a_tensor_of_one_number() -> None:
    model, args = Makes(), (torch.randn(6, 4),)
    graph = capture(model, args, double=True)
    assert worst(run_graph(graph, model, args, {}), run_eager(model, args, {})) <= 1e-13


class Puts(nn.Module):
    """Masked assignments where all places get one value, and one where they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 5)

    def forward(self, x: Tensor, rows: Tensor, deep: Tensor) -> Tensor:
        h = self.a(x)
        z = h.clone()
        z[z < 0] = 0.25
        z[rows] = -1.0
        z[rows.flip(0)] = x.mean(0)[:1].expand(5)
        z[:, rows[:5]] = 3.0
        cube = torch.stack([h, h * h], 1)
        cube[deep] = torch.arange(5).to(h.dtype)
        cube[:, h[:2] > 0] = cube.new_zeros(6, 1)
        cube[rows.to(torch.uint8)] = torch.ones(1, 1, 5, dtype=h.dtype)
        cube.index_put_((rows[:, None] & deep,), h.new_tensor(0.5), accumulate=True)
        return z.square().sum() + cube.square().sum()


def masked() -> tuple[nn.Module, tuple[Tensor, ...]]:
    rows = torch.tensor([True, False, False, True, False, True])
    return Puts(), (torch.randn(6, 4), rows, torch.rand(6, 2) < 0.6)


def test_a_masked_assignment_is_a_where() -> None:
    model, args = masked()
    graph = capture(model, args, double=True)
    assert not [op for op in ops(graph) if "index" in op]
    assert worst(run_graph(graph, model, args, {}), run_eager(model, args, {})) <= 1e-13


class Pictures(nn.Module):
    """Labels with the classes in front of the sequence or picture, reduced in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 7)
        self.register_buffer("weight", torch.rand(7))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        log = F.log_softmax(h, -1).transpose(1, 2)
        loss = F.nll_loss(log, y) + F.nll_loss(log, y, ignore_index=2, reduction="sum")
        loss = loss + (F.nll_loss(log, y, reduction="none") * y).sum() + F.nll_loss(log, y, weight=self.weight)
        loss = loss + F.cross_entropy(h.transpose(1, 2), y, weight=self.weight, ignore_index=2, label_smoothing=0.1)
        picture = log.unflatten(2, (2, 3)).contiguous()
        labels = y.unflatten(1, (2, 3))
        return loss + F.nll_loss(picture, labels) + F.nll_loss(picture, labels, self.weight, reduction="none").sum()


def pictures() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Pictures(), (torch.randn(5, 6, 4), torch.randint(7, (5, 6)))


def test_labels_of_pictures_are_rows() -> None:
    model, args = pictures()
    graph = capture(model, args, double=True)
    assert not [op for op in ops(graph) if "2d" in op]
    assert worst(run_graph(graph, model, args, {}), run_eager(model, args, {})) <= 1e-13


class Solves(nn.Module):
    """Factorisations that raise where a matrix is singular, alone and in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        m = self.a(x) @ self.a(x).mT + shift * torch.eye(5)
        solved = torch.linalg.solve(m, self.a(x).mT).square().sum() + torch.logdet(m)
        lower = torch.linalg.cholesky(m)
        solved = solved + torch.linalg.inv(m.expand(2, 5, 5) * 2).sum() + lower.sum() + torch.linalg.svdvals(m).sum()
        return solved + torch.cholesky_solve(self.a(x).mT, lower).sum() + torch.linalg.lu_factor(m)[0].abs().sum()


def test_linear_algebra_runs_whole_and_raises_what_torch_raises() -> None:
    model, args = Solves(), (torch.randn(5, 5), torch.tensor(1.0))
    graph = capture(model, args, double=True)
    assert worst(run_graph(graph, model, args, {}), run_eager(model, args, {})) <= 1e-12
    singular = (torch.zeros(5, 5), torch.tensor(0.0))
    nn.init.zeros_(model.a.bias)
    with pytest.raises(RuntimeError, match="input matrix is singular"):
        run_graph(graph, model, singular, {})


class Prints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        torch.ops.aten._print("here")
        return self.a(x).sum()


def test_another_effect_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"aten._print.default does something(.|\n)*try: do it outside"):
        capture(Prints(), (torch.randn(3, 4),))
