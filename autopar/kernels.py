"""torch's fused attention kernels behind one pair of functions.

In: query, key, value [b, h, s, e] with equal numbers of heads, a mask, causal or not.
Out: (out, logsumexp) and (dq, dk, dv), or None where no fused kernel takes these.  Next: `attention.py`.
"""

from __future__ import annotations

from torch import Tensor

from autopar import _torch


def fits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> bool:
    """A fused kernel takes these operands."""
    square = not causal or q.shape[2] == k.shape[2]
    return q.device.type == "cpu" and mask is None and square and q.shape[-1] == v.shape[-1]


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor] | None:
    """(out, logsumexp) by a fused kernel, or None."""
    if not fits(q, k, v, mask, causal):
        return None
    return _torch.flash_forward_cpu(dense(q), dense(k), dense(v), causal, scale)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(dq, dk, dv) by a fused kernel, or None."""
    if not fits(q, k, v, mask, causal):
        return None
    return _torch.flash_backward_cpu(
        dense(grad), dense(q), dense(k), dense(v), dense(out), logsumexp.contiguous(), causal, scale
    )


def dense(x: Tensor) -> Tensor:
    """`x` with its last dim contiguous, as the kernels take for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()
