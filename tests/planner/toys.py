"""Small graphs drawn at random, for comparing the planner with enumeration."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import fx, ops
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.graph import Graph, Input, Output

aten = ops.aten


class Toy:
    """A graph written op by op."""

    def __init__(self) -> None:
        self.fx, self.mode = fx.Graph(), FakeTensorMode()
        self.inputs: list[Input] = []

    def given(self, name: str, kind: str, shape: tuple[int, ...], trainable: bool = False) -> fx.Node:
        node = self.fx.placeholder(name)
        with self.mode:
            val = torch.empty(shape)
        node.meta = {"val": val, "phase": "forward", "module": "", "source": ""}
        self.inputs.append(Input(name, kind, name, (name,), trainable))
        return node

    def op(self, target: Any, *args: Any, phase: str = "forward", module: str = "") -> fx.Node:
        node = self.fx.call_function(target, args)
        with self.mode:
            val = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        node.meta = {"val": val, "phase": phase, "module": module, "source": f"toy.py:{len(self.fx.nodes)}"}
        return node

    def done(self, *outputs: tuple[str, str, fx.Node]) -> Graph:
        self.fx.output(tuple(node for _, _, node in outputs))
        labelled = tuple(Output(kind, name, node.name) for kind, name, node in outputs)
        return Graph(self.fx, tuple(self.inputs), labelled)


def linear(seed: int) -> Graph:
    """One or two weights with their gradients; sizes, residuals, views and reductions are drawn."""
    rng, toy = random.Random(seed), Toy()
    b, d, f = rng.choice([(8, 4, 3), (4, 3, 8), (3, 8, 4), (12, 4, 5), (5, 12, 8), (8, 4, 12)])
    x = toy.given("x", "input", (b, d))
    w = toy.given("w", "parameter", (d, f), trainable=True)
    y = toy.op(aten.mm.default, x, w, module="a")
    if rng.random() < 0.4:
        y = toy.op(aten.relu.default, y, module="a")
    if rng.random() < 0.4:
        y = toy.op(aten.add.Tensor, y, y, module="a")
    loss = toy.op(aten.sum.dim_IntList, y, [0, 1], module="a")
    kind = rng.randrange(3)
    if kind == 0:
        seen = toy.op(aten.permute.default, x, [1, 0], phase="backward", module="a")
        grad = toy.op(aten.mm.default, seen, y, phase="backward", module="a")
    elif kind == 1:
        seen = toy.op(aten.mul.Tensor, w, w, phase="backward", module="a")
        grad = toy.op(aten.neg.default, seen, phase="backward", module="a")
    else:
        up = toy.op(aten.permute.default, y, [1, 0], phase="backward", module="a")
        down = toy.op(aten.mm.default, up, x, phase="backward", module="a")
        grad = toy.op(aten.permute.default, down, [1, 0], phase="backward", module="a")
    ends = [("loss", "loss", loss), ("gradient", "w", grad)]
    if rng.random() < 0.3:
        ends.insert(1, ("output", "y", y))
    return toy.done(*ends)
