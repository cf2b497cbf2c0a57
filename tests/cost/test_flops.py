"""Floating-point operations of captured steps, against what torch counts while the untouched model runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, ops
from torch.nn import functional as F
from torch.utils import checkpoint, flop_counter
from torch.utils.flop_counter import FlopCounterMode

from autopar.capture import capture
from autopar.cost.flops import flops
from autopar.models import awkward, encoder, gpt, llama, mlp, moe, resnet, t5, unet, vit
from autopar.verify.target import split_inputs

aten = ops.aten
ZOO = {m.__name__.rpartition(".")[2]: m.tiny for m in (awkward, encoder, gpt, llama, mlp, moe, resnet, t5, unet, vit)}
ZOO |= {f"awkward {f.__name__}": f for f in (awkward.square, awkward.scores, awkward.gram, awkward.recurrent)}
ZOO |= {"awkward fused": awkward.fused}


# ---- what torch counts -----------------------------------------------------------------------------------------------


def by_group(grad: Any, x: Any, w: Any, *rest: Any, out_shape: Any, **_: Any) -> int:
    """torch's formula for one group, times the groups: by itself it counts dw of a grouped convolution that often."""
    groups, transposed = rest[6], rest[4]

    def part(shape: Any, dim: int) -> list[int]:
        return [n // groups if d == dim else n for d, n in enumerate(shape)]

    one = (part(grad, 1), part(x, 1), part(w, 0))
    dx, dw, _ = out_shape
    out = (None if dx is None else part(dx, 1), None if dw is None else part(dw, 0), None)
    assert transposed in (False, True)
    formula: Any = flop_counter.conv_backward_flop
    return int(groups * formula.__wrapped__(*one, *rest[:6], 1, *rest[7:], out_shape=out))


def grouped(rows: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Every row that is there times its expert's weight."""
    return 2 * int(rows[1]) * int(weight[1]) * int(weight[2])


def outer(left: Any, right: Any, *_: Any, **__: Any) -> int:
    return 2 * int(left[1]) * int(left[2]) * int(right[2])


MORE: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_counter.sdpa_flop.__wrapped__,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_counter.sdpa_backward_flop.__wrapped__,
    ops.autopar.grouped_mm: grouped,
    ops.autopar.grouped_outer: outer,
    aten.convolution_backward: by_group,
}


def without_dropout(model: nn.Module) -> nn.Module:
    """torch writes attention with dropout out, and then keeps the probabilities that ours computes again."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


def counted(model: nn.Module, args: Any, kwargs: Any, loss: Callable[[Any], Tensor] = lambda out: out) -> int:
    """Operations of an eager forward and backward."""
    with FlopCounterMode(display=False, custom_mapping=MORE) as counter:
        loss(model(*args, **kwargs)).backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", ZOO)
def test_a_step_counts_as_torch_counts_it(name: str) -> None:
    model, inputs = ZOO[name]()
    args, kwargs = split_inputs(inputs)
    found = flops(capture(without_dropout(model), args, kwargs))
    assert found.total == counted(model, args, kwargs)
    assert 0 < found.phase("forward") < found.phase("backward")


# ---- ops by themselves -----------------------------------------------------------------------------------------------

CONVOLUTIONS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1 dim": (nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "3 dims": (nn.Conv3d(2, 3, (2, 3, 1)), (2, 2, 5, 6, 7)),
    "stride and dilation": (nn.Conv2d(4, 6, 3, stride=2, dilation=2), (2, 4, 11, 13)),
    "groups": (nn.Conv2d(6, 9, 3, groups=3), (2, 6, 7, 8)),
    "depthwise": (nn.Conv2d(5, 10, 3, groups=5), (2, 5, 7, 8)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 7)),
    "transposed in groups": (nn.ConvTranspose2d(6, 9, 3, stride=2, groups=3), (2, 6, 5, 7)),
}


class Summed(nn.Module):
    def __init__(self, inner: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Tensor:
        return self.inner(*args).square().sum()


@pytest.mark.parametrize("needs_dx", (True, False))
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_count_both_gradients_where_both_are_wanted(name: str, needs_dx: bool) -> None:
    layer, shape = CONVOLUTIONS[name]
    x = torch.randn(shape, requires_grad=needs_dx)
    model = Summed(layer)
    found = flops(capture(model, (x,)))
    assert found.total == counted(model, (x,), {})
    assert found.phase("backward") == found.phase("forward") * (2 if needs_dx else 1)


def test_torch_counts_the_weight_gradient_of_a_grouped_convolution_once_a_group() -> None:
    layer, shape = CONVOLUTIONS["groups"]
    x = torch.randn(shape, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    dw = flops(capture(Summed(layer), (x,))).phase("forward")
    assert counter.get_total_flops() == 3 * dw + (3 - 1) * dw


def attended(**options: Any) -> Summed:
    return Summed(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options))


SHAPES = {
    "square": ((2, 6, 7, 4), (2, 6, 7, 4), (2, 6, 7, 4)),
    "crossed": ((2, 6, 5, 4), (2, 6, 9, 4), (2, 6, 9, 4)),
    "grouped": ((2, 6, 7, 4), (2, 2, 7, 4), (2, 2, 7, 4)),
    "values of another width": ((2, 6, 5, 4), (2, 6, 9, 4), (2, 6, 9, 3)),
    "keys that share heads, values wider": ((2, 6, 5, 4), (2, 3, 9, 4), (2, 3, 9, 10)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_attention_counts_as_the_formulas_of_torch(name: str) -> None:
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in SHAPES[name])
    found = flops(capture(attended(enable_gqa=True), (q, k, v)))
    out = (*q.shape[:3], v.shape[3])
    assert found.phase("forward") == flop_counter.sdpa_flop_count(q.shape, k.shape, v.shape)
    assert found.phase("backward") == flop_counter.sdpa_backward_flop_count(out, q.shape, k.shape, v.shape)


def test_a_causal_mask_takes_nothing_off_and_backward_is_two_and_a_half_times_forward() -> None:
    tensors = [torch.randn(2, 6, 7, 4, requires_grad=True) for _ in range(3)]
    plain, causal = (flops(capture(attended(is_causal=c), tensors)) for c in (False, True))
    assert plain == causal
    assert plain.phase("backward") * 2 == plain.phase("forward") * 5


def test_what_is_computed_again_in_backward_counts_there() -> None:
    once, again = nn.Linear(5, 11), nn.Linear(11, 3)

    def inner(x: Tensor) -> Tensor:
        y: Tensor = checkpoint.checkpoint(lambda x: again(once(x).tanh()), x, use_reentrant=False)
        return y

    model = Summed(inner)
    model.once, model.again = once, again
    found = flops(capture(model, (torch.randn(7, 5),)))
    first, second = 2 * 7 * 5 * 11, 2 * 7 * 11 * 3
    assert found.phase("forward") == first + second
    assert found.phase("backward") == first + 2 * second + first  # its result alone is not wanted: second is dead


def test_operations_print_by_phase_and_op() -> None:
    x = torch.randn(7, 5)
    found = flops(capture(Summed(nn.Linear(5, 11)), (x,)))
    assert found.by == {("forward", "aten.mm.default"): 770, ("backward", "aten.mm.default"): 770}
    assert str(found).splitlines()[-1].split() == ["both", "1,540"]
