"""The page about rules for one's own ops: its example runs, and the table that it shows is what is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import without_numbers

PAGE = (Path(__file__).parents[2] / "docs" / "rule-authoring.md").read_text()
(MODULE,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

TRAINED = """
import ops, torch
from autopar import ClusterSpec, plan, strategies
model, batch = ops.net()
made = plan(model, ClusterSpec.preset("cpu-gloo", devices=2), example_inputs=batch, strategy=strategies.ddp())
print(*(f"{name} {roles}" for name, roles in made.ops.items() if name.startswith("gate")))
print(made.fingerprint["rules"])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's module in it."""
    made = tmp_path_factory.mktemp("ops")
    (made / "ops.py").write_text(MODULE)
    return made


def python(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=folder, timeout=120)


def test_the_table_is_what_the_command_prints(folder: Path) -> None:
    (shown,) = re.findall(r"^```\n\$ autopar (verify-rule ops:example)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    done = python(folder, "-m", "autopar.cli", *shown[0].split())
    assert done.returncode == 0, done.stderr
    head, _, tail = shown[1].partition("\n...\n")
    printed = without_numbers(done.stdout)
    assert printed[: head.count("\n") + 1] == without_numbers(head)
    assert printed[-1:] == without_numbers(tail)


def test_both_ops_of_the_example_are_cut_and_the_plan_names_their_rules(folder: Path) -> None:
    done = python(folder, "-c", TRAINED)
    assert done.returncode == 0, done.stderr
    ops, rules = done.stdout.splitlines()
    assert ops == "gate ('.1',) gate_backward ('.1',)"
    assert rules == (
        "mine.gate.default: ... d, d -> ... d linear='0'; "
        "mine.gate_backward.default: ... d, ... d, d -> ... d, d linear='0'"
    )
    assert "no rule" not in done.stderr
