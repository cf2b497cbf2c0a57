"""Functions that use the ops which the models do not, so that every row of the rule table is run.

In: nothing.  Out: (function, inputs) pairs to trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
ours = torch.ops.autopar


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64)


def index(top: int, *shape: int) -> Tensor:
    return torch.randint(top, shape)


def mask(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.6


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
    b, h, s, _ = q.shape
    piece = [b, h, s, k.shape[2]]
    out, lse = ours.attention(q, k, v, bias, False, 0.5, 0.0, 0, None, piece, piece, [0] * 4, 0)
    return ours.attention_backward(out, q, k, v, out, lse, bias, False, 0.5, 0.0, 0, None, piece, piece, [0] * 4, 0)


def convolution(*args: Any) -> Callable[..., Any]:
    """A convolution and its two gradients; `args` are stride, padding, dilation, transposed, output padding, groups."""

    def run(x: Tensor, w: Tensor) -> Any:
        y = aten.convolution(x, w, None, *args)
        return aten.convolution_backward(y, x, w, None, *args, [True, True, False])

    return run


def pooled(x: Tensor) -> Any:
    y, where = aten.max_pool2d_with_indices(x, [2, 2])
    z, there = aten.adaptive_max_pool2d(x, [2, 3])
    mean, adaptive = aten.avg_pool2d(x, [2, 2]), aten._adaptive_avg_pool2d(x, [2, 3])
    return (
        aten.max_pool2d_with_indices_backward(y, x, [2, 2], [2, 2], [0, 0], [1, 1], False, where),
        aten.adaptive_max_pool2d_backward(z, x, there),
        aten.avg_pool2d_backward(mean, x, [2, 2], [2, 2], [0, 0], False, True, None),
        aten._adaptive_avg_pool2d_backward(adaptive, x),
    )


def pooled_3d(x: Tensor) -> Any:
    y, where = aten.max_pool3d_with_indices(x, [2, 2, 2])
    z, there = aten.adaptive_max_pool3d(x, [2, 3, 1])
    mean, adaptive = aten.avg_pool3d(x, [2, 2, 2]), aten._adaptive_avg_pool3d(x, [2, 3, 1])
    two = [2, 2, 2]
    return (
        aten.max_pool3d_with_indices_backward(y, x, two, two, [0, 0, 0], [1, 1, 1], False, where),
        aten.adaptive_max_pool3d_backward(z, x, there),
        aten.avg_pool3d_backward(mean, x, two, two, [0, 0, 0], False, True, None),
        aten._adaptive_avg_pool3d_backward(adaptive, x),
    )


def resampled(x: Tensor) -> Any:
    shape = list(x.shape)
    near = aten.upsample_nearest2d(x, [8, 10])
    straight, curved = aten.upsample_bilinear2d(x, [8, 10], False), aten.upsample_bicubic2d(x, [8, 10], True)
    return (
        aten.upsample_nearest2d_backward(near, [8, 10], shape),
        aten.upsample_bilinear2d_backward(straight, [8, 10], shape, False),
        aten.upsample_bicubic2d_backward(curved, [8, 10], shape, True),
    )


def activated(x: Tensor, w: Tensor) -> Any:
    """The gradients of activations that torch does not tag as pointwise."""
    kink = aten._prelu_kernel(x, w)
    return (
        aten.softplus_backward(x, kink, 1.0, 20.0),
        aten.elu_backward(x, 1.0, 1.0, 1.0, False, kink),
        aten.hardswish_backward(x, aten.hardswish(kink)),
        aten.hardsigmoid_backward(x, kink),
        aten.leaky_relu_backward(x, kink, 0.1, False),
        aten.hardtanh_backward(x, kink, 0.5, 1.0),
        aten.mish_backward(x, kink),
        aten.softshrink_backward(x, kink, 0.5),
        aten._prelu_kernel_backward(x, kink, w),
    )


def padded(x: Tensor, dims: int) -> Any:
    """Two kinds of padding and their gradients; pads by more before than behind."""
    pads, made = [2, 1] * dims, []
    for kind in ("reflection", "replication"):
        name = f"{kind}_pad{dims}d"
        y = getattr(aten, name)(x, pads)
        made.append(getattr(aten, f"{name}_backward")(y, x, pads))
    return made


def sampled(x: Tensor, grid: Tensor) -> Any:
    y = aten.grid_sampler_2d(x, grid, 0, 0, False)
    return aten.grid_sampler_2d_backward(y, x, grid, 0, 0, False, [True, True])


def patches(x: Tensor) -> Any:
    shape, args = list(x.shape[-2:]), ([2, 3], [1, 1], [1, 0], [2, 1])
    return aten.col2im(aten.im2col(x, *args), shape, *args)


def unfolded(x: Tensor) -> Any:
    return aten.unfold_backward(aten.unfold(x, 1, 3, 2), list(x.shape), 1, 3, 2)


def ranked(x: Tensor) -> Any:
    """What looks along the middle dim of three."""
    kept = aten.kthvalue(x, 2, 1, True), aten.median.dim(x, 1, True), aten.aminmax(x, dim=1, keepdim=True)
    gone = aten.max.dim(x, 1), aten.min.dim(x, -2), aten.mode(x, 1), aten.argmin(x, 1, True), aten.prod.dim_int(x, 1)
    moved = aten.sort(x, 1, True), aten.sort.stable(x, stable=True, dim=1), aten.topk(x, 2, 1)
    run = aten.cummax(x, 1), aten.cummin(x, 1), aten.cumprod(x, 1), aten.logcumsumexp(x, 1), aten.cumsum(x, 1)
    return kept, gone, moved, run, aten.argmax(x, 1)


RNG = torch.tensor([7, 3])

SNIPPETS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "gather": (lambda x, i: aten.gather(x, 1, i), (rand(4, 6, 5), index(6, 4, 3, 5))),
    "scatter_add": (lambda x, i, s: aten.scatter_add(x, 1, i, s), (rand(4, 6), index(6, 4, 3), rand(4, 3))),
    "scatter value": (lambda x, i: aten.scatter(x, 1, i, 2.5), (rand(4, 6), index(6, 4, 1))),
    "scatter src": (lambda x, i, s: aten.scatter(x, 1, i, s), (rand(4, 6), index(6, 4, 1), rand(4, 1))),
    "scatter some": (lambda x, i, s: aten.scatter(x, 1, i, s), (rand(4, 6, 5), index(6, 4, 1, 3), rand(6, 2, 5))),
    "scatter_add some": (
        lambda x, i, s: aten.scatter_add(x, 0, i, s),
        (rand(4, 6, 5), index(4, 6, 6, 3), rand(7, 6, 5)),
    ),
    "scatter reduce": (
        lambda x, i, s: (aten.scatter.reduce(x, 1, i, s, reduce="add"), aten.scatter_reduce.two(x, 1, i, s, "amax")),
        (rand(4, 6), index(6, 4, 3), rand(4, 3)),
    ),
    "index_put inner add": (
        lambda x, i, j, v: aten.index_put(x, [None, i, j], v, True),
        (rand(4, 3, 6, 5), index(3, 7), index(6, 2, 1), rand(4, 2, 7, 5)),
    ),
    "index_put apart add": (
        lambda x, i, j, v: aten.index_put(x, [i, None, j], v, True),
        (rand(6, 4, 5), index(6, 3), index(5, 3), rand(3, 4)),
    ),
    "index_put inner row": (
        lambda x, i, v: aten.index_put(x, [None, i], v),
        (rand(4, 6, 5), torch.tensor([4, 1, 2]), rand(5)),
    ),
    "index front": (lambda x, i: aten.index(x, [i]), (rand(6, 4, 5), index(6, 3, 2))),
    "index inner": (lambda x, i, j: aten.index(x, [None, i, j]), (rand(4, 6, 5), index(6, 4), index(5, 4))),
    "index apart": (lambda x, i, j: aten.index(x, [i, None, j]), (rand(6, 4, 5), index(6, 3), index(5, 3))),
    "index_put": (lambda x, i, v: aten.index_put(x, [i], v), (rand(6, 4), torch.tensor([4, 1, 2]), rand(3, 4))),
    "index_put add": (lambda x, i, v: aten.index_put(x, [i], v, True), (rand(6, 4), index(6, 3), rand(3, 4))),
    "index_put mask and number": (
        lambda x, m, i, v: aten.index_put(x, [None, m, i], v),
        (rand(3, 4, 6), mask(4), index(6, 1), rand(3, 1)),
    ),
    "index_put mask": (lambda x, m, v: aten.index_put(x, [m], v), (rand(4, 6, 5), mask(4, 6), rand(5))),
    "convolution": (convolution([1, 2], [1, 0], [1, 1], False, [0, 0], 1), (rand(4, 3, 5, 6), rand(6, 3, 3, 2))),
    "convolution in groups": (
        convolution([1, 1], [1, 1], [1, 1], False, [0, 0], 3),
        (rand(4, 6, 5, 4), rand(9, 2, 3, 3)),
    ),
    "convolution of every channel": (convolution([1], [1], [1], False, [0], 4), (rand(4, 4, 5), rand(4, 1, 3))),
    "convolution transposed": (
        convolution([2, 2], [0, 0], [1, 1], True, [0, 0], 1),
        (rand(4, 3, 3, 4), rand(3, 6, 2, 2)),
    ),
    "convolution transposed in groups": (
        convolution([2], [0], [1], True, [0], 2),
        (rand(4, 6, 3), rand(6, 3, 2)),
    ),
    "pooling": (pooled, (rand(4, 3, 4, 6),)),
    "pooling of one picture": (pooled, (rand(3, 4, 6),)),
    "pooling in three dims": (pooled_3d, (rand(4, 3, 4, 6, 2),)),
    "resampling": (resampled, (rand(4, 3, 4, 5),)),
    "where": (lambda c, a, b: aten.where(c, a, b), (mask(4, 6), rand(4, 6), rand(6))),
    "pairs": (
        lambda a, b: aten.view_as_complex(aten.view_as_real(aten.complex(a, b) * aten.polar(a, b))),
        (rand(4, 6), rand(4, 6)),
    ),
    "masked_fill": (lambda a, c: aten.masked_fill.Scalar(a, c, 0), (rand(4, 6), mask(4, 6))),
    "zeros_like": (lambda x: aten.zeros_like(x), (rand(4, 6),)),
    "div scalar": (lambda x: aten.div.Scalar(x, 3), (rand(4, 6),)),
    "sum": (lambda x: aten.sum(x), (rand(4, 6),)),
    "sum keep": (lambda x: aten.sum(x, [1], True), (rand(4, 6, 5),)),
    "amax": (lambda x: aten.amax(x, [1]), (rand(4, 6, 5),)),
    "amin": (lambda x: aten.amin(x, [0, 2], True), (rand(4, 6, 5),)),
    "ranked": (ranked, (rand(4, 6, 5),)),
    "argmax of all": (lambda x: aten.argmax(x), (rand(4, 6),)),
    "activations": (activated, (rand(4, 6) - 0.5, rand(6))),
    "floor_divide": (lambda a, b: aten.floor_divide(a, b), (rand(4, 6), rand(6))),
    "padding in one dim": (lambda x: padded(x, 1), (rand(4, 3, 6),)),
    "padding in two dims": (lambda x: padded(x, 2), (rand(4, 3, 6, 5),)),
    "padding in three dims": (lambda x: padded(x, 3), (rand(4, 3, 6, 5, 4),)),
    "padding of one picture": (lambda x: padded(x, 2), (rand(4, 6, 5),)),
    "grid_sample": (sampled, (rand(4, 3, 6, 5), rand(4, 2, 6, 2))),
    "patches": (patches, (rand(4, 3, 6, 5),)),
    "patches of one picture": (patches, (rand(4, 6, 5),)),
    "unfold": (unfolded, (rand(4, 7, 6),)),
    "slice_scatter": (lambda x, y: aten.slice_scatter(x, y, 1, 1, 6, 2), (rand(4, 6, 5), rand(4, 3, 5))),
    "select_scatter": (lambda x, y: aten.select_scatter(x, y, 1, 2), (rand(4, 6, 5), rand(4, 5))),
    "solve_triangular": (
        lambda a, b, c: (
            aten.linalg_solve_triangular(a, b, upper=False),
            aten.linalg_solve_triangular(a, c, upper=True, left=False, unitriangular=True),
        ),
        (rand(4, 5, 5), rand(4, 5, 6), rand(6, 5)),
    ),
    "bucketize": (lambda x, n: aten.bucketize(x, n), (rand(4, 6), torch.arange(5) / 5.0)),
    "isin": (lambda x, n: aten.isin(x, n), (index(9, 4, 6), index(9, 4))),
    "any": (lambda x: aten.any(x), (mask(4, 6),)),
    "all": (lambda x: aten.all(x), (mask(4, 6),)),
    "sigmoid_backward": (lambda g, y: aten.sigmoid_backward(g, y), (rand(4, 6), rand(4, 6))),
    "uniform": (lambda r: ours.uniform(0, r, [4, 6], [4, 6], [4, 6], [0, 0], torch.float64), (RNG,)),
    "unsqueeze": (lambda x: aten.unsqueeze(x, 1), (rand(4, 6),)),
    "squeeze": (lambda x: aten.squeeze.dim(x, 1), (rand(4, 1, 6),)),
    "slice part": (lambda x: aten.slice(x, 1, 3, 6), (rand(4, 6),)),
    "slice odd": (lambda x: aten.slice(x, 1, 1, 6), (rand(4, 6),)),
    "slice end": (lambda x: aten.slice(x, 0, -2), (rand(4, 6),)),
    "slice step": (lambda x: aten.slice(x, 1, 0, 6, 2), (rand(4, 6),)),
    "slice_backward": (lambda g: aten.slice_backward(g, [4, 6], 1, 3, 6, 1), (rand(4, 3),)),
    "slice_backward odd": (lambda g: aten.slice_backward(g, [4, 7], 1, 2, 5, 1), (rand(4, 3),)),
    "select_backward": (lambda g: aten.select_backward(g, [4, 3, 6], 1, 2), (rand(4, 6),)),
    "cat unequal": (lambda a, b: aten.cat([a, b], 1), (rand(4, 6), rand(4, 2))),
    "cat equal": (lambda a, b: aten.cat([a, b], 1), (rand(4, 6), rand(4, 6))),
    "pad": (lambda x: aten.constant_pad_nd(x, [1, 2]), (rand(4, 6),)),
    "pad one": (lambda x: aten.constant_pad_nd(x, [1, 2], 1.0), (rand(4, 6),)),
    "flip": (lambda x: aten.flip(x, [1]), (rand(4, 6),)),
    "triu": (lambda x: aten.triu(x, 1), (rand(4, 6, 5),)),
    "tril": (lambda x: aten.tril(x), (rand(4, 6, 5),)),
    "diagonal": (lambda x: aten.diagonal(x, 0, 1, 2), (rand(4, 6, 6),)),
    "expand front": (lambda x: aten.expand(x, [5, 4, 6]), (rand(4, 1),)),
    "layer norm of two dims": (
        lambda x, w, b: aten.native_layer_norm(x, [6, 5], w, b, 1e-5),
        (rand(4, 6, 5), rand(6, 5), rand(6, 5)),
    ),
    "layer norm backward without input": (
        lambda g, x, m, r, w: aten.native_layer_norm_backward(g, x, [6], m, r, w, None, [False, True, False]),
        (rand(4, 6), rand(4, 6), rand(4, 1), rand(4, 1), rand(6)),
    ),
    "nll by row": (lambda x, t: aten.nll_loss_forward(x, t, None, 0, -100), (rand(4, 6), index(6, 4))),
    "nll mean": (lambda x, t: aten.nll_loss_forward(x, t, None, 1, 2), (rand(4, 6), index(6, 4))),
    "nll weighted": (lambda x, t, w: aten.nll_loss_forward(x, t, w, 2, -100), (rand(4, 6), index(6, 4), rand(6))),
    "nll backward by row": (
        lambda g, x, t, n: aten.nll_loss_backward(g, x, t, None, 0, -100, n),
        (rand(4), rand(4, 6), index(6, 4), rand()),
    ),
    "embedding backward padding": (
        lambda g, i: aten.embedding_dense_backward(g, i, 11, 2, False),
        (rand(4, 6, 5), index(11, 4, 6)),
    ),
    "attention with a bias": (attention, (rand(4, 6, 5, 2), rand(4, 3, 7, 2), rand(4, 3, 7, 2), rand(4, 1, 5, 7))),
    "attention with a bias by head": (
        attention,
        (rand(4, 6, 5, 2), rand(4, 3, 7, 2), rand(4, 3, 7, 2), rand(1, 6, 1, 7)),
    ),
}
