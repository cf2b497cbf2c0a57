"""How far two runs of the same training are apart.

In: tensors of a reference, and those of another run as they come, under names `optimizer/step/kind/name`.  Out: the
largest error of every kind and where it is.  Next: `rank.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

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


def error(ours: torch.Tensor, reference: torch.Tensor, floor: float, scale: float | None = None) -> float:
    """max|a - b| / max(max|b|, floor); infinite for another shape, or NaN on one side only.

    `scale` stands for max|b| where `reference` is a piece of b.
    """
    if ours.shape != reference.shape:
        return float("inf")
    if not reference.numel() or torch.equal(ours, reference):
        return 0.0
    a, b = ours.double(), reference.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if same.all():
        return 0.0
    difference = float((a - b).abs().nan_to_num(nan=float("inf")).masked_fill(same, 0.0).max())
    scale = max(largest(b) if scale is None else scale, floor)
    return difference / scale if scale else float("inf")


def largest(tensor: torch.Tensor) -> float:
    """max|x| over the finite entries."""
    return float(tensor.double().abs().nan_to_num(posinf=0.0).max()) if tensor.numel() else 0.0


def floors(reference: Mapping[str, torch.Tensor], rates: Mapping[str, float]) -> dict[str, float]:
    """Smallest scale by key: a millionth of the largest gradient entry of the model at that step; lr x steps so far."""
    gradients: dict[str, float] = {}
    for key, tensor in reference.items():
        optimizer, step, kind, _ = key.split("/", 3)
        if kind == "gradients" and tensor.numel():
            place = f"{optimizer}/{step}"
            gradients[place] = max(gradients.get(place, 0.0), float(tensor.abs().max()))
    out = {}
    for key in reference:
        optimizer, step, kind, _ = key.split("/", 3)
        if kind == "gradients":
            out[key] = GRADIENT_FLOOR * gradients.get(f"{optimizer}/{step}", 0.0)
        else:
            out[key] = rates[optimizer] * (int(step) + 1) if kind == "parameters" else 0.0
    return out


@dataclass
class Comparison:
    """A run against a reference, tensor by tensor.

    Of a DTensor this rank compares the piece that its placements say it has; with `whole`, what `full_tensor` makes of
    all pieces, for which every rank must come here.
    """

    reference: Mapping[str, torch.Tensor]
    rates: Mapping[str, float]
    worst: dict[str, Error] = field(default_factory=lambda: dict.fromkeys(KINDS, Error()))
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.floor = floors(self.reference, self.rates)

    def see(self, key: str, tensor: torch.Tensor, whole: bool = False) -> None:
        """Compare one tensor, as it is now."""
        self.seen.add(key)
        wanted, tensor = self.reference.get(key), tensor.detach()
        if isinstance(tensor, DTensor):
            if whole or wanted is None or wanted.shape != tensor.shape:
                tensor = tensor.full_tensor()
            else:
                scale = largest(wanted)
                wanted = piece_like(wanted, tensor)
                return self.note(key, error(tensor.to_local().cpu(), wanted, self.floor[key], scale))
        if wanted is None:
            return self.note(key, one_sided(key, tensor))
        return self.note(key, error(tensor.cpu(), wanted, self.floor[key]))

    def finish(self) -> dict[str, Error]:
        """The largest error of each kind; a tensor that one side lacks is an infinite one."""
        for key in sorted(self.reference.keys() - self.seen):
            self.note(key, one_sided(key, self.reference[key]))
        return self.worst

    def note(self, key: str, value: float) -> None:
        kind = key.split("/", 3)[2]
        self.worst[kind] = self.worst[kind].worse(Error(value, key))


def piece_like(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """The piece of a whole tensor that this rank has of a DTensor with the placements of `like`; nothing moves."""
    placed = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return placed.to_local().cpu()


def one_sided(key: str, tensor: torch.Tensor) -> float:
    """The error of a tensor that the other side lacks; a gradient that is not there counts as zero."""
    return 0.0 if key.split("/", 3)[2] == "gradients" and not tensor.any() else float("inf")
