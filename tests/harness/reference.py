"""What a captured graph computes when it runs whole, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.graph import Graph


def values_of(
    graph: Graph, model: nn.Module, tensors: Sequence[Tensor], seed: int = 3, step: int = 1
) -> dict[str, Tensor]:
    """Real values of all graph inputs by node name, float32 as float64; the incoming gradient is 0.7."""
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named |= dict(model.named_buffers(remove_duplicate=False))
    rest = iter(tensors)
    out = {}
    for entry in graph.inputs:
        if entry.kind == "rng":
            value = torch.tensor([seed, step])
        elif entry.kind == "tangent":
            value = torch.full(graph.node(entry.node).meta["val"].shape, 0.7)
        else:
            value = named[entry.name].detach() if entry.kind in ("parameter", "buffer") else next(rest)
        out[entry.node] = value.double() if value.dtype == torch.float32 else value
    return out


def run_whole(graph: Graph, values: Mapping[str, Tensor]) -> list[Any]:
    """Results in the order of `graph.outputs`."""
    module = fx.GraphModule(graph.attributes, graph.fx)
    found: list[Any] = fx.Interpreter(module).run(*(values[e.node] for e in graph.inputs))
    return found


def errors(graph: Graph, found: Sequence[Any], wanted: Sequence[Any]) -> dict[str, float]:
    """Largest error of every output by name, relative to its largest entry or 1e-6 of the largest gradient entry."""
    ends = list(zip(graph.outputs, found, wanted, strict=True))
    top = max([float(w.abs().max()) for o, _, w in ends if "gradient" in o.kind and w is not None], default=0.0)
    out = {}
    for output, got, want in ends:
        if want is None:
            assert got is None, output
            continue
        floor = 1e-6 * top if "gradient" in output.kind else 0.0
        scale = max(float(want.abs().max()), floor) if want.numel() else 1.0
        off = float((got.double() - want.double()).abs().max()) if want.numel() else 0.0
        out[f"{output.kind} {output.name}"] = off / scale if off else 0.0
    return out
