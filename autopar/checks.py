"""Errors that torch raises by value while it computes, as part of a value, so that a program raises them too.

In: a traced joint graph, where such a check hangs on a token.  Out: the graph without tokens.  Next: `labels.py`.

    %inv = linalg_inv_ex(%a);  %x = getitem(%inv, 0);  %info = getitem(%inv, 1)
    %t   = with_effects(%token, _linalg_check_errors, %info, "linalg.inv")
becomes
    %inv = linalg_inv_ex(%a);  %x = checked(getitem(%inv, 0), getitem(%inv, 1), "linalg.inv")
"""

from __future__ import annotations

from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from autopar._torch import Joint
from autopar.errors import UnsupportedError

aten = torch.ops.aten


def _checked(x: Tensor, info: Tensor, name: str, is_matrix: bool) -> Tensor:
    """`x`, unless `info` tells that the factorisation `name` failed."""
    aten._linalg_check_errors(info, name, is_matrix=is_matrix)
    return x.clone()


torch.library.define("autopar::checked", "(Tensor x, Tensor info, str name, bool is_matrix) -> Tensor")
torch.library.impl("autopar::checked", "CompositeExplicitAutograd", _checked)
torch.library.register_fake("autopar::checked", lambda x, info, name, is_matrix: torch.empty_like(x))


def without_tokens(joint: Joint) -> Joint:
    """Every check tied to what it checks; anything else that has an effect is refused by name."""
    graph = joint.graph
    for node in list(graph.nodes):
        if node.target is torch.ops.higher_order.with_effects:
            tie(graph, node)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    kept = [i for i, (kind, _) in enumerate(joint.results) if kind != "token"]
    output.args = (tuple(output.args[0][i] for i in kept),)
    for (kind, _), node in zip(joint.inputs, placeholders, strict=True):
        if kind == "token":
            graph.erase_node(node)
    inputs = tuple(entry for entry in joint.inputs if entry[0] != "token")
    return replace(joint, inputs=inputs, results=tuple(joint.results[i] for i in kept))


def tie(graph: fx.Graph, check: fx.Node) -> None:
    """Put one check between a factorisation and its readers."""
    token, op, *args = check.args
    if op is not aten._linalg_check_errors.default:
        raise UnsupportedError(
            f"{op} does something beside computing, which a program does not do{source_of(check)}\n"
            "  try: do it outside the model's forward"
        )
    for entry in list(check.users):  # the next token, and the nothing that a check returns
        entry.replace_all_uses_with(token)  # type: ignore[arg-type]
        graph.erase_node(entry)
    info: Any = args[0]
    matrix = check.kwargs["is_matrix"]
    graph.erase_node(check)
    factorisation, place = info.args
    results = [node for node in factorisation.users if node.meta["val"].dtype not in (torch.int32, torch.int64)]
    for result in results:
        others = list(result.users)
        with graph.inserting_after(result):
            info = graph.call_function(getitem, (factorisation, place))
        with graph.inserting_after(info):
            node = graph.call_function(torch.ops.autopar.checked.default, (result, info, args[1], matrix))
        for new, val in ((info, factorisation.meta["val"][place]), (node, result.meta["val"])):
            new.meta = {**result.meta, "val": val}
        for reader in others:
            reader.replace_input_with(result, node)


def source_of(node: fx.Node) -> str:
    """The user's line, if it is known."""
    source = node.meta.get("custom", {}).get("source", "")
    return f"\n  from {source}" if source else ""
