"""A traced graph in a small vocabulary of ops: one node a meaning, nothing that computes nothing.

In: a labelled `Graph`.  Out: the same computation with
    aliases, clones and casts to the same dtype gone; every view a `reshape`, `permute` or `expand` with plain sizes
    `addmm` as `mm` and `add`; `mean` as `sum` and `div`; `nll_loss` as a sum and a count
    equal pieces (`split`, `chunk`, halves by `slice`, `cat` of equals) as a view and a `select` or a view of a `cat`
    factories as `full` and `arange`
    attention masks made of constants alone recognised (causal, all true)
Next: `rewrite_table.py`.

Dead nodes go; the phase of the rest is set: what a forward output needs, or was traced in the forward and depends on no
incoming gradient, is "forward".
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar import rewrites, rewrites_picks, rewrites_spatial, rewrites_views  # noqa: F401  (they fill the table)
from autopar.build import Builder, relabelled
from autopar.graph import Graph
from autopar.masks import fold_masks
from autopar.rewrite_table import REWRITES

aten = torch.ops.aten
VIEWS = {aten.reshape.default, aten.permute.default, aten.expand.default, aten.select.int}
KEEP_INTEGERS = {aten.where.ScalarSelf, aten.where.Scalar, aten.where.ScalarOther}


def normalise(graph: Graph, mode: Any) -> Graph:
    """The graph in the small vocabulary."""
    return phases(pruned(shared(fold_masks(pruned(rewritten(graph, mode))))))


def rewritten(graph: Graph, mode: Any) -> Graph:
    """Every node through the table of rewrites."""
    build = Builder(mode)
    env: dict[fx.Node, Any] = {}

    def new(node: fx.Node) -> Any:
        return env[node]

    for node in graph.fx.nodes:
        build.like = node
        if node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), new)
            if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
                env[node] = args[0][args[1]]
                continue
            rewrite = REWRITES.get(node.target)
            made = rewrite(build, node, *args, **kwargs) if rewrite is not None else None
            if made is None:
                args = explicit(build, node, args, kwargs)
                made = build.add(node.target, args, kwargs, node.meta["val"], node.name)
            env[node] = made
        elif node.op == "output":
            build.graph.output(fx.node.map_arg(node.args[0], new))
        else:
            env[node] = build.graph.node_copy(node, new)
            env[node].meta = dict(node.meta)
    return relabelled(graph, build.graph, env)


def explicit(build: Builder, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Integers that an op turns into floats are cast first: else the default dtype of the day decides the result's."""
    value = node.meta["val"]
    if getattr(node.target, "namespace", "") != "aten" or node.target in KEEP_INTEGERS or "dtype" in kwargs:
        return args
    operands = [n.meta["val"].dtype for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    if not isinstance(value, Tensor) or not value.is_floating_point() or not operands:
        return args
    if any(dtype.is_floating_point or dtype.is_complex for dtype in operands):
        return args
    return fx.node.map_arg(args, lambda n: build.cast(n, value.dtype))


def pruned(graph: Graph) -> Graph:
    """Nodes that no result needs go; placeholders stay, but for an unused random state."""
    kept_rng = {i.node for i in graph.inputs if i.kind == "rng" and graph.node(i.node).users}
    for node in reversed(list(graph.fx.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            graph.fx.erase_node(node)
    used_rng = [i for i in graph.inputs if i.kind == "rng" and i.node in kept_rng and graph.node(i.node).users]
    for item in graph.inputs:
        if item.kind == "rng" and item not in used_rng:
            graph.fx.erase_node(graph.node(item.node))
    graph.inputs = tuple(i for i in graph.inputs if i.kind != "rng" or i in used_rng)
    used = {node.target for node in graph.fx.nodes if node.op == "get_attr"}
    graph.attributes = {name: value for name, value in graph.attributes.items() if name in used}
    return graph


def shared(graph: Graph) -> Graph:
    """Equal views of one value are one: what is moved between devices for one of their readers then serves all.

        %a = reshape(%x, [8, 4]);  %q = mm(%a, %wq);  %b = reshape(%x, [8, 4]);  %k = mm(%b, %wk)
    becomes
        %a = reshape(%x, [8, 4]);  %q = mm(%a, %wq);  %k = mm(%a, %wk)

    Views of parameters stay apart, since a gathered parameter is dropped behind every module that uses it.
    """
    known: dict[Any, fx.Node] = {}
    for node in list(graph.fx.nodes):
        if node.target not in VIEWS or node.all_input_nodes[0].op != "call_function":
            continue
        key = node.target, str(node.args), node.meta.get("region"), node.meta.get("traced")
        first = known.setdefault(key, node)
        if first is not node and node.name not in {output.node for output in graph.outputs}:
            node.replace_all_uses_with(first)
    return graph


def phases(graph: Graph) -> Graph:
    """meta["phase"] of every node."""
    results = {item.node: item.kind for item in graph.outputs if item.node is not None}
    tangents = {item.node for item in graph.inputs if item.kind == "tangent"}
    needed: set[fx.Node] = set()
    for node in reversed(list(graph.fx.nodes)):
        if node.op != "output" and (
            results.get(node.name) in ("loss", "output", "buffer") or any(u in needed for u in node.users)
        ):
            needed.add(node)
    late: set[fx.Node] = set()
    for node in graph.fx.nodes:
        if node.name in tangents or any(a in late for a in node.all_input_nodes):
            late.add(node)
        traced = node.meta.pop("traced", "forward")
        backward = node not in needed and (node in late or traced == "backward")
        node.meta["phase"] = "backward" if backward else "forward"
    return graph
