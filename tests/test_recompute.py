"""Calls under torch's checkpoint: the same numbers, computed again in backward, with less kept for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.axes import analyse
from autopar.capture import capture
from autopar.cost.memory import memory
from autopar.graph import Graph
from autopar.layout import Mesh
from autopar.passes import copy_views, emit
from autopar.planner.random_plan import random_plan
from autopar.random import replay
from autopar.verify.simulate import run
from tests.harness.reference import errors, values_of

MESHES = (Mesh(("a",), (2,)), Mesh(("a",), (3,)), Mesh(("a", "b"), (2, 2)))
Wrap = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 20), nn.Linear(20, 6), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))


class Net(nn.Module):
    """Three blocks, each called by `wrap`."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.wrap = nn.ModuleList(Block() for _ in range(3)), wrap

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.wrap(block, x)
        return x.square().sum()


def called(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def nested(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda y: checkpoint(block, y, use_reentrant=False) * 1.5, x, use_reentrant=False) / 1.5


WRAPS: dict[str, Wrap] = {
    "called": called,
    "reentrant": partial(checkpoint, use_reentrant=True),
    "plain": partial(checkpoint, use_reentrant=False),
    "nested": nested,
}


def batch() -> Tensor:
    return torch.randn(9, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def captured(wrap: str) -> Graph:
    return copy_views(capture(Net(WRAPS[wrap]), (batch(),), double=True))


@pytest.mark.parametrize("wrap", ["reentrant", "plain", "nested"])
@pytest.mark.parametrize("seed", range(2))
def test_numbers_are_those_of_a_call_that_keeps_everything(wrap: str, seed: int) -> None:
    graph = captured(wrap)
    axes = analyse(graph)
    model, x = Net(called).double(), batch()
    with replay(3, 1):
        loss = model(x)
    loss.backward()
    wanted = {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}
    found, _ = run(
        emit(graph, axes, random_plan(graph, axes, MESHES, seed)),
        values_of(graph, model, (batch(),)),
        [torch.tensor(1.0, dtype=torch.float64)],
    )
    expected = [wanted["loss" if o.kind == "loss" else o.name] for o in graph.outputs]
    worst = errors(graph, found, expected)
    assert max(worst.values()) < 1e-9, worst


def kept(wrap: str) -> tuple[int, int]:
    """(values that backward gets from forward, bytes at the peak) on one device."""
    graph = captured(wrap)
    axes = analyse(graph)
    program = emit(graph, axes, random_plan(graph, axes, [Mesh(("a",), (1,))], 0))
    return len(program.saved), memory(program, "AdamW").peak


@pytest.mark.parametrize("wrap", ["reentrant", "plain"])
def test_less_is_kept(wrap: str) -> None:
    assert kept(wrap)[0] < kept("called")[0] and kept(wrap)[1] < kept("called")[1]
