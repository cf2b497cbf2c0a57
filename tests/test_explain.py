"""`autopar explain`: every collective on every preset, the choice and where it changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cluster import ClusterSpec
from autopar.cost.algorithms import ALGORITHMS, ONE_LEVEL
from autopar.errors import InputError
from autopar.explain import SIZES, explain
from autopar.presets import PRESETS


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("kind", sorted(ALGORITHMS))
def test_every_collective_is_explained_on_every_preset(preset: str, kind: str) -> None:
    for hosts in (1, 2):
        found = explain(kind, ClusterSpec.preset(preset, hosts=hosts))
        plain = json.loads(json.dumps(found.json()))
        assert [choice["bytes"] for choice in plain["choices"]] == list(SIZES)
        names = {algorithm["name"] for algorithm in plain["algorithms"]}
        assert {choice["name"] for choice in plain["choices"]} <= names
        text = found.text()
        assert all(f"\n{name} [s] =\n" in text for name in names)


def test_the_choice_changes_at_the_crossovers() -> None:
    found = explain("all_reduce", ClusterSpec.preset("dgx-h100", hosts=4))
    crossovers = found.crossovers()
    assert [(x.before, x.after) for x in crossovers] == [("hierarchical(ring, tree)", "rings")]
    (one,) = crossovers
    assert found.choice(one.bytes - 1).name == one.before
    assert found.choice(one.bytes).name == one.after
    assert f"from {one.bytes} bytes on: rings instead of hierarchical(ring, tree)" in found.text()


def test_what_cannot_be_explained_is_one_clear_error() -> None:
    with pytest.raises(InputError) as caught:
        explain("all_scatter", ClusterSpec.preset("p4d"))
    assert str(caught.value) == (
        "no collective 'all_scatter'; "
        "there are all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, send_recv"
    )
    with pytest.raises(InputError, match="p4d has 1 device, which moves nothing; give more devices"):
        explain("all_reduce", ClusterSpec.preset("p4d", devices=1))


def test_the_command_prints_text_or_json_and_refuses_unknown_presets() -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "autopar.cli", "explain", "--collective", "all_gather", *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = run("--cluster", "dgx-a100-40", "--devices", "24")
    assert done.stdout.startswith("all_gather on 24 devices of dgx-a100-40, nccl\n"), done.stderr
    assert json.loads(run("--cluster", "p5", "--hosts", "3", "--json").stdout)["devices"] == 24
    wrong = run("--cluster", "dgx-9")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("ClusterError: no preset 'dgx-9'; there are cpu-gloo, dgx-2, ")


def test_the_document_names_every_preset_and_every_algorithm() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "collectives.md").read_text()
    ways = {name for kind in ONE_LEVEL.values() for name in kind}
    assert [name for name in (*PRESETS, *ways, *ALGORITHMS) if name not in text] == []


def test_the_cluster_file_of_the_document_loads(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "collectives.md").read_text()
    file = tmp_path / "lab.yaml"
    file.write_text(text.split("```yaml\n")[1].split("```")[0])
    cluster = ClusterSpec.load(file)
    assert explain("all_reduce", cluster.with_devices(16)).choice(2**20).name == "measured"
