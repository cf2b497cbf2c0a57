"""The harness itself finds what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from autopar.verify import families, run
from autopar.verify.reference import read
from autopar.verify.run import OPTIMIZERS, STEPS, Harness
from tests.parity.cases import TARGETS


def test_a_reference_that_is_off_by_1e_8_is_a_mismatch(harness: Harness) -> None:
    target = TARGETS["mlp"]
    file = harness.reference.file(target, OPTIMIZERS, STEPS)
    record = read(str(file))
    key = "adamw/2/parameters/mid.weight"
    try:
        save_file({**record, key: record[key] * (1 + 1e-8)}, str(file))
        report = harness.verify(target, 2, ["ddp"])
    finally:
        save_file(record, str(file))
    (row,) = report.rows
    assert (report.exit_code, row.status) == (1, "mismatch")
    assert row.note.startswith("parameters; worst ")
    assert row.note.endswith(f"at {key}")


def test_a_tensor_that_the_ranks_do_not_have_is_a_mismatch(harness: Harness) -> None:
    target = TARGETS["mlp"]
    file = harness.reference.file(target, OPTIMIZERS, STEPS)
    record = read(str(file))
    try:
        save_file({**record, "sgd/0/buffers/ghost": record["sgd/0/loss/"].clone()}, str(file))
        report = harness.verify(target, 2, ["ddp"])
    finally:
        save_file(record, str(file))
    assert report.rows[0].note == "buffers; worst inf at sgd/0/buffers/ghost"


def test_a_forced_family_without_a_cut_of_its_kind_is_a_mismatch(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    planners_own = replace(families.FAMILIES["zero3"], make=lambda n, m: None)
    monkeypatch.setitem(families.FAMILIES, "zero3", planners_own)  # type: ignore[arg-type]
    report = harness.verify(TARGETS["mlp"], 2, ["zero3"])
    assert report.exit_code == 1
    assert report.rows[0].note.startswith("the plan shows no cut of its kind")


def test_a_refusal_exits_with_3_unless_the_table_of_limits_has_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listed = harness.verify(TARGETS["llama"], 4, ["ddp"])
    assert (listed.exit_code, listed.rows[0].status) == (0, "known")
    monkeypatch.setattr(run, "LIMITS", tmp_path / "none.md")
    report = harness.verify(TARGETS["llama"], 4, ["ddp"])
    assert (report.exit_code, report.rows[0].status) == (3, "refused")
    assert "a batch of 5 (args[0]) cannot be cut over 4 devices" in report.rows[0].note


def test_a_rank_that_fails_is_a_row_with_its_error(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run.drawn(TARGETS["mlp"], 2, 0)
    monkeypatch.setattr(run, "forced", lambda target, cluster, family: replace(whole, ops={}))
    report = harness.verify(TARGETS["mlp"], 2, ["ddp"])
    assert report.exit_code == 1
    assert report.rows[0].status == "failed"
    assert ": PlanError: the plan has no legal choice for " in report.rows[0].note
