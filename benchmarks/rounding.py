"""How far plain torch itself is apart from the reference if every parameter starts one rounding away.

In: a target, the record of its reference run.  Out: kind -> largest error, as `autopar verify` counts them.  Used by
`hf_sweep_one.py`: a channel that batch normalisation leaves with no variance, or a mean that is zero but for rounding,
differs between any two ways to add up the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.verify.compare import TOLERANCE, Comparison, Error
from autopar.verify.count import Counts
from autopar.verify.reference import read, reference
from autopar.verify.steps import RATES
from autopar.verify.target import Target

ROUNDING = 2.0**-52
TIMES = 100  # that an error may be larger than what one rounding does


@dataclass(frozen=True)
class Rounded:
    """A target whose parameters start one rounding away."""

    target: Target

    @property
    def seed(self) -> int:
        return self.target.seed

    def build(self, double: bool = False) -> Any:
        built = self.target.build(double=double)
        rng = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in built.model.parameters():
                if parameter.is_floating_point():
                    signs = torch.randint(2, parameter.shape, generator=rng, dtype=torch.float64) * 2 - 1
                    parameter.mul_(1 + ROUNDING * signs)
        return built


def moved(target: Target, file: str, optimizers: Sequence[str], steps: int) -> dict[str, Error]:
    """The largest error of every kind."""
    comparison = Comparison(read(file), RATES)
    for optimizer in optimizers:
        for key, tensor in reference(Rounded(target), optimizer, steps, Counts()).items():  # type: ignore[arg-type]
            comparison.see(key, tensor)
    return comparison.finish()


def explains(own: Mapping[str, Error], errors: Mapping[str, Error]) -> bool:
    """Whether there are errors, and one rounding moves plain torch as far, kind by kind, within a factor."""
    large = {kind: e.value for kind, e in errors.items() if e.value > TOLERANCE}
    return bool(large) and all(value <= TIMES * own[kind].value for kind, value in large.items())
