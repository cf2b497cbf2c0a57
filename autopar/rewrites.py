"""Rewrites of ops that compute, and of tensors made from nothing.

In: a `Builder`, the old node, its new arguments.  Out: sums and counts instead of means, products and sums instead of
`addmm`, `full` and `arange` instead of other factories.  Next: `rewrites_views.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx as fx

from autopar.build import Builder, aten, dtype_of, shape_of
from autopar.rewrite_table import GETITEM, out_shape, rewrite
from autopar.rules.lookups import boolean

# ---- nothing -------------------------------------------------------------------------------------------------------


@rewrite(
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
)
def nothing(build: Builder, node: fx.Node, x: Any, **_: Any) -> Any:
    return x


@rewrite(aten._to_copy.default)
def cast(build: Builder, node: fx.Node, x: Any, **_: Any) -> Any:
    return build.cast(x, dtype_of(node))


@rewrite(aten.copy.default)
def copy(build: Builder, node: fx.Node, x: Any, source: Any, non_blocking: bool = False) -> Any:
    return build.expand(build.cast(source, dtype_of(node)), out_shape(node))


# ---- sums ------------------------------------------------------------------------------------------------------------


def dims_of(x: Any, dims: Any) -> list[int]:
    """Dims of a reduction as plain numbers; none given means all."""
    n = len(shape_of(x))
    if isinstance(dims, int):
        dims = [dims]
    return sorted(d % n for d in dims) if dims and n else list(range(n))


def total(build: Builder, dtype: torch.dtype, x: Any, dims: Any, keepdim: bool) -> Any:
    """A sum over dims, in a dtype."""
    over = [d for d in dims_of(x, dims) if shape_of(x)[d] != 1]
    kept = [1 if d in dims_of(x, dims) else s for d, s in enumerate(shape_of(x))]
    shape = kept if keepdim else [s for d, s in enumerate(shape_of(x)) if d not in dims_of(x, dims)]
    x = build.cast(x, dtype)
    if not over:
        return build.view(x, shape)
    return build.view(build.call(aten.sum.dim_IntList, x, over, False), shape)


@rewrite(aten.sum.dim_IntList)
def sum_dims(build: Builder, node: fx.Node, x: Any, dims: Any, keepdim: bool = False, **_: Any) -> Any:
    return total(build, dtype_of(node), x, dims, keepdim)


@rewrite(aten.sum.default)
def sum_all(build: Builder, node: fx.Node, x: Any, **_: Any) -> Any:
    return total(build, dtype_of(node), x, None, False)


@rewrite(aten.mean.dim)
def mean_dims(build: Builder, node: fx.Node, x: Any, dims: Any, keepdim: bool = False, **_: Any) -> Any:
    count = math.prod(shape_of(x)[d] for d in dims_of(x, dims))
    return build.call(aten.div.Tensor, total(build, dtype_of(node), x, dims, keepdim), count)


@rewrite(aten.mean.default)
def mean_all(build: Builder, node: fx.Node, x: Any, **_: Any) -> Any:
    return mean_dims(build, node, x, None)


# ---- contractions ----------------------------------------------------------------------------------------------------


def scaled(build: Builder, x: Any, factor: Any) -> Any:
    return x if factor == 1 else build.call(aten.mul.Tensor, x, factor)


@rewrite(aten.addmm.default)
def addmm(build: Builder, node: fx.Node, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = scaled(build, build.call(aten.mm.default, a, b), alpha)
    return product if beta == 0 else build.call(aten.add.Tensor, product, scaled(build, bias, beta))


# A conjugate or negative that is only marked as one would lose its mark where its memory is sent to other devices.
MARKED: dict[Any, Any] = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}


@rewrite(*MARKED)
def computed(build: Builder, node: fx.Node, x: Any) -> Any:
    return build.call(MARKED[node.target], x)


SCALARS: dict[Any, Any] = {
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}


@rewrite(*SCALARS)
def scalar_operand(build: Builder, node: fx.Node, *args: Any) -> Any:
    return build.call(SCALARS[node.target], *args)


@rewrite(aten.pow.Tensor_Scalar)
def power(build: Builder, node: fx.Node, x: Any, exponent: Any) -> Any:
    return x if exponent == 1 and dtype_of(node) == dtype_of(x) else None


# ---- masks ----------------------------------------------------------------------------------------------------------


@rewrite(aten.index_put.default)
def masked_put(
    build: Builder, node: fx.Node, x: Any, indices: Any, value: Any, accumulate: bool = False, *_: Any
) -> Any:
    """`x[mask] = value` is a `where`, if one mask picks and every place gets the same value, so that none is counted.

    The mask stands for as many dims as it has, from the first that is indexed.
    """
    (*before, mask) = indices
    if any(i is not None for i in before) or mask is None or not boolean(mask.meta["val"]):
        return None
    rest = len(shape_of(x)) - len(before) - len(shape_of(mask))
    sizes = list(shape_of(value))
    at = len(sizes) - rest - 1  # where the value has a dim that runs over the places, if it has one
    if at >= 0:
        if sizes[at] != 1:
            return None
        sizes[at : at + 1] = [1] * len(shape_of(mask))
    mask = build.view(build.cast(mask, torch.bool), [*shape_of(mask), *[1] * rest])
    value = build.cast(build.view(value, sizes), dtype_of(x))
    put = build.call(aten.add.Tensor, x, value) if accumulate else value
    return build.call(aten.where.self, mask, put, x)


# ---- losses ----------------------------------------------------------------------------------------------------------

SUM = 2  # torch's number for reduction="sum"
MEAN = 1


@rewrite(aten.nll_loss_forward.default)
def nll(build: Builder, node: fx.Node, x: Any, target: Any, weight: Any, reduction: int, ignore: int) -> Any:
    """The mean is a sum of losses divided by a count (or sum of weights) of the labels that are not ignored."""
    if reduction == 0:
        return None
    old = node.meta["val"][1].dtype
    both = build.call(aten.nll_loss_forward.default, x, target, weight, SUM, ignore)
    summed = build.call(GETITEM, both, 0)
    if weight is None:
        valid = build.call(aten.ne.Scalar, target, ignore)
        over = list(range(len(shape_of(target))))
        count = build.call(aten.sum.dim_IntList, valid, over, False) if over else build.cast(valid, torch.int64)
        count = build.cast(count, old)
    else:
        count = build.call(GETITEM, both, 1)
    return (build.call(aten.div.Tensor, summed, count) if reduction == MEAN else summed), count


@rewrite(aten.nll_loss_backward.default)
def nll_backward(
    build: Builder, node: fx.Node, grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignore: int, count: Any
) -> Any:
    if reduction == 0:
        return None
    if reduction == MEAN:
        grad = build.call(aten.div.Tensor, grad, count)
    return build.call(aten.nll_loss_backward.default, grad, x, target, weight, SUM, ignore, count)


def by_row(build: Builder, x: Any) -> Any:
    """[n, classes, h, w] as [n h w, classes]."""
    last = build.permute(x, [0, 2, 3, 1])
    return build.view(last, [math.prod(shape_of(last)[:3]), shape_of(last)[3]])


@rewrite(aten.nll_loss2d_forward.default)
def nll_2d(build: Builder, node: fx.Node, x: Any, target: Any, weight: Any, reduction: int, ignore: int) -> Any:
    """Labels of a picture, or of a sequence with the classes in front of it, are rows like any others."""
    args = (by_row(build, x), build.view(target, [math.prod(shape_of(target))]), weight, reduction, ignore)
    made = nll(build, node, *args)
    if made is None:
        both = build.call(aten.nll_loss_forward.default, *args)
        made = build.view(build.call(GETITEM, both, 0), shape_of(target)), build.call(GETITEM, both, 1)
    return made


@rewrite(aten.nll_loss2d_backward.default)
def nll_2d_backward(
    build: Builder, node: fx.Node, grad: Any, x: Any, target: Any, weight: Any, reduction: int, ignore: int, count: Any
) -> Any:
    n, classes, *picture = shape_of(x)
    rows = [math.prod(shape_of(target))]
    grad = build.view(grad, rows) if reduction == 0 else grad
    args = (grad, by_row(build, x), build.view(target, rows), weight, reduction, ignore, count)
    made = nll_backward(build, node, *args)
    if made is None:
        made = build.call(aten.nll_loss_backward.default, *args)
    return build.permute(build.view(made, [n, *picture, classes]), [0, 3, 1, 2])


# ---- factories -------------------------------------------------------------------------------------------------------


@rewrite(aten.full.default, aten.full_like.default, aten.new_full.default, aten.fill.Scalar)
def full(build: Builder, node: fx.Node, *args: Any, **_: Any) -> Any:
    """The value stands last, behind a size or a tensor or both."""
    return build.full(out_shape(node), args[-1], dtype_of(node))


@rewrite(aten.scalar_tensor.default)
def scalar(build: Builder, node: fx.Node, value: Any, **_: Any) -> Any:
    return build.full((), value, dtype_of(node))


@rewrite(
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.zero.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty_strided.default,
)
def zeros(build: Builder, node: fx.Node, *_: Any, **__: Any) -> Any:
    return build.full(out_shape(node), 0, dtype_of(node))


@rewrite(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(build: Builder, node: fx.Node, *_: Any, **__: Any) -> Any:
    return build.full(out_shape(node), 1, dtype_of(node))


@rewrite(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(build: Builder, node: fx.Node, *args: Any, **_: Any) -> Any:
    first, last, step = (0, *args, 1)[-3:] if len(args) < 3 else args
    kwargs = {"dtype": dtype_of(node), "device": torch.device("cpu")}
    return build.call(aten.arange.start_step, first, last, step, **kwargs)
