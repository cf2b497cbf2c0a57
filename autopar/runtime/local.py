"""Inputs that a rank read for itself: its own part of the global batch.

In: a tensor.  Out: `Local`, which the module understands wherever a tensor may stand.  Next: `guards.py`.
"""

from __future__ import annotations

from torch import Tensor

from autopar.errors import InputError
from autopar.layout import chunk


class Local:
    """This rank's part of an input: the global tensor is the parts of all ranks, in rank order, along dim 0.

        module(autopar.Local(ids), autopar.Local(labels))

    All parts have the same length, but for the last ones if the global length does not divide (`torch.chunk`'s way).
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            raise InputError("autopar.Local takes a tensor with a batch dim in front")
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"Local({self.tensor!r})"


def joined(name: str, lengths: list[int]) -> int:
    """Length of dim 0 of the global tensor, once the parts are found to be those that `torch.chunk` makes."""
    total = sum(lengths)
    expected = [chunk(total, len(lengths), rank)[1] for rank in range(len(lengths))]
    if lengths != expected:
        wrong = next(r for r, (a, b) in enumerate(zip(lengths, expected, strict=True)) if a != b)
        raise InputError(
            f"{name} is Local, and its parts have {lengths} rows: rank {wrong} has {lengths[wrong]} where a global "
            f"batch of {total} gives it {expected[wrong]}\n"
            "  try: a batch that divides by the number of ranks, or drop the last one"
        )
    return total
