"""Ops with rules, right and wrong ones, for the tests of `autopar.rule` and `autopar verify-rule`.

In: nothing.  Out: functions that run them on example tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor, ops

import autopar


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.3


@torch.library.custom_op("own::mix", mutates_args=())
def mix(xs: list[Tensor], bias: Tensor | None, scale: float, w: Tensor) -> list[Tensor]:
    return [(x if bias is None else x + bias) @ w * scale for x in xs]


autopar.rule(mix, "b d, b d, d e -> b e", linear="0+1 2", flops="2 b d e")


def mixes() -> None:
    """With and without the optional operand."""
    mix([rand(7, 5), rand(7, 5)], None, 2.0, rand(5, 11))
    mix([rand(7, 5), rand(7, 5)], rand(7, 5), 2.0, rand(5, 11))


autopar.rule(mix, "b d, b d, d e -> b e", linear="0+1 2", flops="2 b d e")  # the same again is no second rule

torch.library.define("own::keyed", "(Tensor x, *, Tensor w, Tensor? bias=None) -> Tensor")
torch.library.impl("own::keyed", "CPU", lambda x, *, w, bias=None: x * w if bias is None else x * w + bias)
torch.library.register_fake("own::keyed", lambda x, *, w, bias=None: torch.empty_like(x))
autopar.rule(ops.own.keyed, "b d, d, d -> b d", linear="0")


def keyed() -> None:
    """Tensors that are given by keyword alone."""
    ops.own.keyed(rand(7, 5), w=rand(5))


@torch.library.custom_op("own::top", mutates_args=())
def top(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.amax(-1), x.sum(0)


autopar.rule(top, "b k -> b, k", kinds={"k:0": "max"})


def tops() -> None:
    """One result is a maximum, the other a sum."""
    top(rand(7, 5) - 0.8)


@torch.library.custom_op("own::rows", mutates_args=())
def rows(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).sum(-1)


autopar.rule(rows, "b (h e) -> b h", whole="h e")
CAN_CUT_ROWS_ONLY = ("", "b")


def products() -> None:
    """A dim that is a product; its letters stay whole."""
    rows(rand(7, 15), 5)


@torch.library.custom_op("own::normal", mutates_args=())
def normal(x: Tensor, w: Tensor) -> Tensor:
    return x.softmax(-1) * w


autopar.rule(normal, "b d, d -> b d", linear="0")


def wrong() -> None:
    """Its rule cuts a dim that the op needs whole, and calls it linear."""
    normal(rand(7, 5), rand(5))


@torch.library.custom_op("own::halves", mutates_args=())
def halves(x: Tensor) -> Tensor:
    return x.reshape(2, 4).flatten() + 1


autopar.rule(halves, "n -> n")


def broken() -> None:
    """The op wants all 8 rows."""
    halves(rand(8))


def short() -> None:
    """Equal sizes, which divide evenly."""
    ops.own.keyed(rand(12, 12).float(), w=rand(12).float())


@torch.library.custom_op("own::plain", mutates_args=())
def plain(x: Tensor) -> Tensor:
    return x + 1


def without() -> None:
    """No rule."""
    plain(rand(3))


def raises() -> None:
    raise KeyError("nothing here")
