"""The scripts in benchmarks/ run; the ones that take long run by hand or in `make`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autopar.verify.compare import Error

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


@pytest.mark.slow
def test_the_sweep_tries_one_architecture_and_tells_what_became_of_it() -> None:
    command = [
        sys.executable,
        str(BENCHMARKS / "hf_sweep.py"),
        "--only",
        "GPT2LMHeadModel",
        "--only",
        "FSMTForCausalLM",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("equal    GPT2LMHeadModel")
    assert lines[1].startswith("absent   FSMTForCausalLM") and "has no model class FSMTForCausalLM" in lines[1]
    assert "equal 1, refused 0, unstable 0, wrong 0, failed 0, not here 1, of 2 architectures" in lines


def test_only_errors_that_one_rounding_explains_are_unstable() -> None:
    from rounding import TIMES, explains

    own = {"loss": Error(1e-15), "buffers": Error(1.0)}
    assert explains(own, {"loss": Error(1e-12), "buffers": Error(3.0)})
    assert not explains(own, {"loss": Error(1e-8), "buffers": Error(3.0)})
    assert not explains(own, {"loss": Error(0.0), "buffers": Error(2.0 * TIMES)})
    assert not explains(own, {"loss": Error(0.0), "buffers": Error(0.0)})


def test_the_page_of_a_sweep_has_a_row_for_what_ran_and_a_reason_for_the_rest() -> None:
    from hf_sweep import page
    from hf_sweep_one import Found, everywhere

    text = page(
        [
            Found("A", 12, {"aten.sort.default": 2}, everywhere("equal"), "", 3.2),
            Found("B", 9, {}, {**everywhere("equal"), "tensor": "refused"}, "tensor: nothing | to cut", 4.0),
            Found("C", outcomes=everywhere("absent"), reason="ImportError: timm"),
        ]
    )
    assert "equal 1, refused 1, unstable 0, wrong 0, failed 0, not here 1, of 3 architectures" in text
    assert "| A | 12 | `aten.sort.default` x 2 | equal | equal | equal | equal | 3 |" in text
    assert "| B | 9 | - | equal | equal | refused | equal | 4 |" in text
    assert "| B | tensor: nothing / to cut |" in text and "| C | ImportError: timm |" in text
