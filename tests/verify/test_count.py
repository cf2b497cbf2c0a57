"""Counting what torch dispatches."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from autopar.verify.count import Counts
from autopar.verify.pool import Pool


def test_flops_of_products_and_attention_are_counted_by_phase() -> None:
    counts = Counts()
    x, w = torch.randn(3, 5, requires_grad=True), torch.randn(5, 7, requires_grad=True)
    with counts.during("forward"):
        y = x @ w
    with counts.during("backward"):
        y.sum().backward()  # type: ignore[no-untyped-call]
    assert counts.flops == {"forward": 2 * 3 * 5 * 7, "backward": 2 * 2 * 3 * 5 * 7}
    q, k = torch.randn(2, 3, 11, 4), torch.randn(2, 3, 13, 4)
    with counts.during("attention"):
        F.scaled_dot_product_attention(q, k, k)
    assert counts.flops["attention"] == 2 * 2 * (2 * 3) * 11 * 13 * 4


def collect(world: int) -> tuple[dict[tuple[str, str, str], int], dict[tuple[str, str, str], int]]:
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    counts = Counts()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    with counts.during("forward", {name: "data"}):
        functional.wait_tensor(functional.all_reduce(torch.ones(6), "sum", name))
        functional.wait_tensor(functional.all_gather_tensor(torch.ones(2, 3), 0, name))
        functional.wait_tensor(functional.reduce_scatter_tensor(torch.ones(4 * world), "sum", 0, name))
    return dict(counts.calls), dict(counts.bytes)


@pytest.mark.ranks
def test_collectives_are_counted_by_kind_axis_and_phase_at_the_larger_end() -> None:
    with Pool(2) as pool:
        calls, sizes = pool.run(collect, 2)[1]
    keys = [(kind, "data", "forward") for kind in ("all_reduce", "all_gather", "reduce_scatter")]
    assert calls == dict.fromkeys(keys, 1)
    assert sizes == dict(zip(keys, (6 * 4, 2 * 6 * 4, 8 * 4), strict=True))
