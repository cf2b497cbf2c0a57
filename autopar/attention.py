"""Attention as one op with one backward op, on any device.

In: query [b, h, q, e], key [b, g, k, e], value [b, g, k, f] with h a multiple of g (grouped queries), a mask or None.
Out: `autopar::attention` -> (out [b, h, q, f], logsumexp [b, h, q]) and `autopar::attention_backward` -> (dq, dk, dv).
Next: `random.py` for its dropout, `capture.py` for where it replaces `F.scaled_dot_product_attention`.

A plan must not depend on which kernel a device picks, so the graph holds this op and the kernel is chosen when it
runs: torch's fused one where nothing is dropped and the first query is row 0, else the same written out.

`sizes`, `local`, `start` tell which piece of the [b, h, q, k] probabilities this is, for dropout (see `random.py`);
`q_start` is the row of the whole sequence that the first local query sits at, for a causal mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from autopar import kernels, random

SCHEMA = (
    "Tensor? mask, bool causal, float scale, float dropout_p, int op, Tensor? rng, "
    "int[] sizes, int[] local, int[] start, int q_start"
)

torch.library.define("autopar::attention", f"(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor, Tensor)")
torch.library.define(
    "autopar::attention_backward",
    f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
)

# position of the mask among the arguments; `causal` comes next
MASK_AT = {torch.ops.autopar.attention.default: 3, torch.ops.autopar.attention_backward.default: 6}


def _grouped(t: Tensor, heads: int) -> Tensor:
    """Keys or values of every query head: [b, g, k, e] -> [b, h, k, e]."""
    b, g, k, e = t.shape
    return t if g == heads else t.unsqueeze(2).expand(b, g, heads // g, k, e).reshape(b, heads, k, e)


def _ungrouped(t: Tensor, groups: int) -> Tensor:
    """The sum over the query heads that share a key head: [b, h, k, e] -> [b, g, k, e]."""
    b, h, k, e = t.shape
    return t if h == groups else t.view(b, groups, h // groups, k, e).sum(2)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, q_start: int) -> Tensor:
    """Masked scores [b, h, q, k], in float32 at least."""
    scores = (q * scale) @ k.transpose(-2, -1)
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        rows = torch.arange(q_start, q_start + q.shape[2], device=q.device)
        columns = torch.arange(k.shape[2], device=q.device)
        scores = scores.masked_fill(columns > rows[:, None], -math.inf)
    return scores


def _probabilities(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """Softmax from its logsumexp; a row where everything is masked is all zero."""
    safe = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
    return (scores - safe.unsqueeze(-1)).exp()


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    op: int,
    rng: Tensor | None,
    sizes: list[int],
    local: list[int],
    start: list[int],
    q_start: int,
) -> tuple[Tensor, Tensor]:
    b, h, s, _ = q.shape
    k, v = _grouped(k, h), _grouped(v, h)
    if 0 in (q.numel(), k.numel()):
        wide = q.dtype if q.dtype == torch.float64 else torch.float32
        return q.new_zeros(b, h, s, v.shape[-1]), torch.full((b, h, s), -math.inf, dtype=wide, device=q.device)
    if dropout_p == 0 and (q_start == 0 or not causal):
        fused = kernels.forward(q, k, v, mask, causal, scale)
        if fused is not None:
            return fused
    scores = _scores(q, k, mask, causal, scale, q_start)
    logsumexp = scores.logsumexp(-1)
    p = _probabilities(scores, logsumexp)
    if dropout_p > 0:
        assert rng is not None
        p = torch.ops.autopar.dropout(p, dropout_p, op, rng, sizes, local, start)
    return p.to(v.dtype) @ v, logsumexp


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    op: int,
    rng: Tensor | None,
    sizes: list[int],
    local: list[int],
    start: list[int],
    q_start: int,
) -> tuple[Tensor, Tensor, Tensor]:
    h, g = q.shape[1], k.shape[1]
    if 0 in (q.numel(), k.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    k, v = _grouped(k, h), _grouped(v, h)
    if dropout_p == 0 and (q_start == 0 or not causal):
        fused = kernels.backward(grad, q, k, v, out, logsumexp, mask, causal, scale)
        if fused is not None:
            dq, dk, dv = fused
            return dq, _ungrouped(dk, g), _ungrouped(dv, g)
    p = _probabilities(_scores(q, k, mask, causal, scale, q_start), logsumexp)
    dropped, wide = p, p.dtype
    dp = grad.to(wide) @ v.to(wide).transpose(-2, -1)
    if dropout_p > 0:
        assert rng is not None
        dropped = torch.ops.autopar.dropout(p, dropout_p, op, rng, sizes, local, start)
        dp = torch.ops.autopar.dropout(dp, dropout_p, op, rng, sizes, local, start)
    dv = dropped.transpose(-2, -1) @ grad.to(wide)
    delta = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    dq = (ds @ k.to(wide)) * scale
    dk = (ds.transpose(-2, -1) @ q.to(wide)) * scale
    return dq.to(q.dtype), _ungrouped(dk, g).to(k.dtype), _ungrouped(dv, g).to(v.dtype)


torch.library.impl("autopar::attention", "CompositeExplicitAutograd", _forward)
torch.library.impl("autopar::attention_backward", "CompositeExplicitAutograd", _backward)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=wide)


def _fake_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


torch.library.register_fake("autopar::attention", _fake_forward)
torch.library.register_fake("autopar::attention_backward", _fake_backward)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, ctx.causal, ctx.scale, ctx.dropout_p, ctx.op, rng, *ctx.piece = inputs
    ctx.save_for_backward(q, k, v, *output, mask, rng)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, logsumexp, mask, rng = ctx.saved_tensors
    rest = (mask, ctx.causal, ctx.scale, ctx.dropout_p, ctx.op, rng, *ctx.piece)
    return (*torch.ops.autopar.attention_backward(grad, q, k, v, out, logsumexp, *rest), *(None,) * 10)


torch.library.register_autograd("autopar::attention", _gradients, setup_context=_setup)


def attention(
    mode: random.Draws,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` as one op.

    A mask that needs a gradient (a learned bias) keeps the attention written out in plain ops.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if attn_mask is not None and attn_mask.requires_grad:
        dropped = (lambda p: mode.draw(p, dropout_p)) if dropout_p > 0 else (lambda p: p)
        return random.plain_attention(query, key, value, attn_mask, is_causal, scale, dropped)
    q, k, v = (_four_dims(t) for t in (query, key, value))
    q, k, v = _same_batch(q, k, v)
    mask = None if attn_mask is None else _mask(attn_mask, query.dim())
    sizes = [*q.shape[:3], k.shape[2]]
    rng, op = (mode.rng, mode.number()) if dropout_p > 0 else (None, 0)
    out: Tensor = torch.ops.autopar.attention(
        q, k, v, mask, is_causal, scale, dropout_p, op, rng, sizes, sizes, [0, 0, 0, 0], 0
    )[0]
    return out if query.dim() == 4 else out.reshape(*query.shape[:-1], value.shape[-1])


def _four_dims(t: Tensor) -> Tensor:
    """[.., q, e] with any number of dims in front as [b, h, q, e]."""
    if t.dim() == 4:
        return t
    if t.dim() < 4:
        return t.reshape(*(1,) * (4 - t.dim()), *t.shape) if t.dim() == 2 else t.unsqueeze(1)
    return t.flatten(0, t.dim() - 4)


def _same_batch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Batch dims of size 1 are spread."""
    b = max(t.shape[0] for t in (q, k, v))
    return tuple(t if t.shape[0] == b else t.expand(b, -1, -1, -1) for t in (q, k, v))  # type: ignore[return-value]


def _mask(mask: Tensor, dims: int) -> Tensor:
    """A mask as [b or 1, h or 1, q, k]."""
    if dims == 3:
        return mask.reshape(1, 1, *mask.shape) if mask.dim() == 2 else mask.unsqueeze(1)
    return mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape) if mask.dim() < 4 else mask.flatten(0, mask.dim() - 4)
