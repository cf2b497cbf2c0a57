"""The whole table, and what happens to an op that is not in it.

In: the rule files.  Out: `lookup`.  Next: `own.py`, the rules of users.
"""

from __future__ import annotations

from torch import fx

from autopar.rules import (  # noqa: F401  (they fill the table)
    experts,
    lookups,
    matmul,
    order,
    pointwise,
    reductions,
    spatial,
    special,
    views,
)
from autopar.rules.core import RULES, Instance, run_whole


def lookup(node: fx.Node) -> tuple[Instance, bool]:
    """The rule at a node, and whether there is one; an op without a rule runs whole."""
    if node.target in RULES:
        return RULES[node.target].make(node), True
    if pointwise.is_pointwise(node):
        return pointwise.pointwise(node), True
    return run_whole(node), False
