"""The presets against what others measured with nccl-tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))


def test_curves_of_all_reduces_are_met_within_a_tenth_on_average() -> None:
    from published_collectives import curves

    rows = curves()
    for preset, count in (("dgx-a100-80", 77), ("dgx-2", 11)):
        errors = [row.error for row in rows if row.preset == preset]
        assert len(errors) == count
        assert mean(errors) <= 0.1


def test_each_bus_bandwidth_that_a_preset_describes_is_met_within_a_tenth() -> None:
    from published_collectives import bandwidths

    rows = bandwidths()
    assert {row.preset for row in rows} == {"dgx-a100-80", "dgx-h100", "dgx-h200", "gb200-nvl72", "p4d"}
    for row in rows:
        published, predicted = row.bus_bytes_per_s
        assert abs(predicted / published - 1) <= 0.1, row


def test_the_script_prints_the_tables() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "published_collectives.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mean error ") == 4
