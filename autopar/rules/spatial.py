"""Convolution, pooling and resampling: batch and channels are letters, the picture stays whole.

In: nothing.  Out: rows of the rule table.  Next: `special.py`.

Channels of a grouped convolution are a product, (g c) in and (g o) out. A device that holds some of the groups computes
with their number, see `bind.convolution`. A bias has been split off by `rewrites_spatial.py`: with a cut over input
channels, every device would add it.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx, ops

from autopar.rules import bind
from autopar.rules.core import Instance, args_of, computed, instantiate, operands, rule

aten = ops.aten


def places(letter: str, count: int) -> str:
    """`s0 s1`: letters of the dims of a picture."""
    return " ".join(f"{letter}{i}" for i in range(count))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def letters(weight: tuple[int, ...], groups: int, transposed: bool) -> tuple[str, str, str, str, dict[str, int]]:
    """Letters of input, weight and result of a convolution, those that stay whole, and sizes of the channels."""
    rank = len(weight) - 2
    s, k, t = (places(letter, rank) for letter in "skt")
    first, second = weight[0] // groups, weight[1]
    if transposed:
        sizes = {"g": groups, "c": first, "o": second}
        return f"n (g c) {s}", f"(g c) o {k}", f"n (g o) {t}", f"{s} {k} {t}", sizes
    sizes = {"g": groups, "o": first, "c": second}
    return f"n (g c) {s}", f"(g o) c {k}", f"n (g o) {t}", f"{s} {k} {t}", sizes


def work(transposed: bool, rank: int, factor: int) -> str:
    """Floating-point operations: every result (every input, if transposed) meets every place of the kernel."""
    return f"{factor} n g c o {places('k', rank)} {places('s' if transposed else 't', rank)}"


@computed(aten.convolution.default, "n (g c) s, (g o) c k -> n (g o) t", bind=bind.convolution)
def convolution(node: fx.Node) -> Instance:
    weight, transposed, groups = shape_of(args_of(node)[1]), args_of(node)[6], args_of(node)[8]
    x, w, y, whole, sizes = letters(weight, groups, transposed)
    flops = work(transposed, len(weight) - 2, 2)
    return instantiate(node, f"{x}, {w}, o -> {y}", whole=whole, sizes=sizes, linear="each", flops=flops)


@computed(
    aten.convolution_backward.default,
    "n (g o) t, n (g c) s, (g o) c k -> n (g c) s, (g o) c k",
    bind=bind.convolution_backward,
)
def convolution_backward(node: fx.Node) -> Instance:
    weight, transposed, groups, mask = shape_of(args_of(node)[2]), args_of(node)[7], args_of(node)[9], args_of(node)[10]
    x, w, y, whole, sizes = letters(weight, groups, transposed)
    flops = work(transposed, len(weight) - 2, 2 * sum(mask[:2]))
    return instantiate(node, f"{y}, {x}, {w} -> {x}, {w}, o", whole=whole, sizes=sizes, linear="0", flops=flops)


# --- pooling and resampling: channel by channel ----------------------------------------------------------------------


def by_channel(node: fx.Node, sizes_of: int, tensors: str, linear: str | None) -> Instance:
    """`tensors` names for every operand and result which picture it has: `s` of the input, `t` of the result."""
    rank = len(shape_of(operands(node)[0]))
    rows = " ".join(f"n{i}" for i in range(rank - sizes_of))
    left, right = tensors.split("->")
    text = "->".join(", ".join(f"{rows} {places(x, sizes_of)}" for x in side.split()) for side in (left, right))
    whole = " ".join(places(letter, sizes_of) for letter in "st")
    return instantiate(node, text, whole=whole, linear=linear)


def row(name: str, dims: int, tensors: str, linear: str | None, bind: Any = None) -> None:
    """Register an op on pictures with so many dims."""

    def make(node: fx.Node) -> Instance:
        return by_channel(node, dims, tensors, linear)

    computed(getattr(aten, name).default, tensors, bind=bind)(make)


for dims in (2, 3):
    row(f"avg_pool{dims}d", dims, "s -> t", "0")
    row(f"avg_pool{dims}d_backward", dims, "t s -> s", "0")
    row(f"_adaptive_avg_pool{dims}d", dims, "s -> t", "0")
    row(f"_adaptive_avg_pool{dims}d_backward", dims, "t s -> s", "0")
    row(f"max_pool{dims}d_with_indices", dims, "s -> t t", None)
    row(f"max_pool{dims}d_with_indices_backward", dims, "t s t -> s", "0")
    row(f"adaptive_max_pool{dims}d", dims, "s -> t t", None)
    row(f"adaptive_max_pool{dims}d_backward", dims, "t s t -> s", "0")

for name in ("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"):
    row(name, 2, "s -> t", "0")
    row(f"{name}_backward", 2, "t -> s", "0", bind.upsample_backward)

for dims in (1, 2, 3):
    for kind in ("reflection", "replication"):
        row(f"{kind}_pad{dims}d", dims, "s -> t", "0")
        row(f"{kind}_pad{dims}d_backward", dims, "t s -> s", "0")

rule(aten.grid_sampler_2d.default, "n c h w, n t u p -> n c t u", whole="h w t u p", linear="0")
rule(
    aten.grid_sampler_2d_backward.default,
    "n c t u, n c h w, n t u p -> n c h w, n t u p",
    whole="h w t u p",
    linear="0",
)


def patches(node: fx.Node, picture: fx.Node) -> tuple[str, str, dict[str, Any]]:
    """Letters of pictures, of their patches (a product of channels and places, patch by patch), and keywords."""
    rows = "n " if len(shape_of(picture)) == 4 else ""
    kernel = math.prod(args_of(node)[2 if node.target is aten.col2im.default else 1])
    channels = shape_of(picture)[-3]
    keywords = {"sizes": {"c": channels, "k": kernel}, "whole": "h w k l", "linear": "0"}
    return f"{rows}c h w", f"{rows}(c k) l", keywords


@computed(aten.im2col.default, "n c h w -> n (c k) l")
def im2col(node: fx.Node) -> Instance:
    x, y, keywords = patches(node, operands(node)[0])
    return instantiate(node, f"{x} -> {y}", **keywords)


@computed(aten.col2im.default, "n (c k) l -> n c h w")
def col2im(node: fx.Node) -> Instance:
    x, y, keywords = patches(node, node)
    return instantiate(node, f"{y} -> {x}", **keywords)
