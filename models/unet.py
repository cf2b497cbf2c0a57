"""A U-Net: down by strided and depthwise convolutions, up by a transposed one, skips joined by channels.

In: pictures and a class for every place.  Out: the mean cross entropy.  Next: `vit.py`.

Shapes in names: b batch, c channels, y and x rows and columns of the picture, k classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Conv(nn.Module):
    """A 3 x 3 convolution, group norm and SiLU."""

    def __init__(self, before: int, after: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1)
        self.norm = nn.GroupNorm(groups, after)

    def forward(self, x_bcyx: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x_bcyx)))


class UNet(nn.Module):
    """Two levels with a skip each."""

    def __init__(self, c: int, width: int, groups: int, k: int) -> None:
        super().__init__()
        self.enter = Conv(c, width, groups)
        self.down = nn.Conv2d(width, width, 3, stride=2, padding=1, groups=width)
        self.inner = Conv(width, 2 * width, groups)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = Conv(2 * width, width, groups)
        self.head = nn.Conv2d(width, k, 1)

    def forward(self, x_bcyx: Tensor, classes_byx: Tensor) -> Tensor:
        skip_bcyx = self.enter(x_bcyx)
        h_bcyx = self.inner(self.down(skip_bcyx))
        smooth_bcyx = F.interpolate(F.avg_pool2d(h_bcyx, 2), scale_factor=2.0, mode="bilinear")
        h_bcyx = self.up(h_bcyx + smooth_bcyx)
        h_bcyx = self.leave(torch.cat([h_bcyx, skip_bcyx], dim=1))
        return F.cross_entropy(self.head(h_bcyx), classes_byx)


def build(b: int, c: int, side: int, width: int, groups: int, k: int) -> tuple[UNet, tuple[Tensor, ...]]:
    """A model and a batch of square pictures with a class for every place."""
    rng = torch.Generator().manual_seed(0)
    model = UNet(c, width, groups, k)
    return model, (torch.randn(b, c, side, side, generator=rng), torch.randint(k, (b, side, side), generator=rng))


def tiny() -> tuple[UNet, tuple[Tensor, ...]]:
    """Odd numbers of pictures, channels and classes."""
    return build(b=5, c=2, side=8, width=9, groups=3, k=7)


def divisible() -> tuple[UNet, tuple[Tensor, ...]]:
    """Batch, channels and classes are multiples of 12."""
    return build(b=12, c=3, side=4, width=12, groups=12, k=12)
