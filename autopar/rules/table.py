"""The whole table, and what happens to an op that is not in it.

In: the rule files.  Out: `lookup`.  Next: `axes.py`.
"""

from __future__ import annotations

import logging

import torch
from torch import fx

from autopar.rules import lookups, matmul, pointwise, reductions, special, views  # noqa: F401  (they fill the table)
from autopar.rules.core import RULES, Instance, operands, results

log = logging.getLogger("autopar")


def lookup(node: fx.Node) -> tuple[Instance, bool]:
    """The rule at a node, and whether there is one; an op without a rule runs whole, with one line in the log."""
    if node.target in RULES:
        return RULES[node.target].make(node), True
    if pointwise.is_pointwise(node):
        return pointwise.pointwise(node), True
    return run_whole(node), False


def run_whole(node: fx.Node) -> Instance:
    """No dim of any operand or result may be cut."""
    sizes: dict[str, int] = {}

    def dims(tensor: torch.Tensor, prefix: str) -> tuple[tuple[str, ...], ...]:
        out = tuple((f"{prefix}{d}",) if n != 1 else () for d, n in enumerate(tensor.shape))
        sizes.update({f"{prefix}{d}": n for d, n in enumerate(tensor.shape) if n != 1})
        return out

    inputs = tuple(dims(o.meta["val"], f"i{i}.") for i, o in enumerate(operands(node)))
    made = enumerate(results(node))
    outputs = tuple(dims(t, f"o{i}.") if isinstance(t, torch.Tensor) else () for i, t in made)
    return Instance(inputs, outputs, sizes, whole=frozenset(sizes))
