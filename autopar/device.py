"""One device: what it computes, what it holds, how fast its memory is.

In: part of a cluster file.  Out: `Device`, a plain value.  Next: `cluster.py`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    """A value of a file: nothing is converted, nothing unknown is passed over."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Device(Strict):
    """One device.

    type                 of the torch device: "cpu", "cuda", ...
    memory_bytes         what one process may use; `reserve_bytes` of it stay with the runtime and the allocator
    flops_per_s          peak per dtype ("float32", "bfloat16", ...)
    memory_bytes_per_s   bandwidth of its memory
    launch_s             what every operation costs beside its work
    """

    type: str
    memory_bytes: Positive
    flops_per_s: Annotated[dict[str, Positive], Field(min_length=1)]
    memory_bytes_per_s: Positive
    launch_s: NotNegative = 0.0
    reserve_bytes: NotNegative = 0.0

    def peak(self, dtype: str) -> float:
        """Peak of a dtype in flop/s; of one that is not listed, that of float32, or else the slowest."""
        known = self.flops_per_s
        if dtype in known:
            return known[dtype]
        return known["float32"] / 2 if dtype == "float64" and "float32" in known else min(known.values())
