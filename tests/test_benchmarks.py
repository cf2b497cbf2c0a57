"""The scripts in benchmarks/ run; the ones that take long run by hand or in `make`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))


@pytest.mark.ranks
def test_the_report_for_gpus_runs_on_gloo_with_the_device_replaced() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--world", "2", "--rounds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for section in ("## verify", "## plan", "## times", "## memory"):
        assert section in done.stdout
    assert done.stdout.splitlines()[-1] == "gpu: ok"


def test_ratios_are_paired_and_have_an_interval_around_the_median() -> None:
    from paired import ratio

    theirs = [1.0 + 0.5 * (i % 7) for i in range(41)]
    found = ratio([2 * t for t in theirs], theirs)
    assert (found.low, found.median, found.high) == (2.0, 2.0, 2.0)
    spread = ratio([1.0 + i / 40 for i in range(41)], [1.0] * 41)
    assert spread.median == pytest.approx(1.5)
    assert 1.0 < spread.low < 1.5 < spread.high < 2.0
