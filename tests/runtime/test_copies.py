"""Compute copies follow every way in which a parameter can change, and are gathered only when one did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.verify.pool import Pool
from tests.runtime.nets import deliver, gap, net

Change = Callable[[torch.nn.Module, torch.optim.Optimizer | None], None]


def by_hand(module: torch.nn.Module, _: Any) -> None:
    with torch.no_grad():
        for p in module.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad


def by_data(module: torch.nn.Module, _: Any) -> None:
    for p in module.parameters():
        p.data.mul_(1.25)


def by_copy(module: torch.nn.Module, _: Any) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(p * 0.75)


def by_load(module: torch.nn.Module, _: Any) -> None:
    module.load_state_dict({k: v * 1.5 if v.is_floating_point() else v for k, v in module.state_dict().items()})


def by_part(module: torch.nn.Module, _: Any) -> None:
    torch.manual_seed(3)
    module.mid.load_state_dict({"weight": module.mid.weight * 2, "bias": module.mid.bias * 3})


def by_optimizer(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    assert optimizer is not None
    optimizer.step()


def one_element(module: torch.nn.Module, _: Any) -> None:
    bias = module.mid.bias
    with torch.no_grad():
        if not isinstance(bias, DTensor):
            bias[-1] += 1e-3
        elif dist.get_rank() == dist.get_world_size() - 1:
            bias.to_local()[-1] += 1e-3


CHANGES: dict[str, tuple[Change, Callable[..., torch.optim.Optimizer] | None]] = {
    "hand": (by_hand, None),
    "data": (by_data, None),
    "copy": (by_copy, None),
    "load": (by_load, None),
    "part": (by_part, None),
    "element": (one_element, None),
    "sgd": (by_optimizer, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "foreach": (by_optimizer, lambda p: torch.optim.AdamW(p, 0.1, foreach=True)),
    "single": (by_optimizer, lambda p: torch.optim.AdamW(p, 0.1, foreach=False)),
    "fused": (by_optimizer, lambda p: torch.optim.AdamW(p, 0.1, fused=True)),
}


def change(how: str, what: str) -> list[float]:
    model, ids, labels = net()
    ours, single = deliver(model, (ids,), {"labels": labels}, how)
    do, make = CHANGES[what]
    gaps = []
    optimizers = [make([p for p in m.parameters() if p.requires_grad]) if make else None for m in (ours, single)]
    for _ in range(3):
        losses = []
        for module, optimizer in zip((ours, single), optimizers, strict=True):
            module(ids, labels=labels).loss.backward()
            do(module, optimizer)
            module.zero_grad()
            losses.append(module(ids, labels=labels).loss)
        gaps.append(gap(*losses))
    return gaps


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("how", ("zero1", "zero2", "zero3"))
def test_a_changed_parameter_is_computed_with(ranks: Pool, how: str, what: str) -> None:
    assert max(map(max, ranks.run(change, how, what, world=2))) < 1e-9


def gathers() -> list[bool]:
    """Whether copies were made anew by: a first forward, a second, one after a backward, one after a change."""
    model, ids, labels = net()
    ours, _ = deliver(model, (ids,), {"labels": labels}, "zero2")
    copies = next(iter(ours._autopar.copies.values()))
    seen = []

    def forward() -> torch.Tensor:
        before = copies.values
        loss: torch.Tensor = ours(ids, labels=labels).loss
        seen.append(before is not copies.values)
        return loss

    forward()
    forward().backward()
    forward()
    by_data(ours, None)
    forward()
    return seen


def test_copies_are_made_anew_only_when_something_changed(ranks: Pool) -> None:
    assert ranks.run(gathers, world=2) == [[True, False, False, True]] * 2
