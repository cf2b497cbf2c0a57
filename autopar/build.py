"""A graph rebuilt node by node, with the fake value of every new node computed on the way.

In: an `fx.Graph` and the fake mode of its values.  Out: `Builder`, which rewrites use.  Next: `normalise.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar.graph import Graph

aten = torch.ops.aten


class Builder:
    """Adds nodes to a new graph; each takes its labels from the node of the old graph that it stands for."""

    def __init__(self, mode: Any) -> None:
        self.graph = fx.Graph()
        self.mode = mode
        self.like: fx.Node | None = None

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call, with its value."""
        return self.add(target, args, kwargs, self.value(target, args, kwargs), None)

    def value(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The fake value of a call on nodes."""
        values = fx.node.map_arg((args, kwargs), value_of)
        with self.mode, torch.no_grad():
            return target(*values[0], **values[1])

    def add(self, target: Any, args: Any, kwargs: Any, value: Any, name: str | None) -> fx.Node:
        """A new call whose value is known."""
        name = name or target.__name__.partition(".")[0]
        node = self.graph.create_node("call_function", target, tuple(args), dict(kwargs), name=name)
        like = self.like.meta if self.like is not None else {}
        node.meta = {**{k: v for k, v in like.items() if k != "val"}, "val": value}
        return node

    def view(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        """`x` with another shape of the same elements; views of views are views of the first."""
        shape = list(shape)
        while x.op == "call_function" and x.target is aten.reshape.default:
            x = x.args[0]  # type: ignore[assignment]
        if list(shape_of(x)) == shape:
            return x
        value = fake_empty(self.mode, shape, x.meta["val"].dtype)
        return self.add(aten.reshape.default, (x, shape), {}, value, None)

    def permute(self, x: fx.Node, dims: Sequence[int]) -> fx.Node:
        """`x` with its dims in another order; permutations of permutations are one."""
        order = [d % len(shape_of(x)) if shape_of(x) else d for d in dims]
        while x.op == "call_function" and x.target is aten.permute.default:
            inner: Any = x.args[1]
            order = [inner[d] for d in order]
            x = x.args[0]  # type: ignore[assignment]
        if order == sorted(order):
            return x
        value = fake_empty(self.mode, [shape_of(x)[d] for d in order], x.meta["val"].dtype)
        return self.add(aten.permute.default, (x, order), {}, value, None)

    def full(self, shape: Sequence[int], value: Any, dtype: torch.dtype) -> fx.Node:
        """A constant tensor."""
        fake = fake_empty(self.mode, shape, dtype)
        kwargs = {"dtype": dtype, "device": torch.device("cpu")}
        return self.add(aten.full.default, (list(shape), value), kwargs, fake, None)

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        """`x` in another dtype."""
        if x.meta["val"].dtype == dtype:
            return x
        fake = fake_empty(self.mode, shape_of(x), dtype)
        return self.add(aten._to_copy.default, (x,), {"dtype": dtype}, fake, None)

    def expand(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        """`x` repeated along dims of size 1."""
        if list(shape_of(x)) == list(shape):
            return x
        return self.add(
            aten.expand.default, (x, list(shape)), {}, fake_empty(self.mode, shape, x.meta["val"].dtype), None
        )


def fake_empty(mode: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous fake tensor."""
    with mode:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def value_of(node: Any) -> Any:
    """The fake value of a node."""
    return node.meta["val"]


def shape_of(node: Any) -> tuple[int, ...]:
    """Sizes of a node's tensor."""
    return tuple(node.meta["val"].shape)


def dtype_of(node: Any) -> torch.dtype:
    """Dtype of a node's tensor."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def relabelled(old: Graph, graph: fx.Graph, env: dict[fx.Node, Any]) -> Graph:
    """A captured `Graph` over a rebuilt `fx.Graph`, outputs and inputs under their new names."""
    by_name = {node.name: node for node in env}
    inputs = tuple(replace(item, node=env[by_name[item.node]].name) for item in old.inputs)
    outputs = tuple(
        replace(item, node=None if item.node is None else env[by_name[item.node]].name) for item in old.outputs
    )
    return replace(old, fx=graph, inputs=inputs, outputs=outputs)
