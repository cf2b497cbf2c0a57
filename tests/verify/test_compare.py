"""What the harness calls an error."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from autopar.verify.compare import Comparison, Error, error
from autopar.verify.pool import Pool
from autopar.verify.report import MISMATCH, OK, REFUSED, Report, Row, judge

RATES = {"sgd": 0.05}


def compare(
    ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], rates: dict[str, float]
) -> dict[str, Error]:
    comparison = Comparison(reference, rates)
    for key, tensor in ours.items():
        comparison.see(key, tensor)
    return comparison.finish()


def test_an_error_is_relative_to_the_largest_entry_of_the_reference() -> None:
    reference = torch.tensor([1.0, -4.0, 0.0], dtype=torch.float64)
    assert error(reference + torch.tensor([0.0, 0.0, 1.0]), reference, 0.0) == 0.25
    assert error(reference.clone(), reference, 0.0) == 0.0


def test_a_floor_keeps_noise_in_zero_gradients_from_counting() -> None:
    noise, zero = torch.tensor([1e-18], dtype=torch.float64), torch.tensor([0.0]).double()
    assert error(noise, zero, 0.0) == math.inf
    assert math.isclose(error(noise, zero, 1e-6), 1e-12)


def test_a_nan_on_one_side_a_shape_and_a_missing_tensor_are_infinite_errors() -> None:
    one = torch.ones(3, dtype=torch.float64)
    assert error(torch.full((3,), math.nan).double(), one, 1.0) == math.inf
    assert error(torch.ones(3, 1).double(), one, 1.0) == math.inf
    found = compare({}, {"sgd/0/outputs/y": one}, RATES)
    assert found["outputs"].value == math.inf
    assert found["outputs"].where == "sgd/0/outputs/y"


def test_equal_infinities_are_equal() -> None:
    both = torch.tensor([math.inf, -math.inf, math.nan, 2.0]).double()
    assert error(both.clone(), both, 0.0) == 0.0


def test_a_gradient_that_one_side_lacks_counts_as_zero() -> None:
    assert compare({"sgd/0/gradients/w": torch.zeros(2)}, {}, RATES)["gradients"].value == 0.0
    assert compare({"sgd/0/gradients/w": torch.ones(2)}, {}, RATES)["gradients"].value == math.inf


def test_floors_are_a_millionth_of_the_largest_gradient_and_rate_times_steps() -> None:
    reference = {
        "sgd/1/gradients/big": torch.tensor([200.0]).double(),
        "sgd/1/gradients/zero": torch.tensor([0.0]).double(),
        "sgd/1/parameters/zero": torch.tensor([0.0]).double(),
    }
    ours = {key: value + 1e-12 for key, value in reference.items()}
    ours["sgd/1/gradients/big"] = reference["sgd/1/gradients/big"]
    found = compare(ours, reference, RATES)
    assert math.isclose(found["gradients"].value, 1e-12 / 2e-4)
    assert math.isclose(found["parameters"].value, 1e-12 / (0.05 * 2))


def pieces() -> tuple[float, float, float]:
    """Errors of a spread tensor: right, wrong in rank 1's piece, and wrong there but compared as a whole."""
    mesh = init_device_mesh("cpu", (2,))
    reference = torch.arange(1.0, 6.0, dtype=torch.float64)
    found = []
    for shift, whole in ((0.0, False), (1.0, False), (1.0, True)):
        ours = distribute_tensor(reference.clone(), mesh, [Shard(0)], src_data_rank=None)
        ours.to_local().add_(shift * dist.get_rank())
        comparison = Comparison({"sgd/0/outputs/y": reference}, RATES)
        comparison.see("sgd/0/outputs/y", ours, whole)
        found.append(comparison.finish()["outputs"].value)
    return found[0], found[1], found[2]


def test_a_rank_compares_its_own_piece_by_the_scale_of_the_whole(ranks: Pool) -> None:
    assert ranks.run(pieces, world=2) == [(0.0, 0.0, 0.2), (0.0, 0.2, 0.2)]


def test_a_report_exits_with_the_gravest_status() -> None:
    def code(*states: str) -> int:
        return Report("m", 2, [Row(f"f{i}", s, "why") for i, s in enumerate(states)]).exit_code

    assert code("ok", "known") == OK
    assert code("ok", "refused") == REFUSED
    assert code("refused", "mismatch") == MISMATCH
    assert code("failed") == MISMATCH


def test_a_mismatch_names_the_kinds_and_the_worst_tensor() -> None:
    ours = {"sgd/0/loss/": torch.tensor(2.0).double()}
    found = compare(ours, {"sgd/0/loss/": torch.tensor(1.0).double()}, RATES)
    assert judge(found) == ("mismatch", "loss; worst 1.00e+00 at sgd/0/loss/")
