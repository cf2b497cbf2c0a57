"""Random numbers that depend on (seed, step, op number, global element index) and on nothing else.

In: an int64[2] tensor (seed, step) and the number of the random op, counted in the order of calls.
Out: the ops `autopar::dropout` and `autopar::uniform`.  Next: `random.py`, which puts them in place of torch's.

A cut, a replica, a recomputation and a single device all draw the same numbers, because an element's number is a hash
of its place in the *whole* tensor. A piece is told by three lists over the factors of all dims, major first: `sizes`
(the whole tensor's), `local` (this piece's), `start` (its offsets).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
FIRST, SECOND = 0x7FEB352D, 0x846CA68B  # multipliers of a 32-bit multiply-xorshift hash with low bias
GOLDEN = 0x9E3779B9
BLOCK = 1 << 16  # words hashed at a time, so that they stay in a CPU's cache


def _signed(word: int) -> int:
    """The int32 with the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word


def _mix64(x: Any) -> Any:
    """The hash on one 32-bit word, a number or held in int64 (the keys)."""
    x = x ^ (x >> 16)
    x = (x * FIRST) & MASK32
    x = x ^ (x >> 15)
    x = (x * SECOND) & MASK32
    return x ^ (x >> 16)


def _mix32_(x: Tensor, spare: Tensor) -> None:
    """The hash, in place, on int32 words."""
    for shift, multiplier in ((16, FIRST), (15, SECOND), (16, 0)):
        torch.bitwise_right_shift(x, shift, out=spare)
        x.bitwise_xor_(spare.bitwise_and_((1 << (32 - shift)) - 1))
        if multiplier:
            x.mul_(_signed(multiplier))


def _to_int32(x: Any) -> Any:
    """The low 32 bits, as int32."""
    return _signed(x) if isinstance(x, int) else torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)


def keys(rng: Tensor, op: int) -> tuple[Any, Any]:
    """Two 32-bit keys of one op in one step, int32: numbers where `rng` is at hand, else scalars on its device."""
    seed, step = rng.tolist() if rng.device.type == "cpu" else rng
    k = _mix64((seed & MASK32) ^ GOLDEN)
    k = _mix64(k ^ ((seed >> 32) & MASK32))
    k = _mix64((k + (step & MASK32) * 0x85EBCA6B) & MASK32)
    k = _mix64(k ^ ((step >> 32) & MASK32))
    first = _mix64((k + (op & MASK32) * 0xC2B2AE35 + 1) & MASK32)
    second = _mix64(((first ^ k) + GOLDEN) & MASK32)
    return _to_int32(first), _to_int32(second)


def global_index(sizes: Sequence[int], local: Sequence[int], start: Sequence[int], device: torch.device) -> Tensor:
    """Row-major index in the whole tensor of every element of a piece, flat; int32 where it fits, else int64."""
    merged: list[list[int]] = []
    for size, length, offset in zip(sizes, local, start, strict=True):
        if merged and length == size and offset == 0:
            merged[-1] = [merged[-1][0] * size, merged[-1][1] * size, merged[-1][2] * size]
        else:
            merged.append([size, length, offset])
    dtype = torch.int32 if math.prod(sizes) < 1 << 31 else torch.int64
    index = torch.zeros((), dtype=dtype, device=device)
    for size, length, offset in merged:
        index = index.unsqueeze(-1) * size + torch.arange(offset, offset + length, dtype=dtype, device=device)
    return index.reshape(-1)


def bits(rng: Tensor, op: int, sizes: Sequence[int], local: Sequence[int], start: Sequence[int]) -> Tensor:
    """32 uniform bits for every element of a piece, flat, as int32: hash(hash(index ^ first) + second)."""
    first, second = keys(rng, op)
    index = global_index(sizes, local, start, rng.device)
    if index.dtype == torch.int64:
        index, high = _to_int32(index & MASK32), _to_int32(index >> 32)
        _mix32_(high, torch.empty_like(high))
        second = high.bitwise_xor_(second)
    words = index.bitwise_xor_(first)
    block = BLOCK if words.device.type == "cpu" else max(1, words.numel())
    spare = words.new_empty(min(block, words.numel()))
    for at in range(0, words.numel(), block):
        x = words[at : at + block]
        _mix32_(x, spare[: x.numel()])
        x.add_(second[at : at + block] if isinstance(second, Tensor) and second.dim() else second)
        _mix32_(x, spare[: x.numel()])
    return words


def keep(rng: Tensor, p: float, op: int, sizes: Sequence[int], local: Sequence[int], start: Sequence[int]) -> Tensor:
    """True with probability 1 - p for every element of a piece, flat."""
    threshold = min(round((1.0 - p) * 2**32), MASK32) - (1 << 31)
    return bits(rng, op, sizes, local, start) < threshold if p < 1 else torch.zeros(math.prod(local), dtype=torch.bool)


def _dropout(x: Tensor, p: float, op: int, rng: Tensor, sizes: list[int], local: list[int], start: list[int]) -> Tensor:
    if p >= 1:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    kept = keep(rng, p, op, sizes, local, start).view(x.shape)
    return (x * kept).mul_(1.0 / (1.0 - p))


def _uniform(
    op: int, rng: Tensor, shape: list[int], sizes: list[int], local: list[int], start: list[int], dtype: torch.dtype
) -> Tensor:
    words = bits(rng, op, sizes, local, start)
    return ((words >> 8) & 0xFFFFFF).to(dtype).mul_(2.0**-24).view(shape)


torch.library.define(
    "autopar::dropout", "(Tensor x, float p, int op, Tensor rng, int[] sizes, int[] local, int[] start) -> Tensor"
)
torch.library.define(
    "autopar::uniform",
    "(int op, Tensor rng, int[] shape, int[] sizes, int[] local, int[] start, ScalarType dtype) -> Tensor",
)
torch.library.impl("autopar::dropout", "CompositeExplicitAutograd", _dropout)
torch.library.impl("autopar::uniform", "CompositeExplicitAutograd", _uniform)


def _fake_dropout(
    x: Tensor, p: float, op: int, rng: Tensor, sizes: list[int], local: list[int], start: list[int]
) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fake_uniform(
    op: int, rng: Tensor, shape: list[int], sizes: list[int], local: list[int], start: list[int], dtype: torch.dtype
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=rng.device)


def _dropout_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.p, ctx.op, rng, *ctx.piece = inputs
    ctx.save_for_backward(rng)


def _dropout_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (rng,) = ctx.saved_tensors
    return (torch.ops.autopar.dropout(grad, ctx.p, ctx.op, rng, *ctx.piece), *(None,) * 6)


torch.library.register_fake("autopar::dropout", _fake_dropout)
torch.library.register_fake("autopar::uniform", _fake_uniform)
torch.library.register_autograd("autopar::dropout", _dropout_backward, setup_context=_dropout_setup)


def dropout(x: Tensor, p: float, op: int, rng: Tensor) -> Tensor:
    """Dropout of a whole tensor."""
    shape = list(x.shape)
    out: Tensor = torch.ops.autopar.dropout(x, p, op, rng, shape, shape, [0] * len(shape))
    return out


def uniform(shape: Sequence[int], dtype: torch.dtype, op: int, rng: Tensor) -> Tensor:
    """A whole tensor of uniform numbers in [0, 1), multiples of 2^-24."""
    sizes = list(shape)
    out: Tensor = torch.ops.autopar.uniform(op, rng, sizes, sizes, sizes, [0] * len(sizes), dtype)
    return out
