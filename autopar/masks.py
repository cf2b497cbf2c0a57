"""Attention masks that are made of constants alone become what they mean: causal, or nothing.

In: a normalised `Graph`.  Out: the same with `mask=None` (and `causal=True`) where the mask's values say so.
Next: `attention.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from autopar import _torch, attention
from autopar.graph import Graph

LARGEST = 1 << 28  # elements of a mask that is looked at


def fold_masks(graph: Graph) -> Graph:
    """Replace masks that are constant and causal or all true."""
    known: dict[fx.Node, str | None] = {}
    for node in graph.fx.nodes:
        at = attention.MASK_AT.get(node.target)
        if at is None or not isinstance(node.args[at], fx.Node):
            continue
        mask = node.args[at]
        if mask not in known:
            known[mask] = meaning(mask, graph.attributes)
        if known[mask] is not None:
            args = list(node.args)
            args[at], args[at + 1] = None, args[at + 1] or known[mask] == "causal"
            node.args = tuple(args)
    return graph


def meaning(mask: fx.Node, attributes: Mapping[str, Any]) -> str | None:
    """ "causal", "whole", or None where the mask says something else or depends on an input."""
    value = constant(mask, attributes)
    if value is None:
        return None
    allowed = value if value.dtype == torch.bool else value == 0
    if value.dtype != torch.bool and not bool((allowed | (value <= torch.finfo(value.dtype).min / 2)).all()):
        return None
    if bool(allowed.all()):
        return "whole"
    rows, columns = allowed.shape[-2:]
    causal = torch.ones(rows, columns, dtype=torch.bool).tril()
    return "causal" if rows == columns and bool((allowed == causal).all()) else None


def constant(node: fx.Node, attributes: Mapping[str, Any]) -> Tensor | None:
    """The value of a node that depends on no placeholder."""
    needed: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        here = stack.pop()
        if here.op not in ("call_function", "get_attr") or elements(here) > LARGEST:
            return None
        if here not in needed:
            needed[here] = None
            stack += here.all_input_nodes
    values: dict[fx.Node, Any] = {}
    with _torch.without_modes(), torch.no_grad():
        for here in node.graph.nodes:
            if here in needed and here.op == "get_attr":
                values[here] = attributes[here.target]
            elif here in needed:
                args, kwargs = fx.node.map_arg((here.args, here.kwargs), values.__getitem__)
                values[here] = here.target(*args, **kwargs)
    result: Tensor = values[node]
    return result


def elements(node: fx.Node) -> int:
    """How many elements a node's results have together; a number counts as one."""
    value = node.meta["val"]
    results = value if isinstance(value, (list, tuple)) else [value]
    return sum(result.numel() if isinstance(result, Tensor) else 1 for result in results)
