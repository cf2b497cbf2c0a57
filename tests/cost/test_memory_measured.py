"""The predicted peak beside the live bytes on running ranks, byte for byte but for what is listed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autopar.verify.pool import Pool

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

BOUND = 0.01  # of the peak; the random state, 16 bytes, is counted to the end of the step and may go before


@pytest.mark.parametrize(
    "world, precision", ((2, None), *(pytest.param(w, "bf16", marks=pytest.mark.slow) for w in (2, 4)))
)
@pytest.mark.parametrize("model", ("gpt", "llama", "encoder", "mlp"))
def test_the_predicted_peak_is_what_the_ranks_hold(ranks: Pool, model: str, world: int, precision: str | None) -> None:
    from memory_error import holds, rows, table

    found = rows(ranks, [world], [model], [precision])
    assert holds(found) and all(abs(row.error) <= BOUND for row in found), table(found)
