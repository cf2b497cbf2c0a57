"""Collective formulas, taken apart as expressions and against published costs; the choice between them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import ClusterSpec
from autopar.cost.algorithms import (
    ALGORITHMS,
    LIBRARIES,
    ONE_LEVEL,
    OPPOSITE,
    Algorithm,
    a,
    at,
    b,
    c,
    expression,
    f,
    k,
    n,
    s,
    w,
)
from autopar.cost.comm import CHUNKS, bus_bytes, candidates, choose, collective_s, step_s
from autopar.cost.trees import first_chunk_steps
from autopar.curve import Curve
from autopar.layout import Layout, Mesh, conversion
from autopar.links import Link, Measured, alone, way

LINK = Link(devices=8, latency_s=3e-6, bytes_per_s=2e11)
HOSTS = (LINK, Link(devices=48, latency_s=11e-6, bytes_per_s=1.7e10))
BUS = {
    "all_reduce": 2 * (n - 1) / n,
    "all_gather": (n - 1) / n,
    "reduce_scatter": (n - 1) / n,
    "all_to_all": (n - 1) / n,
    "broadcast": sympy.Integer(1),
    "send_recv": sympy.Integer(1),
}
BEST = {"broadcast": "chain", "all_to_all": "pairwise", "send_recv": "direct"}  # for large messages; else the ring


@pytest.mark.parametrize("kind", sorted(ONE_LEVEL))
def test_large_messages_cost_the_bus_factor_of_their_bytes(kind: str) -> None:
    formula = ONE_LEVEL[kind][BEST.get(kind, "ring")].subs(c, sympy.sqrt(b))  # ever more chunks, ever larger ones
    assert sympy.simplify(sympy.limit(formula / b, b, sympy.oo) - BUS[kind] / w) == 0
    assert float(BUS[kind].subs(n, 5)) == pytest.approx(bus_bytes(kind, 1.0, 5))


@pytest.mark.parametrize("scatter", OPPOSITE)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(scatter: str) -> None:
    both = ONE_LEVEL["reduce_scatter"][scatter] + ONE_LEVEL["all_gather"][OPPOSITE[scatter]]
    whole = ONE_LEVEL["all_reduce"]["ring" if scatter == "ring" else "halving_doubling"]
    assert sympy.simplify((whole - both).subs(n, 2**k).subs(sympy.Min(0, 1), 0)) == 0


def test_the_published_costs_of_an_all_reduce() -> None:
    """Thakur, Rabenseifner & Gropp 2005; Sanders et al. 2009; reduce-scatter, all-reduce and all-gather over hosts."""
    eight = {n: 8, k: 3}
    assert sympy.simplify((ONE_LEVEL["all_reduce"]["halving_doubling"] - (6 * a + 2 * b * 7 / 8 / w)).subs(eight)) == 0
    six = ONE_LEVEL["all_reduce"]["halving_doubling"].subs({n: 6, k: 2})  # 2 of 6 hand theirs to others, twice b bytes
    assert sympy.simplify(six - (2 * (a + b / w) + 4 * a + 2 * b * sympy.Rational(3, 4) / w)) == 0
    tree = ONE_LEVEL["all_reduce"]["tree"].subs({n: 8, f: first_chunk_steps(8)})
    assert sympy.limit(tree.subs(a, 0), c, sympy.oo) == 2 * b / w
    hosts = expression(Algorithm("all_reduce", "hierarchical", "ring", "ring"), 2)
    (g, ai, wi), (m, ae, we) = ([at(x, level) for x in (n, a, w)] for level in (0, 1))
    inside = 2 * (g - 1) * ai + 2 * (g - 1) / g * b / wi
    assert sympy.simplify(hosts - s - inside - 2 * (m - 1) * ae - 2 * (m - 1) / m * (b / g) / we) == 0


@pytest.mark.parametrize("kind", sorted(ALGORITHMS))
def test_one_device_pays_nothing(kind: str) -> None:
    assert collective_s(kind, 1e6, 1, LINK) == 0


def test_small_messages_pay_the_fewest_latencies() -> None:
    assert ONE_LEVEL["all_gather"]["ring"].subs({b: 0}) == (n - 1) * a
    assert collective_s("all_gather", 0, 8, LINK) == pytest.approx(3 * 3e-6)
    assert collective_s("all_gather", 0, 7, LINK) == pytest.approx(6 * 3e-6)
    assert choose("all_reduce", 0, alone(LINK, 8)).name == "halving_doubling"
    slow_start = LINK.model_copy(update={"start_s": 5e-5})
    assert collective_s("all_gather", 0, 8, slow_start) == pytest.approx(3 * 3e-6 + 5e-5)


@settings(deadline=None)  # formulas are made when first used
@given(st.integers(2, 48), st.floats(0, 1e10), st.sampled_from(sorted(ALGORITHMS)))
def test_nothing_is_cheaper_than_what_is_chosen(devices: int, count: float, kind: str) -> None:
    topology = way(HOSTS, 1, devices, 48)
    choice = choose(kind, count, topology)
    ways = [(x, m) for x in candidates(kind, topology) for m in (CHUNKS if x.algorithm.chunked else (1,))]
    assert choice.seconds == pytest.approx(min(x.seconds(count, m) for x, m in ways), rel=1e-12)
    least = max(level.link.latency_s for level in topology.levels)
    assert choice.seconds >= least
    if len(topology.levels) == 1:  # no algorithm beats the bytes that have to pass each link
        assert choice.seconds >= bus_bytes(kind, count, devices) / topology.levels[0].link.bytes_per_s


@settings(deadline=None)  # formulas are made when first used
@given(st.integers(2, 48), st.lists(st.floats(0, 1e10), min_size=2, max_size=9), st.sampled_from(sorted(ALGORITHMS)))
def test_more_bytes_never_take_less_time(devices: int, counts: list[float], kind: str) -> None:
    topology = way(HOSTS, 1, devices, 48)
    seconds = [choose(kind, count, topology).seconds for count in sorted(counts)]
    assert all(before <= after * (1 + 1e-12) for before, after in pairwise(seconds))


def test_an_all_reduce_over_hosts_goes_through_all_cards_once_it_is_large() -> None:
    topology = way(HOSTS, 1, 48, 48)
    assert choose("all_reduce", 2**30, topology).seconds < 0.3 * candidates("all_reduce", topology)[0].seconds(2**30)
    one_card = (LINK, HOSTS[1].model_copy(update={"shared_by": 8}))
    shared = way(one_card, 1, 48, 48)
    assert choose("all_reduce", 2**30, shared).seconds > 6 * choose("all_reduce", 2**30, topology).seconds


def test_groups_that_share_a_card_get_a_part_of_it() -> None:
    one_card = (LINK, HOSTS[1].model_copy(update={"shared_by": 8, "latency_s": 0.0}))
    strided = way(one_card, 8, 6, 48)
    own = way((LINK, HOSTS[1].model_copy(update={"latency_s": 0.0})), 8, 6, 48)
    for kind in ALGORITHMS:
        assert choose(kind, 1e8, strided).seconds == pytest.approx(8 * choose(kind, 1e8, own).seconds)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", sorted(ALGORITHMS))
def test_every_library_can_do_every_collective_everywhere(kind: str, library: str) -> None:
    racks = (*HOSTS, Link(devices=96, latency_s=2e-5, bytes_per_s=9e9))
    for stride, size in ((1, 5), (1, 8), (1, 48), (8, 6), (1, 12), (1, 96), (8, 12)):
        assert choose(kind, 1e6, way(racks, stride, size, 96, library)).seconds > 0  # type: ignore[arg-type]


def test_names_in_the_table_of_libraries_exist() -> None:
    every = {algorithm.name for kind in ALGORITHMS.values() for algorithm in kind}
    assert all(set(names) <= every for names in LIBRARIES.values())


# --- measured curves --------------------------------------------------------------------------------------------------


CURVE = Measured(collective="all_gather", devices=6, points=Curve(((1000.0, 2e-5), (64000.0, 8e-5), (1e6, 1e-3))))


def test_a_curve_is_straight_between_points_and_linear_beyond() -> None:
    assert [CURVE.points.at(x) for x in (0, 1000, 64000, 1e6)] == pytest.approx([2e-5, 2e-5, 8e-5, 1e-3])
    assert CURVE.points.at(8000) == pytest.approx(4e-5)  # half way in logarithms
    assert CURVE.points.at(3e6) == pytest.approx(3e-3)


def test_a_measured_curve_holds_for_its_collective_and_number_of_devices_only() -> None:
    measured = LINK.model_copy(update={"measured": (CURVE,)})
    assert collective_s("all_gather", 8000, 6, measured) == pytest.approx(4e-5)
    assert choose("all_gather", 8000, alone(measured, 6)).name == "measured"
    for kind, devices in (("all_gather", 5), ("reduce_scatter", 6)):
        assert collective_s(kind, 8000, devices, measured) == collective_s(kind, 8000, devices, LINK)


def test_a_curve_of_an_outer_level_holds_for_groups_as_they_are_measured() -> None:
    wide = Measured(collective="all_reduce", devices=16, points=Curve(((1e6, 0.5),)))
    narrow = Measured(collective="all_reduce", devices=4, points=Curve(((1e6, 0.25),)))
    links = (LINK, HOSTS[1].model_copy(update={"devices": 128, "measured": (wide, narrow)}))
    assert choose("all_reduce", 1e6, way(links, 1, 16, 128)).seconds == 0.5  # two full hosts
    assert choose("all_reduce", 1e6, way(links, 8, 16, 128)).name != "measured"  # one device a host
    assert choose("all_reduce", 1e6, way(links, 8, 4, 128)).seconds == 0.25
    assert choose("all_reduce", 1e6, way(links, 1, 4, 128)).name != "measured"


# --- steps of a conversion --------------------------------------------------------------------------------------------


def test_a_step_is_priced_by_its_larger_end_and_axis() -> None:
    cluster = ClusterSpec.preset("dgx-h100", hosts=2)
    mesh = Mesh(("data", "model"), (2, 8))
    whole = Layout.whole(((64,), (96,)))
    (gather,) = conversion(whole.with_cut((0, 0), ("model",)), whole, mesh) or ()
    inner = cluster.links[0]
    expected = cluster.device.launch_s + inner.start_s + 7 * inner.latency_s + 7 / 8 * 64 * 96 * 4 / inner.bytes_per_s
    assert step_s(gather, 4, mesh, cluster) == pytest.approx(expected)
    (slice_,) = conversion(whole, whole.with_cut((0, 0), ("model",)), mesh) or ()
    assert step_s(slice_, 4, mesh, cluster) < step_s(gather, 4, mesh, cluster) / 2


def test_an_axis_over_hosts_costs_more_than_one_inside() -> None:
    cluster = ClusterSpec.preset("dgx-a100-80", hosts=4)
    mesh = Mesh(("data", "model"), (4, 8))
    whole = Layout.whole(((4096,), (9216,)))
    across, inside = (
        step_s(steps[0], 4, mesh, cluster)
        for axis in ("data", "model")
        for steps in [conversion(whole.with_pending(axis, "sum"), whole, mesh) or ()]
    )
    bytes_ = 4096 * 9216 * 4
    assert across == pytest.approx(1.5 * bytes_ / cluster.links[1].bytes_per_s, rel=0.05)
    assert inside == pytest.approx(1.75 * bytes_ / cluster.links[0].bytes_per_s, rel=0.1)
    assert math.isfinite(across)
