"""Rewrites of ops that pick or change rows by number, and of extremes over several dims.

In: a `Builder`, the old node, its new arguments.  Out: `index`, `index_put`, `amax`, `amin`, `where`.
Next: `rules/lookups.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from autopar.build import Builder, aten, dtype_of, shape_of
from autopar.rewrite_table import out_shape, rewrite
from autopar.rewrites import dims_of, scaled, total
from autopar.rewrites_spatial import var

# ---- rows by number --------------------------------------------------------------------------------------------------


def at(build: Builder, x: Any, dim: int, index: Any) -> list[Any]:
    """The indices of `x[:, :, index]`."""
    return [None] * (dim % max(len(shape_of(x)), 1)) + [build.view(index, [index.meta["val"].numel()])]


@rewrite(aten.index_select.default)
def index_select(build: Builder, node: fx.Node, x: Any, dim: int, index: Any) -> Any:
    return build.call(aten.index.Tensor, x, at(build, x, dim, index)) if shape_of(x) else None


@rewrite(aten.index_add.default)
def index_add(build: Builder, node: fx.Node, x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    if not shape_of(x) or not shape_of(source):
        return None
    return build.call(aten.index_put.default, x, at(build, x, dim, index), scaled(build, source, alpha), True)


@rewrite(aten.index_copy.default)
def index_copy(build: Builder, node: fx.Node, x: Any, dim: int, index: Any, source: Any) -> Any:
    if not shape_of(x) or not shape_of(source):
        return None
    return build.call(aten.index_put.default, x, at(build, x, dim, index), source, False)


@rewrite(aten.index_fill.int_Scalar)
def index_fill(build: Builder, node: fx.Node, x: Any, dim: int, index: Any, value: Any) -> Any:
    if not shape_of(x):
        return None
    number = build.full((), value, dtype_of(x))
    return build.call(aten.index_put.default, x, at(build, x, dim, index), number, False)


@rewrite(aten.fill.Tensor)
def fill(build: Builder, node: fx.Node, x: Any, value: Any) -> Any:
    return build.expand(build.view(build.cast(value, dtype_of(x)), [1] * len(shape_of(x))), out_shape(node))


@rewrite(aten.masked_fill.Tensor)
def masked_fill(build: Builder, node: fx.Node, x: Any, mask: Any, value: Any) -> Any:
    return build.call(aten.where.self, mask, build.cast(value, dtype_of(x)), x)


@rewrite(aten.slice_scatter.default)
def slice_scatter(
    build: Builder, node: fx.Node, x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    """A slice that is the whole dim leaves nothing of what was there."""
    return build.cast(source, dtype_of(x)) if shape_of(source)[dim] == shape_of(x)[dim] else None


# ---- extremes --------------------------------------------------------------------------------------------------------

EXTREMES: dict[Any, Any] = {aten.max.default: aten.amax.default, aten.min.default: aten.amin.default}


@rewrite(*EXTREMES)
def extreme(build: Builder, node: fx.Node, x: Any) -> Any:
    if dtype_of(x) == torch.bool:
        return None
    return build.call(EXTREMES[node.target], x, list(range(len(shape_of(x)))), False)


@rewrite(aten.logsumexp.default)
def logsumexp(build: Builder, node: fx.Node, x: Any, dims: Any, keepdim: bool = False) -> Any:
    """The largest number is taken out before exponentials are summed, unless it is infinite."""
    x, over = build.cast(x, dtype_of(node)), dims_of(x, dims)
    largest = build.call(aten.amax.default, x, over, True)
    infinite = build.call(aten.eq.Scalar, build.call(aten.abs.default, largest), float("inf"))
    top = build.call(aten.masked_fill.Scalar, largest, infinite, 0)
    powers = build.call(aten.exp.default, build.call(aten.sub.Tensor, x, top))
    summed = build.call(aten.log.default, total(build, dtype_of(node), powers, over, True))
    return build.view(build.call(aten.add.Tensor, summed, top), out_shape(node))


@rewrite(aten.std.correction)
def std(build: Builder, node: fx.Node, x: Any, dims: Any = None, **keywords: Any) -> Any:
    return build.call(aten.sqrt.default, var(build, node, x, dims, **keywords))
