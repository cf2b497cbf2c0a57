"""Run a captured graph by hand and run its model eagerly, to compare them.

In: a model, a call, a `Graph`.  Out: dicts of results by (kind, name).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar import tree
from autopar.double import Double, double_
from autopar.graph import Graph
from autopar.random import replay


def run_graph(graph: Graph, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], step: int = 3) -> Any:
    """Results of the graph by (kind, name), the incoming gradients all ones."""
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    leaves, in_tree = tree.flatten((tuple(args), dict(kwargs)))
    names = [*tree.paths(in_tree.children[0], "args"), *tree.paths(in_tree.children[1], "kwargs")]
    given = dict(zip(names, leaves, strict=True))
    values = []
    for item in graph.inputs:
        if item.kind in ("parameter", "buffer"):
            values.append(tensors[item.name].detach())
        elif item.kind == "input":
            values.append(given[item.name].detach())
        elif item.kind == "rng":
            values.append(torch.tensor([7, step]))
        else:
            fake = graph.node(item.node).meta["val"]
            values.append(torch.ones(tuple(fake.shape), dtype=fake.dtype))
    values = [v.double() if v.dtype == torch.float32 else v for v in values]
    root = nn.Module()
    for name, value in graph.attributes.items():
        root.register_buffer(name, value, persistent=False)
    module = torch.fx.GraphModule(root, graph.fx)
    with torch.no_grad():
        results = module(*values)
    return {(o.kind, o.name): r for o, r in zip(graph.outputs, results, strict=True)}


def run_eager(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], step: int = 3) -> dict[Any, Any]:
    """Loss and gradients of the plain module, in float64, drawing the same numbers."""
    double_(model)
    leaves, in_tree = tree.flatten((tuple(args), dict(kwargs)))
    wide = [x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 else x for x in leaves]
    args, kwargs = tree.unflatten(in_tree, wide)
    with Double():
        with replay(7, step):
            out = model(*args, **kwargs)
        leaves, out_tree = tree.flatten(out)
        loss = next(x for x in leaves if isinstance(x, Tensor) and x.dim() == 0 and x.requires_grad)
        loss.backward()
    results = {("loss", "loss"): loss.detach()}
    for path, leaf in zip(tree.paths(out_tree, "output"), leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf is not loss:
            results["output", path] = leaf.detach()
    results |= {("gradient", name): p.grad for name, p in model.named_parameters() if p.requires_grad}
    return results


def worst(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> float:
    """Largest error over everything, relative to each tensor's largest entry (but at least 1e-6 of the largest)."""
    assert set(a) == set(b), set(a) ^ set(b)
    floor = 1e-6 * max(float(v.abs().max()) for k, v in b.items() if k[0] == "gradient" and v is not None)
    error = 0.0
    for key, want in b.items():
        if want is None:
            assert a[key] is None or not a[key].any(), key
            continue
        scale = max(float(want.abs().max()), floor)
        error = max(error, float((a[key].double() - want.double()).abs().max()) / scale)
    return error


def ops(graph: Any) -> list[str]:
    """Names of the ops of a captured graph, in order."""
    return [str(node.target) for node in graph.fx.nodes if node.op == "call_function"]
