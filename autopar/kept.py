"""Tensors that forward keeps in attributes of modules, such as tables of sines and masks.

In: a traced joint graph that gives them behind its results.  Out: the graph without them, or a refusal.
Next: `refusals.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autopar._torch import Joint
from autopar.errors import CaptureError


def without_kept(joint: Joint, seen: Mapping[str, Any]) -> Joint:
    """The graph without the tensors that forward keeps in attributes: each run computes them again.

    That is right for what follows from constants and buffers alone. What follows from inputs, parameters or random
    numbers is meant for someone who reads it later, and what follows from the tensor that it replaces moves on.
    """
    names = dict(enumerate(seen["kept"], start=len(seen["names"])))
    if not names:
        return joint
    placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
    ends = zip(placeholders, joint.inputs, strict=True)
    allowed = {node for node, (kind, i) in ends if kind == "argument" and i in seen["buffers"]}
    (output,) = [node for node in joint.graph.nodes if node.op == "output"]
    pairs = list(zip(joint.results, output.args[0], strict=True))
    for (kind, i), node in pairs:
        if kind == "output" and i in names:
            (path, name), before = names[i]
            found = ancestors(node)
            constants = [joint.attributes[str(n.target)] for n in found if n.op == "get_attr"]
            itself = any(constant is old for constant in constants for old in before)
            if itself or found & set(placeholders) - allowed:
                what = "its own old value" if itself else "inputs or parameters"
                raise CaptureError(
                    f"the forward of {path or 'the model'} keeps a tensor in its attribute {name} that follows from "
                    f"{what}, which no later call would find there\n"
                    "  try: return it from forward, or register a buffer for it"
                )
    kept = [pair for pair in pairs if not (pair[0][0] == "output" and pair[0][1] in names)]
    output.args = ([node for _, node in kept],)
    joint.graph.eliminate_dead_code()
    return replace(joint, results=tuple(result for result, _ in kept))


def ancestors(node: fx.Node) -> set[fx.Node]:
    """Every node that a node follows from."""
    found, todo = {node}, [node]
    while todo:
        new = set(todo.pop().all_input_nodes) - found
        found |= new
        todo += new
    return found
