"""Where rewrites are entered: ATen op -> function that builds what stands for it.

In: nothing.  Out: `REWRITES`, filled by `rewrites.py` and `rewrites_views.py`.  Next: `rewrites.py`.

A rewrite gets a `Builder`, the old node and its new arguments. It returns a node, a tuple of nodes for an op with
several results, or None to keep the op as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch.fx as fx

from autopar.build import shape_of

Rewrite = Callable[..., Any]
REWRITES: dict[Any, Rewrite] = {}
GETITEM = operator.getitem


def rewrite(*targets: Any) -> Callable[[Rewrite], Rewrite]:
    """Enter a function into the table."""

    def enter(function: Rewrite) -> Rewrite:
        REWRITES.update(dict.fromkeys(targets, function))
        return function

    return enter


def out_shape(node: fx.Node) -> tuple[int, ...]:
    return shape_of(node)
