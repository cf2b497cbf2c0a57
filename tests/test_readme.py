"""What the README shows is what happens."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autopar import strategies

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def blocks(language: str = "") -> list[str]:
    """Fenced blocks of a language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


def without_numbers(text: str) -> list[str]:
    return [" ".join(re.sub(r"\d+(\.\d+)?(e-?\d+)?", "0", line).split()) for line in text.splitlines()]


@pytest.mark.ranks
def test_the_script_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks("python")[0])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("plan  mesh(") == 1, "the first rank prints the plan"
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if re.match(r"\d+ \d", line)]
    assert len(losses) == 10 and losses[-1] < losses[0]


def test_the_plan_is_the_one_that_its_command_prints() -> None:
    (shown,) = [block for block in blocks() if block.startswith("$ autopar plan")]
    command, _, plan = shown.partition("\n")
    words = shlex.split(command.removeprefix("$ autopar "))
    done = subprocess.run([sys.executable, "-m", "autopar.cli", *words], capture_output=True, text=True, timeout=240)
    assert without_numbers(done.stdout) == without_numbers(plan)


def test_the_strategies_are_there() -> None:
    (block,) = [block for block in blocks("python") if "from autopar import strategies" in block]
    calls = re.findall(r"strategies\.\w+\([^)]*\)", block)
    assert len(calls) >= 6
    for call in calls:
        assert isinstance(eval(call, {"strategies": strategies}), strategies.Strategy)
