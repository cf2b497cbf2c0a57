"""What the running ranks move, compute and store under each family."""

from __future__ import annotations

import pytest

from autopar.verify.report import Row
from autopar.verify.run import Harness
from tests.parity.cases import TARGETS

LAYERS = 2  # of gpt:divisible


def rows(harness: Harness, model: str, world: int, *families: str) -> dict[str, Row]:
    report = harness.verify(TARGETS[model], world, families, buckets=False)
    assert report.exit_code == 0, report.text()
    return {row.family: row for row in report.rows}


def tensors(row: Row, kind: str, phase: str) -> int:
    """Tensors that collectives of a kind carried in a phase, over all mesh axes: one each, without buckets."""
    return sum(
        n for key, (n, _) in row.counted.items() if key.startswith(kind) and key.endswith(phase) and "other" not in key
    )


def test_flops_of_all_ranks_are_those_of_one_device_where_axes_divide(harness: Harness) -> None:
    found = rows(harness, "gpt-divisible", 4, "ddp", "zero3", "megatron", "megatron-sp", "ddp x tensor")
    assert {name: row.flops <= 1.02 for name, row in found.items()} == dict.fromkeys(found, True)


@pytest.mark.parametrize("world", [2, 3])
def test_zero_divides_what_is_stored(harness: Harness, world: int) -> None:
    """Bytes of float64 parameters p, gradients g, AdamW state s: p + g + s, divided from the level that says so."""
    found = rows(harness, "mlp-divisible", world, "ddp", "zero1", "zero2", "zero3")
    numbers = 24 * 48 + 48 + 48 * 36 + 36 + 36 * 60 + 60
    whole = {"parameters": 8 * numbers, "gradients": 8 * numbers, "state": 16 * numbers}
    assert found["ddp"].memory == whole
    for family in ("zero1", "zero2", "zero3"):
        assert found[family].memory == {kind: size // world for kind, size in whole.items()}


def test_ddp_reduces_each_gradient_once(harness: Harness) -> None:
    row = rows(harness, "mlp-divisible", 2, "ddp")["ddp"]
    assert tensors(row, "all_reduce", "backward") == 6
    assert tensors(row, "all_gather", "forward") == tensors(row, "all_gather", "backward") == 0


def test_zero3_gathers_in_forward_and_backward_and_scatters_each_gradient_once(harness: Harness) -> None:
    found = rows(harness, "mlp-divisible", 2, "zero3", "fsdp-keep")
    assert tensors(found["zero3"], "all_gather", "forward") == 6
    assert 2 <= tensors(found["zero3"], "all_gather", "backward") <= 3, (
        "weights of the layers whose input needs a gradient"
    )
    assert tensors(found["zero3"], "reduce_scatter", "backward") == 6
    assert tensors(found["fsdp-keep"], "all_gather", "backward") == 0


def test_a_megatron_block_costs_two_all_reduces_each_way(harness: Harness) -> None:
    """Beside the blocks: the lookup and the loss over a cut vocabulary."""
    found = rows(harness, "gpt-divisible", 2, "megatron", "megatron-sp")
    plain, sequence = found["megatron"], found["megatron-sp"]
    blocks = {key: value for key, value in plain.counted.items() if key.startswith("all_reduce model")}
    activation = 12 * 8 * 36 * 8  # bytes of [batch, sequence, width] in float64
    forward, backward = blocks["all_reduce model forward"], blocks["all_reduce model backward"]
    assert forward[1] // activation >= 2 * LAYERS and backward[1] // activation >= 2 * LAYERS
    assert forward[1] < (2 * LAYERS + 2) * activation and backward[1] < (2 * LAYERS + 2) * activation
    assert tensors(sequence, "reduce_scatter", "forward") >= 2 * LAYERS
    assert tensors(sequence, "all_gather", "forward") >= 2 * LAYERS


def test_buckets_carry_the_same_bytes_in_fewer_collectives(harness: Harness) -> None:
    apart = rows(harness, "mlp-divisible", 2, "ddp")["ddp"]
    (together,) = harness.verify(TARGETS["mlp-divisible"], 2, ["ddp"]).rows
    key = "all_reduce data backward"
    assert together.status == "ok"
    assert together.tensors[key] == apart.tensors[key] == 6
    assert together.counted[key][0] < apart.counted[key][0] == 6
    assert together.counted[key][1] == apart.counted[key][1]
