"""Expert layers: the ops against the formula, and cut in every way against the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.axes import analyse
from autopar.capture import capture
from autopar.errors import UnsupportedError
from autopar.experts import expert_rows, grouped_mm, slots_to_experts, to_experts, to_tokens
from autopar.layout import Mesh
from autopar.passes import copy_views, emit
from autopar.planner.random_plan import random_plan
from autopar.verify.simulate import run
from tests.harness.reference import errors, values_of

T, K, E, D, W = 7, 2, 5, 6, 4  # tokens, experts a token, experts, width of tokens, of experts
MESHES = (Mesh(("a",), (2,)), Mesh(("a",), (3,)), Mesh(("a", "b"), (2, 2)))


class Layer(nn.Module):
    """Experts with a bias, of which the last is chosen by nobody and the first by most."""

    def __init__(self, k: int = K) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.up, self.bias, self.down, self.scale = (
            nn.Parameter(torch.randn(size, generator=rng, dtype=torch.float64))
            for size in ((E, W, D), (E, W), (E, D, W), (W,))
        )
        self.register_buffer("index", torch.stack([torch.randperm(E - 1, generator=rng)[:k] for _ in range(T)]))
        self.index[:5, 0], self.index[:5, 1:] = 0, 1

    def forward(self, x_td: Tensor, weight_tk: Tensor) -> Tensor:
        rows = grouped_mm(to_experts(x_td, self.index, E), self.up, self.index) + expert_rows(self.bias, self.index)
        rows = grouped_mm(F.silu(rows) * self.scale, self.down, self.index)
        out_td = to_tokens(rows * slots_to_experts(weight_tk, self.index, E), self.index)
        return out_td.square().sum()


class Interleaved(Layer):
    """Gate and value side by side in every row, as GPT-OSS stores them, and one number of each row taken alone."""

    def forward(self, x_td: Tensor, weight_tk: Tensor) -> Tensor:
        rows = grouped_mm(to_experts(x_td, self.index, E), self.up, self.index) + expert_rows(self.bias, self.index)
        gated = rows[..., 1::2] * F.silu(rows[..., ::2]) + rows[..., 0:1] + rows[..., -1].unsqueeze(-1)
        rows = grouped_mm(torch.cat([gated, gated], -1) * self.scale, self.down, self.index)
        return to_tokens(rows * slots_to_experts(weight_tk, self.index, E), self.index).square().sum()


class Formula(Layer):
    """The same, one token after the other."""

    def forward(self, x_td: Tensor, weight_tk: Tensor) -> Tensor:
        def expert(e: int, x_d: Tensor) -> Tensor:
            return self.down[e] @ (F.silu(self.up[e] @ x_d + self.bias[e]) * self.scale)

        chosen = self.index.tolist()
        out = [sum(weight_tk[t, i] * expert(e, x_td[t]) for i, e in enumerate(chosen[t])) for t in range(T)]
        return torch.stack([x for x in out if isinstance(x, Tensor)]).square().sum()


def inputs(k: int = K) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return (
        torch.randn(T, D, generator=rng, dtype=torch.float64).requires_grad_(),
        torch.rand(T, k, generator=rng, dtype=torch.float64).requires_grad_(),
    )


def trained(model: nn.Module, tensors: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Loss and all gradients."""
    loss = model(*tensors)
    return [loss, *torch.autograd.grad(loss, [*model.parameters(), *tensors])]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_rows_compute_what_the_formula_says(k: int) -> None:
    for found, wanted in zip(trained(Layer(k), inputs(k)), trained(Formula(k), inputs(k)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "same", "seed"),
    [(Layer, Formula, seed) for seed in range(12)] + [(Interleaved, Interleaved, seed) for seed in range(6)],
)
def test_a_layer_cut_at_random_equals_the_whole(kind: type[Layer], same: type[Layer], seed: int) -> None:
    model, tensors = kind(), tuple(t.detach() for t in inputs())
    graph = copy_views(capture(model, tensors, double=True))
    axes = analyse(graph)
    found, _ = run(
        emit(graph, axes, random_plan(graph, axes, MESHES, seed)),
        values_of(graph, model, tensors),
        [torch.tensor(1.0, dtype=torch.float64)],
    )
    loss, *gradients = trained(same(), inputs())
    wanted = {"loss": loss, **dict(zip(dict(model.named_parameters()), gradients, strict=False))}
    expected = [wanted["loss" if o.kind == "loss" else o.name].detach() for o in graph.outputs]
    worst = errors(graph, found, expected)
    assert max(worst.values()) < 1e-9, worst


def crossing(rows: Tensor) -> Tensor:
    return rows.softmax(1)


def folded(rows: Tensor) -> Tensor:
    return rows.flatten(0, 1)


def added(rows: Tensor) -> Tensor:
    return rows + torch.ones(E, 1, D)


@pytest.mark.parametrize("mix", [crossing, folded, added])
def test_ops_that_mix_rows_are_refused_by_name(mix: Callable[[Tensor], Tensor]) -> None:
    class Mixes(nn.Module):
        def forward(self, x_td: Tensor) -> Tensor:
            return mix(to_experts(x_td, torch.arange(T).unsqueeze(1) % E, E)).sum()

    x = torch.randn(T, D, requires_grad=True)
    with pytest.raises(UnsupportedError, match="does not keep the rows of an expert layer apart"):
        analyse(capture(Mixes(), (x,)))
