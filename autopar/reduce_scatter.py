"""A reduce-scatter made of an all-to-all, for process groups on CPU.

In: n pieces, one behind the other.  Out: what all devices' pieces for this one come to.  Next: `passes/lower.py`.

Gloo scatters what it reduced whole: 2 (n - 1) / n of the bytes travel. Here each device is sent its pieces alone, which
is half of that, and adds them up itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, ops

c10d = ops._c10d_functional

TOGETHER: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda terms: terms.sum(0, dtype=terms.dtype),
    "max": lambda terms: terms.amax(0),
    "min": lambda terms: terms.amin(0),
}
"""Kind of a pending value -> what its terms, along dim 0, come to."""


def reduce_scatter(x: Tensor, kind: str, count: int, group: str) -> Tensor:
    """`x` [count * rows, ...], the same on every device of the group but for its terms; a device's [rows, ...]."""
    rows = x.shape[0] // count
    got = c10d.wait_tensor(c10d.all_to_all_single(x, [rows] * count, [rows] * count, group))
    return TOGETHER[kind](got.view(count, rows, *x.shape[1:]))


def _fake(x: Tensor, kind: str, count: int, group: str) -> Tensor:
    return x.new_empty(x.shape[0] // count, *x.shape[1:])


NAME = "autopar::reduce_scatter"
torch.library.define(NAME, "(Tensor x, str kind, int count, str group) -> Tensor")
torch.library.impl(NAME, "CompositeExplicitAutograd", reduce_scatter)
torch.library.register_fake(NAME, _fake)
SUMMED = ops.autopar.reduce_scatter.default
