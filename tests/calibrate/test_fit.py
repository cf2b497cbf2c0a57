"""What calibration makes of what it timed: known devices come out of the samples that they would give."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.calibrate.collectives import Moving, groups
from autopar.calibrate.fit import curves, joined, products
from autopar.calibrate.overhead import Overhead
from autopar.calibrate.probe import Sample
from autopar.calibrate.run import linked, outside
from autopar.cluster import ClusterSpec, parse
from autopar.cost.compute import Work
from autopar.layout import Mesh

SIZES = [(m, n, k) for m in (12, 90, 640) for n in (20, 150, 900) for k in (28, 210, 1100)]


def test_products_of_a_known_device_give_its_constants() -> None:
    def seconds(m: int, n: int, k: int) -> float:
        return 4e-6 + 2 * m * n * k / (8e10 * m / (m + 30) * n / (n + 10) * k / (k + 50))

    found = products(
        [Sample(Work("mm", "float32", 0, 2.0 * m * n * k, 0, (1, m, n, k)), seconds(m, n, k)) for m, n, k in SIZES]
    )
    assert found.flops_per_s == pytest.approx(8e10, rel=0.01)
    assert found.half == pytest.approx((30, 10, 50), rel=0.05)
    assert found.launch_s == pytest.approx(4e-6, rel=0.05)
    assert found.error < 1e-3


def test_sizes_of_about_one_are_one_point() -> None:
    curve = joined([(100.0, 3e-6), (225.0, 5e-6), (6400.0, 9e-6)])
    assert [x for x, _ in curve.root] == pytest.approx([150.0, 6400.0])
    assert [s for _, s in curve.root] == pytest.approx([4e-6, 9e-6])


def test_plain_ops_tell_of_kinds_that_were_not_met_and_products_of_none() -> None:
    met = [Sample(Work(kind, "float32", size), s) for kind, size, s in (("add", 100, 1e-6), ("mul", 9000, 2e-6))]
    found = curves([*met, Sample(Work("mm", "float32", 500, 8.0, 0, (1, 2, 2, 1)), 7e-6)])
    assert found["any"].at(100) == pytest.approx(1e-6)
    assert found["any"].at(9000) == pytest.approx(2e-6)
    assert found.keys() == {"any"}  # one size is no curve


def test_what_a_step_costs_beside_its_programs_is_told_apart() -> None:
    def cost(parameters: int, size: int) -> Overhead:
        return Overhead(parameters, size, parameters * 2e-5 + 7 * size * 1e-10, 1e-3 + parameters * 3e-5)

    found = outside([cost(16, 1000), cost(76, 1000), cost(16, 30_000_000)])
    assert found == pytest.approx((1e-3, 5e-5, 1e-10), rel=0.01)


def test_a_curve_holds_for_groups_measured_while_as_many_devices_worked(tmp_path: Path) -> None:
    rows = {w: [Moving("all_reduce", 2, b, 1e-4 * w * b / 1e3) for b in (2**10, 2**22)] for w in (2, 4)}
    base = ClusterSpec.preset("cpu-gloo", devices=4)
    link = {**base.links[0].model_dump(), "devices": 4, **linked(rows)}
    here = parse({**base.model_dump(mode="json"), "links": [link]}, "here")
    here.save(tmp_path / "here.yaml")
    read = ClusterSpec.load(tmp_path / "here.yaml")
    curve = read.topology(Mesh(("data", "model"), (2, 2)), "model").measured[0]
    assert (curve.beside, curve.points.at(2**10)) == (4, pytest.approx(4 * 1e-4 * 1.024, rel=1e-3))
    assert read.with_devices(2).topology(Mesh(("data",), (2,)), "data").measured[0].beside == 2


def test_groups_divide_the_ranks() -> None:
    assert groups(4) == [2, 4]
    assert groups(6) == [2, 6]
    assert groups(3) == [3]
