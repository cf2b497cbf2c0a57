"""Every float32 of a graph replaced by float64, so that comparisons see no rounding.

In: a `Graph`.  Out: the same computation in float64, values and dtype arguments.  Next: `double.py`, the same for eager
code: of a model that asks for no float32 by name, eager and graph then agree to the last bit or two.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch import Tensor

from autopar.build import Builder, fake_empty, relabelled
from autopar.double import NARROW, WIDE, widened
from autopar.graph import Graph


def widen(graph: Graph, mode: Any) -> Graph:
    """The graph with every float32 replaced by float64."""
    build = Builder(mode)
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.fx.nodes:
        build.like = node
        if node.op == "output":
            build.graph.output(fx.node.map_arg(node.args[0], env.__getitem__))
            continue
        if node.op != "call_function":
            new = build.graph.node_copy(node, env.__getitem__)
            value = node.meta["val"]
            new.meta = {**node.meta, "val": fake_empty(mode, value.shape, widened(value.dtype))}
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
            new = recomputed(build, node, widened(args), widened(kwargs))
        env[node] = new
    attributes = {name: widened(value) for name, value in graph.attributes.items()}
    made = relabelled(graph, build.graph, env)
    made.attributes = attributes
    return made


def recomputed(build: Builder, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    """The node on wider operands; integers that make a float32 by themselves are widened first."""
    value = build.value(node.target, args, kwargs)
    if isinstance(value, Tensor) and value.dtype == NARROW:
        args = fx.node.map_arg(args, lambda n: build.cast(n, WIDE))
        value = build.value(node.target, args, kwargs)
    return build.add(node.target, args, kwargs, value, node.name)
