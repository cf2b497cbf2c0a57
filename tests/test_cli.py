"""The command line: what it prints, what it writes, how it exits."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

from autopar import files
from autopar.cli import main
from autopar.cluster import ClusterSpec
from autopar.errors import InputError
from autopar.parsing import read_bytes, read_cluster, read_strategy
from autopar.verify.report import Row
from autopar.verify.room import check_room
from autopar.verify.run import limit, refused
from autopar.verify.target import Target

MLP = "autopar.models.mlp:divisible"


def autopar(*args: str) -> subprocess.CompletedProcess[str]:
    """The command in this process."""
    out, err = io.StringIO(), io.StringIO()
    argv = mock.patch.object(sys, "argv", ["autopar", *args])
    with argv, redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as exit:
        main()
    return subprocess.CompletedProcess(args, exit.value.code or 0, out.getvalue(), err.getvalue())  # type: ignore[arg-type]


def started(*args: str) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    command = [sys.executable, "-m", "autopar.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_plan_prints_the_plan_saves_it_and_dumps_what_led_to_it(tmp_path: Path) -> None:
    dump, out = tmp_path / "dump", tmp_path / "plan.json"
    done = autopar("plan", MLP, "--devices", "4", "--strategy", "zero(3)", "--dump", str(dump), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plan  mesh(data=4)   step ")
    assert "\n  ZeRO 3 " in done.stdout
    assert f"{files.load(out)}\n" == done.stdout
    made = sorted(p.name for p in dump.iterdir())
    assert {
        "00-captured.txt",
        "plan.json",
        "plan.txt",
        "program-backward.txt",
        "program-forward.txt",
        "solver.lp",
    } < set(made)
    assert "all_gather" in (dump / "program-forward.txt").read_text()
    assert "Minimize" in (dump / "solver.lp").read_text()


def test_plan_prints_json_that_loads() -> None:
    done = autopar("plan", MLP, "--devices", "2", "--json", "--memory", "100MB")
    assert files.loads(done.stdout).costs["budget_bytes"] == 100e6


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("plan", "nothing"), 2, "InputError: 'nothing' is no model; write package.module:function or hf:ClassName\n"),
        (
            ("plan", MLP, "--cluster", "moon"),
            2,
            "ClusterError: no preset 'moon'; there are cpu-gloo, dgx-2, dgx-a100-40, dgx-a100-80, dgx-h100, ",
        ),
        (("plan", MLP, "--devices", "2", "--memory", "20KB"), 3, "NoPlan: "),
        (
            ("plan", MLP, "--devices", "48", "--strategy", "ddp"),
            3,
            "UnsupportedError: ddp(): a batch of 12 (args[0]) cannot be",
        ),
        (("plan",), 2, ""),
        (("plan", MLP, "--set", "nope=3"), 2, "InputError: autopar.models.mlp:divisible: got an unexpected keyword"),
        (("run", MLP, "--world", "3", "--strategy", "zeor(3)"), 2, "InputError: 'zeor(3)' is no strategy"),
        (
            ("run", MLP, "--world", "3", "--strategy", "ddp(0)"),
            2,
            "InputError: 'ddp(0)' is no strategy: ddp(0): 0 is no",
        ),
        (("run", MLP, "--world", "3", "--strategy", "ddp(2)"), 2, "PlanError: ddp(2): 2 devices do not make up the 3"),
        (
            ("verify", "hf:CLIPModel", "--world", "2"),
            2,
            "InputError: CLIPModel needs other inputs than tokens, pictures of one size or sounds",
        ),
        (("run", MLP, "--world", "3", "--plan", "nothing.json"), 2, "PlanError: nothing.json cannot be read: "),
    ],
)
def test_a_wrong_or_impossible_call_is_told_in_words(args: tuple[str, ...], code: int, message: str) -> None:
    done = autopar(*args)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(message), done.stderr
    assert "Traceback" not in done.stderr


def test_plan_takes_pins_from_a_file(tmp_path: Path) -> None:
    pins, out = tmp_path / "pins.yaml", tmp_path / "plan.json"
    pins.write_text("mesh: {model: 2}\nmodules: {up: n@model}\nparameters: {down.weight: {level: 3}}\n")
    done = autopar("plan", MLP, "--devices", "2", "--pins", str(pins), "--out", str(out), "--dump", str(tmp_path / "d"))
    assert done.returncode == 0, done.stderr
    made = files.load(out)
    assert (str(made.mesh), made.ops["mm"], made.parameters["down.weight"].level) == ("mesh(model=2)", ("n",), 3)
    pins.write_text("modules: {up: heads@data}\n")
    done = autopar("plan", MLP, "--devices", "2", "--pins", str(pins))
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(
        f"UnsupportedError: {pins}: modules.up: heads@data: no op there can be cut so on mesh("
    )
    pins.write_text("module: {up: heads@data}\n")
    done = autopar("run", MLP, "--world", "2", "--pins", str(pins))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"InputError: {pins}: module: there is no such key; there are mesh, modules, parameters"
    )


@pytest.mark.ranks
def test_verify_prints_a_table_and_exits_with_its_verdict() -> None:
    done = started(
        "verify", "autopar.models.mlp:tiny", "--world", "2", "--families", "ddp,zero2", "--random", "1", "--seed", "1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "verify autopar.models.mlp:tiny on 2 ranks; largest error, bound 1e-09"
    assert lines[1].split() == ["family", "loss", "outputs", "gradients", "parameters", "buffers", "flops", "mesh"]
    assert [line.split()[0] for line in lines[2:5]] == ["ddp", "zero2", "random"]
    assert lines[-1].startswith("ok: 3 of 3 equal in ")


def test_verify_refuses_a_model_that_memory_does_not_hold_before_it_is_built() -> None:
    done = autopar("verify", "hf:GptOssForCausalLM", "--world", "4")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"InputError: hf:GptOssForCausalLM takes 870.45 GiB in float64: to verify it on 4 ranks takes about 20890.68 "
        r"GiB, and this machine has \d+.\d+ GiB\n"
        r"  try: --set tiny=true for small sizes of everything, or keys of its config\n",
        done.stderr,
    ), done.stderr


def test_many_ranks_need_more_room_than_the_reference() -> None:
    target = Target.parse(MLP)  # 5,184 numbers, 41,472 bytes in float64
    check_room(target, 2, machine_bytes=16 * 41_472)
    check_room(target, 3, machine_bytes=18 * 41_472)
    for world, room in ((2, 16 * 41_472 - 1), (3, 18 * 41_472 - 1)):
        with pytest.raises(InputError, match=f"to verify it on {world} ranks takes about"):
            check_room(target, world, machine_bytes=room)


def test_verify_names_families_that_do_not_exist_here() -> None:
    for families in ("nonsense", "hsdp"):
        done = autopar("verify", "autopar.models.mlp:tiny", "--world", "3", "--families", families)
        assert done.returncode == 2
        assert families in done.stderr


@pytest.mark.ranks
def test_run_trains_on_real_processes_by_a_plan_from_a_file(tmp_path: Path) -> None:
    made, file = "autopar.models.mlp:tiny", str(tmp_path / "plan.json")
    assert autopar("plan", made, "--devices", "2", "--strategy", "zero(3)", "--out", file).returncode == 0
    options = ("--steps", "3", "--lr", "0.01", "--plan", file, "--json")
    done = started("run", made, "--world", "2", *options)
    assert done.returncode == 0, done.stderr
    told, *steps = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert told["plan"] == str(files.load(file)).splitlines()[0].removeprefix("plan").strip()
    losses = [line["loss"] for line in steps]
    assert len(losses) == 3
    assert losses[2] < losses[0]


@pytest.mark.ranks
def test_an_error_of_the_ranks_is_told_once_and_keeps_its_exit_code(tmp_path: Path) -> None:
    made, file = "autopar.models.mlp:tiny", tmp_path / "plan.json"
    assert autopar("plan", made, "--devices", "2", "--out", str(file)).returncode == 0
    file.write_text(file.read_text().replace(files.load(file).fingerprint["graph"], "another"))
    done = started("run", made, "--plan", str(file))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("PlanError: ") == 1
    assert done.stderr.startswith("PlanError: the plan was made for something else: graph: another in the plan, ")
    assert "Traceback" not in done.stderr


def test_a_plan_for_another_number_of_ranks_is_refused_before_they_start(tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    assert autopar("plan", MLP, "--devices", "2", "--out", file).returncode == 0
    done = autopar("run", MLP, "--world", "3", "--plan", file)
    assert done.returncode == 2
    assert done.stderr == f"ClusterError: {file} is for 2 devices, and --world is 3\n  try: --world 2\n"


@pytest.mark.ranks
def test_run_finds_the_cluster_by_itself() -> None:
    done = started("run", "autopar.models.mlp:tiny", "--world", "2", "--steps", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if '"loss"' in line]


def test_a_world_that_contradicts_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = autopar("run", MLP, "--world", "3")
    assert done.returncode == 2
    assert "torchrun started 2 processes" in done.stderr


# --- words as values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"), [("8GiB", 8 * 2**30), ("500MB", 500_000_000), ("123", 123), ("1.5 kib", 1536)]
)
def test_bytes_are_read_with_units(text: str, count: int) -> None:
    assert read_bytes(text) == count


@pytest.mark.parametrize("text", ["", "many", "8 apples", "-3GB"])
def test_a_wrong_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no number of bytes"):
        read_bytes(text)


@pytest.mark.parametrize("text", ["zero(3)", "ddp(2) * megatron(2, sp=True)", "fsdp(reshard=False)", "ddp()"])
def test_a_strategy_reads_back_from_its_text(text: str) -> None:
    assert str(read_strategy(text)) == text


@pytest.mark.parametrize(
    "text", ["__import__('os')", "Strategy(1)", "ddp.x", "ddp() +", "nothing()", "zero(open('x'))"]
)
def test_nothing_but_strategies_is_evaluated(text: str) -> None:
    with pytest.raises(InputError, match="is no strategy"):
        read_strategy(text)


def test_a_cluster_is_a_file_a_preset_or_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(ClusterSpec.preset("cpu-gloo", devices=8).model_dump_json())
    assert read_cluster(str(file), None, None).devices == 8
    assert read_cluster(str(file), 4, None).devices == 4
    assert read_cluster("dgx-a100-80", None, 2).devices == 16
    assert read_cluster("detect", 3, None).devices == 3


# --- refusals ---------------------------------------------------------------------------------------------------------

TABLE = """
| model | family | world | refusal | reason |
| --- | --- | --- | --- | --- |
| `a.b:*` | `zero*` | `4` | `zero(3): a batch of * is short` | because |
"""


def test_a_refusal_is_known_if_the_table_of_limits_has_it(tmp_path: Path) -> None:
    file = tmp_path / "limits.md"
    file.write_text(TABLE)
    assert limit("a.b:c", "zero3", 4, "zero(3): a batch of 3 is short", file) == "because"
    for cell in (("x", "zero3", 4), ("a.b:c", "ddp", 4), ("a.b:c", "zero3", 3)):
        assert limit(*cell, "zero(3): a batch of 3 is short", file) == ""
    assert limit("a.b:c", "zero3", 4, "something else", file) == ""


def test_a_refusal_that_no_table_has_is_a_refusal() -> None:
    assert refused("ddp", "no reason\n  more", Target.parse("a:b"), 4) == Row("ddp", "refused", "no reason\n  more")


WALKS_THROUGH_A_SET = """
import torch
from torch import nn

class Walker(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(6, 4 + i) for i, name in enumerate(NAMES)})

    def forward(self, x):
        return sum(self.layers[name](x).tanh().sum() for name in set(NAMES))

NAMES = ["up", "down", "left", "right", "in", "out", "near", "far"]

def build():
    return Walker(), (torch.randn(6, 6),)
"""


def test_ranks_trace_what_this_process_traced_though_the_model_walks_through_a_set(tmp_path: Path) -> None:
    (tmp_path / "walker.py").write_text(WALKS_THROUGH_A_SET)
    command = [sys.executable, "-m", "autopar.cli", "verify", "walker:build", "--world", "2", "--families", "ddp"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
