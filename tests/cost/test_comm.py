"""Collective formulas, taken apart as expressions and against published ring costs."""

from __future__ import annotations

import pytest
import sympy

from autopar.cluster import ClusterSpec, Link
from autopar.cost.comm import SECONDS, a, b, collective_s, n, step_s, w
from autopar.layout import Layout, Mesh, conversion

LINK = Link(devices=8, latency_s=3e-6, bytes_per_s=2e11)
BUS = {
    "all_reduce": 2 * (n - 1) / n,
    "all_gather": (n - 1) / n,
    "reduce_scatter": (n - 1) / n,
    "all_to_all": (n - 1) / n,
}


@pytest.mark.parametrize("kind", sorted(SECONDS))
def test_large_messages_cost_the_bus_factor_of_their_bytes(kind: str) -> None:
    assert sympy.simplify(sympy.limit(SECONDS[kind] / b, b, sympy.oo) - BUS[kind] / w) == 0


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    both = SECONDS["reduce_scatter"] + SECONDS["all_gather"]
    assert sympy.simplify(SECONDS["all_reduce"] - both) == 0


@pytest.mark.parametrize("kind", sorted(SECONDS))
def test_one_device_pays_nothing(kind: str) -> None:
    assert SECONDS[kind].subs({n: 1}) == 0
    assert collective_s(kind, 1e6, 1, LINK) == 0


def test_latency_grows_with_the_ring() -> None:
    assert SECONDS["all_gather"].subs({b: 0}) == (n - 1) * a
    assert collective_s("all_reduce", 0, 5, LINK) == pytest.approx(8 * 3e-6)


def test_a_step_is_priced_by_its_larger_end_and_axis() -> None:
    cluster = ClusterSpec.preset("dgx-h100", hosts=2)
    mesh = Mesh(("data", "model"), (2, 8))
    whole = Layout.whole(((64,), (96,)))
    (gather,) = conversion(whole.with_cut((0, 0), ("model",)), whole, mesh) or ()
    inner = cluster.links[0]
    expected = cluster.device.launch_s + collective_s("all_gather", 64 * 96 * 4, 8, inner)
    assert step_s(gather, 4, mesh, cluster) == pytest.approx(expected)
    (slice_,) = conversion(whole, whole.with_cut((0, 0), ("model",)), mesh) or ()
    assert step_s(slice_, 4, mesh, cluster) < step_s(gather, 4, mesh, cluster) / 2
