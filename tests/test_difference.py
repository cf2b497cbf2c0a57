"""What differs between two plans, as people read it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner

from autopar import files
from autopar.commands import app
from autopar.difference import ranged, rows
from autopar.layout import Layout, Mesh
from autopar.plan import ParameterPlan, Plan

WEIGHT = Layout.whole(((60,), (36,)))
ROWS = WEIGHT.with_cut((0, 0), ("data",))
NAMES = [f"blocks.{i}.up.weight" for i in range(3)]
NOTES = {
    **{f"mm_{i}": f"blocks.{i}.up: m~0=batch n=heads" for i in range(3)},
    **{f"add_{i}": f"blocks.{i}.up: .1=batch" for i in range(3)},
    "sum_1": ": .0=batch",
}
FIRST = Plan(
    Mesh(("data", "model"), (2, 2)),
    {**{f"mm_{i}": ("m~0", "") for i in range(3)}, **{f"add_{i}": (".1", "") for i in range(3)}, "sum_1": ("", "")},
    {name: ParameterPlan(0, WEIGHT, WEIGHT) for name in NAMES},
    costs={"step_s": 0.00603, "peak_bytes": 2.0**20},
    fingerprint={"options": "strategy=ddp()", "graph": "a"},
    notes=NOTES,
)


def test_a_plan_does_not_differ_from_itself() -> None:
    assert FIRST.diff(FIRST) == "" and list(rows(FIRST, FIRST)) == []


def test_equal_changes_of_blocks_stand_once_and_one_of_its_own_by_itself() -> None:
    second = replace(
        FIRST,
        ops={**FIRST.ops, **{f"mm_{i}": ("m~0", "n") for i in range(3)}, "add_1": ("", ""), "sum_1": (".0", "")},
        parameters={
            **FIRST.parameters,
            NAMES[0]: ParameterPlan(2, WEIGHT, ROWS),
            NAMES[2]: ParameterPlan(3, ROWS, ROWS),
        },
        costs={"step_s": 0.0051, "peak_bytes": 2.0**21},
        fingerprint={"options": "", "graph": "a"},
    )
    assert FIRST.diff(second).splitlines() == [
        "made for: options      strategy=ddp()  ->  none",
        "step                   6.03 ms  ->  5.10 ms",
        "memory: peak           1 MiB  ->  2 MiB",
        "ops: 5 of 7 differ",
        "  blocks.0-2.up mm  x 3  batch@data  ->  batch@data heads@model",
        "  blocks.1.up add        batch@data  ->  whole",
        "  sum                    whole  ->  batch@data",
        "parameters: 2 of 3 differ",
        "  blocks.0.up.weight     replicated [60, 36]  ->  ZeRO 2 [60@data, 36]",
        "  blocks.2.up.weight     replicated [60, 36]  ->  ZeRO 3 [60@data, 36]",
    ]


def test_the_order_of_mesh_axes_alone_is_no_change_of_ops() -> None:
    turned = {name: (b, a) for name, (a, b) in FIRST.ops.items()}
    second = replace(FIRST, mesh=Mesh(("model", "data"), (2, 2)), ops=turned)
    assert FIRST.diff(second) == "mesh  mesh(data=2, model=2)  ->  mesh(model=2, data=2)"


def test_what_only_one_plan_has_is_told() -> None:
    fewer = {name: roles for name, roles in FIRST.ops.items() if name != "sum_1"}
    assert FIRST.diff(replace(FIRST, ops=fewer)).splitlines() == [
        "ops: 1 of 7 differ",
        "  sum  whole  ->  not there",
    ]


def test_numbers_of_blocks_are_told_as_ranges() -> None:
    assert ranged(["blocks.0.up", "blocks.2.up", "blocks.3.up", "blocks.4.up"]) == "blocks.0,2-4.up"
    assert ranged(["head"]) == "head"


def test_the_command_prints_the_difference_or_that_there_is_none(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    files.save(FIRST, a)
    files.save(replace(FIRST, costs={"step_s": 0.0051, "peak_bytes": 2.0**20}), b)
    same, other = (CliRunner().invoke(app, ["plan-diff", str(a), str(x)]) for x in (a, b))
    assert (same.exit_code, same.stdout) == (0, "the plans are the same\n")
    assert (other.exit_code, other.stdout) == (0, "step  6.03 ms  ->  5.10 ms\n")
    told = json.loads(CliRunner().invoke(app, ["plan-diff", str(a), str(b), "--json"]).stdout)
    assert told == [{"section": "costs", "name": "step", "before": "6.03 ms", "after": "5.10 ms", "count": 1}]
