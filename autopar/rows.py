"""Rows: the pairs of a token and one of its experts that a device has, and how they get to other devices.

In: which experts every token chose, the piece of all experts and tokens that a device has.  Out: the device's pairs, in
order; what to send to whom.  Next: `experts.py`, the ops on rows; `passes/lower_rows.py`.

A pair is known by the number of its slot, token * k + i. Every device knows the choices of all tokens, so each tells by
itself how many rows it gets from whom; nothing but the rows is sent. A *piece* is a list of numbers, to be an argument
of ops: (first expert, experts), then for every factor of the tokens (size, start, length); [] is everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def tokens_in(piece: Sequence[int], device: torch.device) -> Tensor:
    """Numbers of the tokens of a piece, ascending: every combination of its factors' runs."""
    found = torch.zeros(1, dtype=torch.int64, device=device)
    for size, start, length in zip(piece[2::3], piece[3::3], piece[4::3], strict=True):
        found = (found[:, None] * size + torch.arange(start, start + length, device=device)).flatten()
    return found


def located(index: Tensor, piece: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The rows of a piece in their order: (slot among the piece's own tokens, expert among the piece's own)."""
    chosen = index[tokens_in(piece, index.device)].flatten() if piece else index.flatten()
    first, count = (piece[0], piece[1]) if piece else (0, None)
    slots = torch.arange(chosen.shape[0], device=index.device)
    if count is not None:
        here = (chosen >= first) & (chosen < first + count)
        slots, chosen = slots[here], chosen[here]
    order = chosen.argsort(stable=True)
    return slots[order], chosen[order] - first


def numbered(index: Tensor, piece: Sequence[int]) -> Tensor:
    """The same rows by the number of their slot among all tokens."""
    slots, _ = located(index, piece)
    if not piece:
        return slots
    k = index.shape[1]
    return tokens_in(piece, index.device)[slots // k] * k + slots % k


def runs(index: Tensor, piece: Sequence[int], experts: int) -> Iterator[slice]:
    """Where the rows of each of a piece's `experts` lie."""
    _, owners = located(index, piece)
    end = 0
    for count in torch.bincount(owners, minlength=experts).tolist():
        start, end = end, end + count
        yield slice(start, end)


def pick(rows: Tensor, index: Tensor, have: list[int], want: list[int]) -> Tensor:
    """Of the rows of piece `have` those of piece `want`, a part of it."""
    return rows[:, positions(numbered(index, have), numbered(index, want), index)]


def positions(have: Tensor, want: Tensor, index: Tensor) -> Tensor:
    """Where the slots `want` stand in `have`."""
    at = torch.empty(index.numel(), dtype=torch.int64, device=index.device)
    at[have] = torch.arange(have.shape[0], device=index.device)
    return at[want]


def common(have: Tensor, want: Tensor, index: Tensor) -> Tensor:
    """The slots of `have` that are in `want`, in the order of `have`."""
    wanted = torch.zeros(index.numel(), dtype=torch.bool, device=index.device)
    wanted[want] = True
    return have[wanted[have]]


def packed(
    rows: Tensor, index: Tensor, me: int, before: list[list[int]], after: list[list[int]]
) -> tuple[Tensor, list[int], list[int]]:
    """What device `me` sends, row by row, so that every device of a group that has piece `before` gets `after`.

    Returns (rows in the order of who gets them, how many each device sends here, how many each gets from here).
    """
    have = [numbered(index, piece) for piece in before]
    want = [numbered(index, piece) for piece in after]
    out = [common(have[me], w, index) for w in want]
    into = [common(h, want[me], index).shape[0] for h in have]
    sent = rows[0, positions(have[me], torch.cat(out), index)]
    return sent, into, [slots.shape[0] for slots in out]


def unpacked(got: Tensor, index: Tensor, me: int, before: list[list[int]], after: list[list[int]]) -> Tensor:
    """The rows that arrived from everyone, in their order."""
    have, want = [numbered(index, piece) for piece in before], numbered(index, after[me])
    came = torch.cat([common(h, want, index) for h in have])
    return got[positions(came, want, index)].unsqueeze(0)


def padded(rows: Tensor, index: Tensor, before: list[list[int]]) -> Tensor:
    """A device's rows, as many as the longest has, to gather over a group whose devices have the pieces `before`."""
    longest = max(numbered(index, piece).shape[0] for piece in before)
    return torch.nn.functional.pad(rows[0], (*(0, 0) * (rows.dim() - 2), 0, longest - rows.shape[1]))


def joined(got: Tensor, index: Tensor, before: list[list[int]], after: list[int]) -> Tensor:
    """The rows of piece `after`, which all of `before` make up, from the gathered ones."""
    have = [numbered(index, piece) for piece in before]
    parts = [part[: slots.shape[0]] for part, slots in zip(got.chunk(len(have)), have, strict=True)]
    return torch.cat(parts)[positions(torch.cat(have), numbered(index, after), index)].unsqueeze(0)
