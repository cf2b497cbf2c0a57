"""Rewrites of convolutions, of variances, and of the lookups with which pictures are resampled.

In: a `Builder`, the old node, its new arguments.  Out: a convolution without bias and a sum; sums and products instead
of a variance.  Next: `rewrites_views.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch.fx as fx

from autopar.build import Builder, aten, dtype_of, shape_of
from autopar.rewrite_table import GETITEM, rewrite
from autopar.rewrites import dims_of, total


@rewrite(aten.convolution.default)
def convolution(build: Builder, node: fx.Node, x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    """The bias is a sum of its own: cut over input channels, every device would add it."""
    if bias is None:
        return None
    y = build.call(aten.convolution.default, x, weight, None, *rest)
    picture = [1] * (len(shape_of(y)) - 2)
    return build.call(aten.add.Tensor, y, build.view(bias, [*shape_of(bias), *picture]))


@rewrite(aten.convolution_backward.default)
def convolution_backward(build: Builder, node: fx.Node, grad: Any, x: Any, weight: Any, _: Any, *rest: Any) -> Any:
    """The gradient of the bias is a sum of its own."""
    *others, (want_x, want_weight, want_bias) = rest
    if not want_bias:
        return None
    over = [0, *range(2, len(shape_of(grad)))]
    bias = build.call(aten.sum.dim_IntList, grad, over, False)
    if not (want_x or want_weight):
        return None, None, bias
    mask = [want_x, want_weight, False]
    made = build.call(aten.convolution_backward.default, grad, x, weight, None, *others, mask)
    got = [build.call(GETITEM, made, i) if wanted else None for i, wanted in enumerate(mask[:2])]
    return (*got, bias)


@rewrite(aten.var_mean.correction)
def var_mean(
    build: Builder, node: fx.Node, x: Any, dims: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> Any:
    """The mean of squared differences from the mean, over one less than their number (or `correction` less)."""
    over = dims_of(x, dims)
    count = math.prod(shape_of(x)[d] for d in over)
    mean = build.call(aten.div.Tensor, total(build, dtype_of(x), x, over, True), count)
    centred = build.call(aten.sub.Tensor, x, mean)
    squares = build.call(aten.mul.Tensor, centred, centred)
    variance = build.call(
        aten.div.Tensor, total(build, dtype_of(x), squares, over, keepdim), max(count - correction, 0)
    )
    return variance, mean if keepdim else build.view(mean, [s for d, s in enumerate(shape_of(x)) if d not in over])


@rewrite(aten.var.correction)
def var(build: Builder, node: fx.Node, x: Any, dims: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    """The first of the two."""
    return var_mean(build, node, x, dims, correction=correction, keepdim=keepdim)[0]


@rewrite(aten._unsafe_index.Tensor)
def index(build: Builder, node: fx.Node, x: Any, indices: Any) -> Any:
    return build.call(aten.index.Tensor, x, indices)


@rewrite(aten._unsafe_index_put.default)
def index_put(build: Builder, node: fx.Node, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    return build.call(aten.index_put.default, x, indices, values, accumulate)
