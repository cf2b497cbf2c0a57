"""A reduce-scatter made of an all-to-all: every kind of term, every dtype, on real process groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autopar.reduce_scatter import TOGETHER, reduce_scatter
from autopar.verify.pool import Pool


def scattered(kind: str, dtype: torch.dtype) -> bool:
    """Whether this rank gets its rows of what the ranks' terms come to."""
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group(list(range(world)))
    terms = (torch.arange(world * world * 6).reshape(world, world * 2, 3) * 7 % 11 - 5).to(dtype)
    found = reduce_scatter(terms[rank], kind, world, group.group_name)
    whole = {"sum": terms.sum(0), "max": terms.amax(0), "min": terms.amin(0)}[kind]
    return found.dtype == dtype and torch.equal(found, whole[2 * rank : 2 * rank + 2].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("kind", TOGETHER)
def test_each_rank_gets_its_rows_of_the_result(ranks: Pool, kind: str, dtype: torch.dtype) -> None:
    assert all(ranks.run(scattered, kind, dtype, world=3))
