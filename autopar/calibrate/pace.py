"""A fixed piece of work: how fast a machine is at the moment.

In: nothing.  Out: `Pace`, to be called.  Next: `run.py`, which notes its seconds in the cluster file.

Shared machines are faster at one time than at another; a prediction can be compared with a measurement if both know how
long the same work took.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, WIDTH, STEPS = 192, 512, 6


class Pace:
    """Products, a pointwise op and a copy, about as a step of training mixes them; ten milliseconds on one core."""

    def __init__(self, device: torch.device) -> None:
        self.x = torch.full((ROWS, WIDTH), 0.5, device=device)
        self.up = torch.full((WIDTH, 4 * WIDTH), 1.0 / WIDTH, device=device)
        self.down = torch.full((4 * WIDTH, WIDTH), 1.0 / WIDTH, device=device)

    def __call__(self) -> Tensor:
        x = self.x
        for _ in range(STEPS):
            x = torch.nn.functional.gelu(x @ self.up) @ self.down + self.x
        return x
