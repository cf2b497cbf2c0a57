"""The attention op against attention written out, forward and backward, whole and in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.attention import attention
from autopar.random import Draws, plain_attention

F64 = torch.float64


def operands(b: int = 3, h: int = 6, g: int = 2, q: int = 5, k: int = 5, e: int = 4, f: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(b, q, h, e), (b, k, g, e), (b, k, g, f)]
    return [torch.randn(s, dtype=F64).transpose(1, 2).requires_grad_() for s in shapes]  # not contiguous


def gradients(out: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    return list(torch.autograd.grad((out * weight).sum(), leaves))


def mode() -> Draws:
    return Draws(torch.tensor([3, 4]))


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "longer keys": {"sizes": {"k": 7}},
    "longer keys causal": {"sizes": {"k": 7}, "is_causal": True},
    "wider values": {"sizes": {"f": 3}},
    "no groups": {"sizes": {"g": 6}},
    "bool mask": {"mask": "bool"},
    "float mask": {"mask": "float"},
    "dropout": {"dropout_p": 0.3},
    "causal dropout": {"dropout_p": 0.3, "is_causal": True},
    "masked dropout": {"dropout_p": 0.3, "mask": "bool"},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_attention_written_out(name: str) -> None:
    case = dict(CASES[name])
    q, k, v = operands(**case.pop("sizes", {}))
    kind, mask = case.pop("mask", None), None
    if kind is not None:
        mask = torch.rand(3, 1, q.shape[2], k.shape[2]) > 0.3
        mask[..., 0] = True
        mask = mask if kind == "bool" else torch.randn(mask.shape, dtype=F64)
    causal, scale, p = case.get("is_causal", False), case.get("scale"), case.get("dropout_p", 0.0)
    out = attention(mode(), q, k, v, mask, p, causal, scale, enable_gqa=True)
    drawing = mode()
    want = plain_attention(q, k, v, mask, causal, scale, lambda x: drawing.draw(x, p) if p else x)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradients(out, (q, k, v)), gradients(want, (q, k, v)), rtol=1e-11, atol=1e-13)


def test_the_fused_kernel_is_exact_in_float64() -> None:
    q, k, v = operands(b=2, h=4, g=4, q=130, k=130, e=16, f=16)
    out = attention(mode(), q, k, v, is_causal=True)
    want = plain_attention(q, k, v, None, True, None, lambda x: x)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradients(out, (q, k, v)), gradients(want, (q, k, v)), rtol=1e-10, atol=1e-12)


def whole(p: float, causal: bool) -> tuple[list[Tensor], list[object]]:
    tensors = [t.detach() for t in operands()]
    sizes = [3, 6, 5, 5]
    return tensors, [None, causal, 0.5, p, 7, torch.tensor([1, 2]), sizes, sizes, [0] * 4, 0]


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("cut", "local", "start"),
    [
        ("batch", [2, 6, 5, 5], [1, 0, 0, 0]),
        ("heads", [3, 3, 5, 5], [0, 3, 0, 0]),
        ("rows", [3, 6, 3, 5], [0, 0, 2, 0]),
        ("first rows", [3, 6, 2, 5], [0, 0, 0, 0]),
    ],
)
def test_a_piece_equals_its_part_of_the_whole(
    p: float, causal: bool, cut: str, local: list[int], start: list[int]
) -> None:
    (q, k, v), rest = whole(p, causal)
    ops = torch.ops.autopar
    out, logsumexp = ops.attention(q, k, v, *rest)
    grad = torch.linspace(-1, 1, out.numel(), dtype=F64).view(out.shape)
    dq, dk, dv = ops.attention_backward(grad, q, k, v, out, logsumexp, *rest)

    def rows(t: Tensor) -> Tensor:
        return t[tuple(slice(a, a + n) for a, n in zip(start[:3], local[:3], strict=True))]

    def keys(t: Tensor) -> Tensor:
        return t[start[0] : start[0] + local[0], start[1] // 3 : (start[1] + local[1]) // 3]

    part = [*rest[:7], local, start, start[2]]
    piece, lse = ops.attention(rows(q), keys(k), keys(v), *part)
    torch.testing.assert_close(piece, rows(out), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(lse, rows(logsumexp), rtol=1e-12, atol=1e-14)
    pq, pk, pv = ops.attention_backward(rows(grad), rows(q), keys(k), keys(v), piece, lse, *part)
    torch.testing.assert_close(pq, rows(dq), rtol=1e-11, atol=1e-13)
    if "rows" not in cut:  # with cut rows every piece holds one term of the sum
        torch.testing.assert_close((pk, pv), (keys(dk), keys(dv)), rtol=1e-11, atol=1e-13)


def test_empty_pieces_are_empty() -> None:
    (q, k, v), rest = whole(0.3, True)
    for batch, heads in ((0, 6), (3, 0)):
        a, b, c = q[:batch, :heads], k[:batch, : heads // 3], v[:batch, : heads // 3]
        part = [*rest[:7], [batch, heads, 5, 5], [0, 0, 0, 0], 0]
        out, lse = torch.ops.autopar.attention(a, b, c, *part)
        assert out.shape == a.shape and lse.shape == a.shape[:3]
        grads = torch.ops.autopar.attention_backward(out, a, b, c, out, lse, *part)
        assert [g.shape for g in grads] == [a.shape, b.shape, c.shape]


def test_a_row_that_may_see_nothing_is_zero() -> None:
    q, k, v = operands()
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    out = attention(mode(), q, k, v, mask)
    assert not out[:, :, 2].any() and all(torch.isfinite(g).all() for g in gradients(out, (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_low_precision_is_near(dtype: torch.dtype, p: float) -> None:
    wide = [t.detach() for t in operands()]
    out = attention(mode(), *(t.to(dtype) for t in wide), None, p, True)
    want = attention(mode(), *wide, None, p, True)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)


def test_three_dims_and_two_masks() -> None:
    q, k, v = (t.detach()[:, 0] for t in operands(g=6))
    mask = torch.rand(3, 5, 5) > 0.2
    mask[..., 0] = True
    for m in (None, mask, mask[0]):
        want = F.scaled_dot_product_attention(q, k, v, m)
        torch.testing.assert_close(attention(mode(), q, k, v, m), want, rtol=1e-12, atol=1e-14)
