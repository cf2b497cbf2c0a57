"""A residual network for pictures: convolutions, batch norm, a strided step, a pooled head.

In: pictures and their classes.  Out: the mean cross entropy.  Next: `unet.py`.

Shapes in names: b batch, c channels, y and x rows and columns of the picture, k classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut, which is a 1 x 1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x_bcyx: Tensor) -> Tensor:
        h_bcyx = F.relu(self.norm1(self.conv1(x_bcyx)))
        h_bcyx = self.norm2(self.conv2(h_bcyx))
        short_bcyx: Tensor = self.short(x_bcyx)
        return F.relu(h_bcyx + short_bcyx)


class ResNet(nn.Module):
    """A stem with max pooling, blocks of growing width, the mean of each channel, a linear head."""

    def __init__(self, c: int, widths: tuple[int, ...], k: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(c, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.blocks = nn.ModuleList(Block(a, b, stride=1 if i == 0 else 2) for i, (a, b) in enumerate(pairs))
        self.head = nn.Linear(widths[-1], k)

    def forward(self, x_bcyx: Tensor, classes_b: Tensor) -> Tensor:
        h_bcyx = F.max_pool2d(F.relu(self.norm(self.stem(x_bcyx))), 3, stride=2, padding=1)
        for block in self.blocks:
            h_bcyx = block(h_bcyx)
        h_bc = F.adaptive_avg_pool2d(h_bcyx, 1).flatten(1)
        return F.cross_entropy(self.head(h_bc), classes_b)


def build(b: int, c: int, side: int, widths: tuple[int, ...], k: int) -> tuple[ResNet, tuple[Tensor, ...]]:
    """A model and a batch of square pictures."""
    rng = torch.Generator().manual_seed(0)
    model = ResNet(c, widths, k)
    return model, (torch.randn(b, c, side, side, generator=rng), torch.randint(k, (b,), generator=rng))


def tiny() -> tuple[ResNet, tuple[Tensor, ...]]:
    """Odd sizes, all different."""
    return build(b=7, c=3, side=11, widths=(5, 9), k=13)


def divisible() -> tuple[ResNet, tuple[Tensor, ...]]:
    """Batch, channels and classes are multiples of 12."""
    return build(b=12, c=3, side=8, widths=(12, 24), k=36)
