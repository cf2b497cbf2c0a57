"""What was measured at some sizes, read between them.

In: points (size, seconds) of a cluster file.  Out: `Curve`.  Next: `device.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise
from typing import Annotated

from pydantic import Field, RootModel, model_validator
from pydantic_core import PydanticCustomError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Point = Annotated[tuple[Positive, Positive], Field(strict=False)]


def wrong(at: str, text: str) -> PydanticCustomError:
    """An error at a place below the one that a check was written for."""
    return PydanticCustomError("place", "{text}", {"text": text, "at": at})


class Curve(RootModel[Annotated[tuple[Point, ...], Field(min_length=1, strict=False)]], frozen=True):
    """Seconds over size: a straight line between points on logarithmic scales.

    Below the first point it takes as long as there; beyond the last, time grows with the size.
    """

    @model_validator(mode="after")
    def _ascends(self) -> Curve:
        for i, ((before, _), (size, _)) in enumerate(pairwise(self.root), 1):
            if size <= before:
                raise wrong(str(i), f"sizes must ascend, but {size} follow {before}")
        return self

    def at(self, size: float) -> float:
        """Seconds at a size."""
        points = self.root
        after = bisect_right(points, size, key=lambda point: point[0])
        if after == 0:
            return points[0][1]
        (x, s) = points[after - 1]
        if after == len(points):
            return s * size / x
        (y, t) = points[after]
        return s * math.exp(math.log(t / s) * math.log(size / x) / math.log(y / x))
