"""What the README shows is what happens."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar import strategies
from autopar.cluster import ClusterSpec, Link
from autopar.device import Device

ROOT = Path(__file__).resolve().parents[1]


def blocks(language: str = "", page: str = "README.md") -> list[str]:
    """Fenced blocks of a language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


def run(script: str, ranks: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """A script under torchrun, which must end well."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=240)
    assert done.returncode == 0, done.stderr
    return done


def without_numbers(text: str) -> list[str]:
    return [" ".join(re.sub(r"\d+(\.\d+)?(e-?\d+)?", "0", line).split()) for line in text.splitlines()]


@pytest.mark.ranks
def test_the_script_runs(tmp_path: Path) -> None:
    done = run(blocks("python")[0], 4, tmp_path)
    assert done.stdout.count("plan  mesh(") == 1, "the first rank prints the plan"
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if re.match(r"\d+ \d", line)]
    assert len(losses) == 10 and losses[-1] < losses[0]


@pytest.mark.ranks
def test_the_loop_resumes_under_another_strategy_and_its_weights_load_on_one_device(tmp_path: Path) -> None:
    run(blocks("python", "docs/training.md")[0], 2, tmp_path)
    saved = torch.load(tmp_path / "model.pt")
    net = nn.Sequential(nn.Linear(12, 36), nn.GELU(), nn.Dropout(0.1), nn.Linear(36, 5))
    for kind in ("model", "ema"):
        net.load_state_dict({name.removeprefix("model."): value for name, value in saved[kind].items()})
    gaps = [float((saved["model"][name] - saved["ema"][name]).abs().max()) for name in saved["model"]]
    assert 1e-4 < max(gaps) < 0.1, "five steps of 1e-2 ahead of their average"


def test_the_cluster_file_is_complete(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(blocks("yaml", "docs/clusters.md")[0])
    cluster = ClusterSpec.load(tmp_path / "cluster.yaml")
    assert (cluster.devices, cluster.memory_bytes, len(cluster.links)) == (16, 76e9, 2)
    told = (ROOT / "docs" / "clusters.md").read_text()
    named = set(re.findall(r"^\| `([\w.]+)` \|", told, re.MULTILINE))
    fields = {"device": Device, "links": Link}
    assert {*ClusterSpec.model_fields} <= {name.partition(".")[0] for name in named}
    for part, kind in fields.items():
        assert {f"{part}.{field}" for field in kind.model_fields} <= named


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
