"""One device: what it computes, what it holds, how fast its memory is.

In: part of a cluster file.  Out: `Device`, a plain value.  Next: `cluster.py`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from autopar.curve import Curve, Positive

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]


SERIAL = "cpu"  # the type of devices on whose process groups collectives run one at a time: they have one thread
ANY = "any"  # the kind of ops that no curve is known for


class Strict(BaseModel):
    """A value of a file: nothing is converted, nothing unknown is passed over."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Products(Strict):
    """How near a product of matrices [m, k] x [k, n] comes to the peak of a dtype.

    best   fraction that large ones reach
    half   m, n, k at which half of that is left: each size x counts x / (x + half)
    tile   m and n are computed in multiples of these, one tile a processor; the rest of a tile is lost
    processors  how many tiles run at once; the rest of the last round is lost
    """

    best: Fraction = 1.0
    half: Annotated[tuple[NotNegative, NotNegative, NotNegative], Field(strict=False)] = (0.0, 0.0, 0.0)
    tile: Annotated[tuple[Count, Count], Field(strict=False)] = (1, 1)
    processors: Count = 1

    def fraction(self, b: int, m: int, n: int, k: int) -> float:
        """Of the peak, for `b` products at once."""
        reached = self.best
        for size, half in zip((m, n, k), self.half, strict=True):
            reached *= size / (size + half)
        tiles = [-(-size // tile) for size, tile in zip((m, n), self.tile, strict=True)]
        covered = m * n / (tiles[0] * self.tile[0] * tiles[1] * self.tile[1])
        at_once = b * tiles[0] * tiles[1]
        return reached * covered * at_once / (-(-at_once // self.processors) * self.processors)


class Device(Strict):
    """One device.

    type                 of the torch device: "cpu", "cuda", ...
    memory_bytes         what one process may use; `reserve_bytes` of it stay with the runtime and the allocator
    flops_per_s          peak per dtype ("float32", "bfloat16", ...)
    memory_bytes_per_s   bandwidth of its memory; ops come to `memory_fraction` of it
    launch_s, view_s     what every operation costs beside its work, and every view of a tensor
    products             per dtype, how near products of matrices come to the peak
    fractions            of the peak that other kinds of ops come to ("attention")
    kernels              per kind of ops ("gelu", "any" for all others) and dtype, seconds over bytes, or over the flops
                         of one piece of an attention or a convolution; of products `products` tells
    step_s, parameter_s  what a step costs beside its operations, and every trained parameter in it
    agree_s              what a step costs more where several devices have to make the same call
    overlap              times longer that ops take while a collective runs beside them
    pace_s               of a fixed piece of work while the device was measured: `autopar/calibrate/pace.py`
    at_once              devices of a host that work at full speed at once; more share them, as processes do cores
    alone                seconds of an op while no other device works, as a part of those while all do
    """

    type: str
    memory_bytes: Positive
    flops_per_s: Annotated[dict[str, Positive], Field(min_length=1)]
    memory_bytes_per_s: Positive
    memory_fraction: Fraction = 1.0
    launch_s: NotNegative = 0.0
    view_s: NotNegative = 0.0
    reserve_bytes: NotNegative = 0.0
    products: dict[str, Products] = {}
    fractions: dict[str, Fraction] = {}
    kernels: dict[str, dict[str, Curve]] = {}
    step_s: NotNegative = 0.0
    parameter_s: NotNegative = 0.0
    agree_s: NotNegative = 0.0
    overlap: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    pace_s: NotNegative = 0.0
    at_once: Count | None = None
    alone: Fraction = 1.0

    def peak(self, dtype: str) -> float:
        """Peak of a dtype in flop/s; of one that is not listed, that of float32, or else the slowest."""
        known = self.flops_per_s
        if dtype in known:
            return known[dtype]
        return known["float32"] / 2 if dtype == "float64" and "float32" in known else min(known.values())

    def crowding(self, devices: int) -> float:
        """How many times longer an op takes while so many devices of a host work."""
        if devices == 1:
            return self.alone
        return max(1.0, devices / self.at_once) if self.at_once else 1.0
