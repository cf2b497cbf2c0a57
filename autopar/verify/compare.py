"""How far two runs of the same training are apart.

In: tensors of a reference and of another run, under names `optimizer/step/kind/name`.  Out: the largest error of every
kind and where it is.  Next: `rank.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

KINDS = ("loss", "outputs", "gradients", "parameters", "buffers")
TOLERANCE = 1e-9
GRADIENT_FLOOR = 1e-6


@dataclass(frozen=True)
class Error:
    """The largest error of one kind, and the key of the tensor that has it."""

    value: float = 0.0
    where: str = ""

    def worse(self, other: Error) -> Error:
        return other if other.value > self.value else self


def error(ours: torch.Tensor, reference: torch.Tensor, floor: float) -> float:
    """max|a - b| / max(max|b|, floor); infinite for another shape, or NaN on one side only."""
    if ours.shape != reference.shape:
        return float("inf")
    if not reference.numel():
        return 0.0
    a, b = ours.double(), reference.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if same.all():
        return 0.0
    difference = float((a - b).abs().nan_to_num(nan=float("inf")).masked_fill(same, 0.0).max())
    scale = max(float(b.abs().nan_to_num(posinf=0.0).max()), floor)
    return difference / scale if scale else float("inf")


def floors(reference: Mapping[str, torch.Tensor], rates: Mapping[str, float]) -> dict[str, float]:
    """Smallest scale by key: a millionth of the largest gradient entry of the model at that step; lr x steps so far."""
    largest: dict[str, float] = {}
    for key, tensor in reference.items():
        optimizer, step, kind, _ = key.split("/", 3)
        if kind == "gradients" and tensor.numel():
            place = f"{optimizer}/{step}"
            largest[place] = max(largest.get(place, 0.0), float(tensor.abs().max()))
    out = {}
    for key in reference:
        optimizer, step, kind, _ = key.split("/", 3)
        if kind == "gradients":
            out[key] = GRADIENT_FLOOR * largest.get(f"{optimizer}/{step}", 0.0)
        else:
            out[key] = rates[optimizer] * (int(step) + 1) if kind == "parameters" else 0.0
    return out


def compare(
    ours: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], rates: Mapping[str, float]
) -> dict[str, Error]:
    """The largest error of each kind; a tensor that one side lacks is an infinite error.

    A gradient that one side does not have counts as zero.
    """
    floor = floors(reference, rates)
    worst = dict.fromkeys(KINDS, Error())
    for key in sorted({*ours, *reference}):
        kind = key.split("/", 3)[2]
        a, b = ours.get(key), reference.get(key)
        if a is None or b is None:
            present = a if a is not None else b
            assert present is not None
            absent_is_zero = kind == "gradients" and not present.any()
            value = 0.0 if absent_is_zero else float("inf")
        else:
            value = error(a, b, floor[key])
        worst[kind] = worst[kind].worse(Error(value, key))
    return worst
