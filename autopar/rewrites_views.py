"""Rewrites of ops that move elements without computing: views, pieces and joins.

In: a `Builder`, the old node, its new arguments.  Out: `reshape`, `permute`, `expand`, `select`, `slice`, `cat`.
Next: `rules/views.py`, which has a rule for each of those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from autopar.build import Builder, aten, dtype_of, fake_empty, shape_of
from autopar.rewrite_table import out_shape, rewrite

# ---- views -----------------------------------------------------------------------------------------------------------


@rewrite(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
def view(build: Builder, node: fx.Node, x: Any, *_: Any, **__: Any) -> Any:
    return build.view(x, out_shape(node))


@rewrite(aten.expand.default)
def expand(build: Builder, node: fx.Node, x: Any, *_: Any, **__: Any) -> Any:
    lead = len(out_shape(node)) - len(shape_of(x))
    x = build.view(x, [1] * lead + list(shape_of(x)))
    return build.expand(x, out_shape(node))


@rewrite(aten.t.default)
def t(build: Builder, node: fx.Node, x: Any) -> Any:
    return build.permute(x, list(reversed(range(len(shape_of(x))))))


@rewrite(aten.transpose.int)
def transpose(build: Builder, node: fx.Node, x: Any, first: int, second: int) -> Any:
    order = list(range(len(shape_of(x))))
    if not order:
        return x
    order[first], order[second] = order[second], order[first]
    return build.permute(x, order)


@rewrite(aten.permute.default)
def permute(build: Builder, node: fx.Node, x: Any, dims: Sequence[int]) -> Any:
    return build.permute(x, dims)


@rewrite(aten.repeat.default)
def repeat(build: Builder, node: fx.Node, x: Any, repeats: Sequence[int]) -> Any:
    """Every dim becomes (repeats, size), the first of the two expanded."""
    shape = [1] * (len(repeats) - len(shape_of(x))) + list(shape_of(x))
    pairs = list(zip(repeats, shape, strict=True))
    lone = build.view(x, [n for r, s in pairs for n in ((1, s) if r > 1 else (s,))])
    return build.view(build.expand(lone, [n for r, s in pairs for n in ((r, s) if r > 1 else (s,))]), out_shape(node))


# ---- pieces ----------------------------------------------------------------------------------------------------------


def piece(build: Builder, x: Any, dim: int, parts: int, index: int) -> Any:
    """Piece `index` of a dim cut into `parts` equal ones: a view and a select."""
    shape = list(shape_of(x))
    rows = build.view(x, [*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :]])
    return build.call(aten.select.int, rows, dim, index)


@rewrite(aten.split.Tensor, aten.unsafe_split.Tensor, aten.split_with_sizes.default)
def split(build: Builder, node: fx.Node, x: Any, sizes: Any, dim: int = 0) -> Any:
    dim %= len(shape_of(x))
    lengths = [value.shape[dim] for value in node.meta["val"]]
    if len(set(lengths)) == 1:
        return tuple(piece(build, x, dim, len(lengths), i) for i in range(len(lengths)))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return tuple(
        build.call(aten.slice.Tensor, x, dim, start, start + length)
        for start, length in zip(starts, lengths, strict=True)
    )


@rewrite(aten.slice.Tensor)
def slice_(
    build: Builder, node: fx.Node, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    size, dim = shape_of(x)[dim], dim % len(shape_of(x))
    first, last, stride = slice(start, end, step).indices(size)
    length = out_shape(node)[dim]
    if stride != 1:
        return build.call(aten.slice.Tensor, x, dim, first, last, stride)
    if length == size:
        return x
    if length == 1:
        return build.view(build.call(aten.select.int, x, dim, first), out_shape(node))
    if length > 0 and size % length == 0 and first % length == 0:
        return piece(build, x, dim, size // length, first // length)
    return build.call(aten.slice.Tensor, x, dim, first, first + length)


@rewrite(aten.slice_backward.default)
def slice_backward(
    build: Builder, node: fx.Node, grad: Any, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Any:
    dim %= len(sizes)
    size, length = sizes[dim], shape_of(grad)[dim]
    first, last, stride = slice(start, end, step).indices(size)
    if stride == 1 and length == size:
        return grad
    if stride == 1 and length == 1:
        grad = build.view(grad, [*sizes[:dim], *sizes[dim + 1 :]])
        return build.call(aten.select_backward.default, grad, list(sizes), dim, first)
    if stride == 1 and length > 0 and size % length == 0 and first % length == 0:
        parts = [*sizes[:dim], size // length, length, *sizes[dim + 1 :]]
        whole = build.call(aten.select_backward.default, grad, parts, dim, first // length)
        return build.view(whole, sizes)
    return build.call(aten.slice_backward.default, grad, list(sizes), dim, first, last, stride)


@rewrite(aten.select.int)
def select(build: Builder, node: fx.Node, x: Any, dim: int, index: int) -> Any:
    dim, size = dim % len(shape_of(x)), shape_of(x)[dim]
    return build.view(x, out_shape(node)) if size == 1 else build.call(aten.select.int, x, dim, index % size)


@rewrite(aten.select_backward.default)
def select_backward(build: Builder, node: fx.Node, grad: Any, sizes: Sequence[int], dim: int, index: int) -> Any:
    dim %= len(sizes)
    return build.call(aten.select_backward.default, grad, list(sizes), dim, index % sizes[dim])


@rewrite(aten.cat.default)
def cat(build: Builder, node: fx.Node, tensors: Sequence[Any], dim: int = 0) -> Any:
    """Equal pieces are joined along a new dim, so that each piece may be cut inside."""
    shape = out_shape(node)
    dim %= len(shape)
    tensors = [x for x in tensors if shape_of(x) != (0,)]
    tensors = [x for x in tensors if shape_of(x)[dim] > 0] or tensors[:1]
    if len(tensors) == 1:
        return tensors[0]
    lengths = {shape_of(x)[dim] for x in tensors}
    tensors = [build.cast(x, dtype_of(node)) for x in tensors]
    if len(lengths) > 1 or 1 in lengths:
        return build.call(aten.cat.default, tensors, dim)
    rows = [build.view(x, [*shape_of(x)[:dim], 1, *shape_of(x)[dim:]]) for x in tensors]
    return build.view(build.call(aten.cat.default, rows, dim), shape)


@rewrite(aten.as_strided.default)
def as_strided(build: Builder, node: fx.Node, x: Any, size: Any, stride: Any, offset: Any = None) -> Any:
    """A view of another shape, where all elements of a dense tensor are taken in their order."""
    old: Any = node.args[0]
    old, dense = old.meta["val"], fake_empty(build.mode, size, torch.uint8)
    if offset or not old.is_contiguous() or old.numel() != dense.numel() or list(dense.stride()) != list(stride):
        return None
    return build.view(x, size)
