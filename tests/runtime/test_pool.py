"""The ranks of the harness: they answer, fail, die and get stuck, and it is always told."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from autopar.verify.pool import Pool, RankError


def total(x: float) -> float:
    value = torch.tensor([x * (dist.get_rank() + 1)])
    dist.all_reduce(value)
    return float(value)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("seven is not eight")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)


def sleep() -> None:
    time.sleep(60)


@pytest.fixture(scope="module")
def pool():
    with Pool(3) as pool:
        yield pool


def test_ranks_answer_and_a_smaller_world_is_a_part_of_them(pool: Pool) -> None:
    assert pool.run(total, 2.0) == [12.0] * 3
    assert pool.run(total, 2.0, world=2) == [6.0] * 2


def test_a_failing_rank_is_named_and_the_next_call_works(pool: Pool) -> None:
    with pytest.raises(RankError, match="seven is not eight"):
        pool.run(fail_on, 1)
    assert pool.run(total, 1.0) == [6.0] * 3


def test_a_dying_rank_and_a_stuck_one_are_named(pool: Pool) -> None:
    outcomes = pool.outcomes(die_on, 2)
    assert (outcomes[2].error, outcomes[2].message) == ("Died", "the process ended with exit code 3")
    assert [o.error for o in pool.outcomes(sleep, timeout=1.0)] == ["Stuck"] * 3
