"""A 64-bit number for the bits of a tensor, quick to compute on any device.

In: a tensor.  Out: an integer that changes when the bits do.  Next: `copies.py`, `guards.py`.

Every 64-bit word is mixed, multiplied by an odd number of its own and added up modulo 2^64. One changed word always
changes the sum; that several changes cancel is as likely as for any hash of 64 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORDS = 1 << 18  # words a round, so that temporaries stay small
MIX = 0x1E3779B97F4A7C15
STEP = 0x2545F4914F6CDD1D


def checksum(tensor: Tensor) -> int:
    """The number of one tensor's bits; shape and dtype are not part of it."""
    with torch.no_grad():
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        whole = flat.numel() // 8 * 8
        total = _words(flat[:whole]) if whole else torch.zeros((), dtype=torch.int64, device=flat.device)
        if whole < flat.numel():
            tail = torch.zeros(8, dtype=torch.uint8, device=flat.device)
            tail[: flat.numel() - whole] = flat[whole:]
            total = total * 31 + _words(tail)
        return int(total)


def _words(data: Tensor) -> Tensor:
    if data.storage_offset() % 8:
        data = data.clone()
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for index, words in enumerate(torch.split(data.view(torch.int64), WORDS)):
        weight = torch.arange(index * WORDS, index * WORDS + len(words), dtype=torch.int64, device=data.device)
        weight = weight.mul_(2 * STEP).add_(STEP | 1)
        mixed = words * MIX
        mixed ^= mixed >> 31
        total = total + mixed.mul_(weight).sum()
    return total


def combined(numbers: list[int]) -> int:
    """One number for several, in order."""
    total = 0
    for number in numbers:
        total = (total * 1_000_003 + number) & (2**64 - 1)
    return total - 2**64 if total >= 2**63 else total
