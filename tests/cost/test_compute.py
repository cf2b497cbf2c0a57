"""Seconds of an op: the roofline, the efficiency of products, curves of calibrated devices."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.axes import analyse
from autopar.capture import capture
from autopar.cluster import ClusterSpec
from autopar.cost.compute import Work, is_bias, work_s
from autopar.cost.price import op_work
from autopar.curve import Curve
from autopar.device import Device, Products
from autopar.passes import copy_views
from autopar.planner import plan
from autopar.strategies import ddp

PLAIN = Device(type="cuda", memory_bytes=1e9, flops_per_s={"float32": 1e12}, memory_bytes_per_s=1e11, launch_s=1e-6)


def with_(**fields: object) -> Device:
    return PLAIN.model_copy(update=fields)


def test_an_op_takes_the_longer_of_computing_and_moving_after_its_launch() -> None:
    assert work_s(Work("mm", "float32", 1000, 5e6), PLAIN) == pytest.approx(1e-6 + 5e-6)
    assert work_s(Work("add", "float32", 300_000, 5.0), PLAIN) == pytest.approx(1e-6 + 3e-6)


def test_memory_bandwidth_is_reached_in_part() -> None:
    assert work_s(Work("add", "float32", 300_000), with_(memory_fraction=0.75)) == pytest.approx(1e-6 + 4e-6)


def test_each_size_of_a_product_loses_by_its_half() -> None:
    device = with_(products={"float32": Products(best=0.8, half=(10.0, 30.0, 50.0))})
    fraction = 0.8 * 40 / 50 * 60 / 90 * 75 / 125
    flops = 2.0 * 40 * 60 * 75
    took = work_s(Work("mm", "float32", 0, flops, product=(1, 40, 60, 75)), device)
    assert took == pytest.approx(1e-6 + flops / (fraction * 1e12))


def test_what_is_left_of_tiles_and_of_the_last_round_of_tiles_is_lost() -> None:
    tiles = Products(tile=(64, 32), processors=10)
    assert tiles.fraction(1, 64, 320, 7) == 1.0  # ten tiles, one round
    assert tiles.fraction(1, 64, 321, 7) == pytest.approx(321 / 352 * 11 / 20)  # eleven, two rounds
    assert tiles.fraction(2, 64, 160, 7) == 1.0  # products at once fill a round together


def test_a_curve_holds_instead_of_the_roofline_and_any_for_kinds_that_have_none() -> None:
    kernels = {"gelu": {"float32": Curve(((100.0, 3e-6), (400.0, 6e-6)))}, "any": {"float32": Curve(((100.0, 2e-6),))}}
    device = with_(kernels=kernels)
    assert work_s(Work("gelu", "float32", 200), device) == pytest.approx(3e-6 * 2**0.5)
    assert work_s(Work("relu", "float32", 200), device) == pytest.approx(4e-6)
    assert work_s(Work("gelu", "float64", 300_000), device) == pytest.approx(1e-6 + 3e-6)  # no curve of its dtype


def test_an_attention_is_priced_by_its_pieces() -> None:
    device = with_(kernels={"attention": {"float32": Curve(((1e6, 1e-5), (4e6, 3e-5)))}})
    assert work_s(Work("attention", "float32", 10, flops=6e6, pieces=6), device) == pytest.approx(6e-5)


class Mixed(nn.Module):
    """A product with a bias, one without, an embedding, attention with and without dropout, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(110, 24)
        self.up, self.down = nn.Linear(24, 36), nn.Linear(36, 24, bias=False)
        self.conv = nn.Conv1d(24, 48, 3, groups=4, padding=1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.words(ids)
        x = self.down(F.gelu(self.up(rows), approximate="tanh"))
        q = x.view(8, 10, 3, 8).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q) + F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        return self.conv(self.words(ids.flip(0)).transpose(1, 2)).square().mean() + y.square().mean()


@pytest.fixture(scope="module")
def works() -> Mapping[str, Work]:
    """The work of every forward op on one of two devices of data parallelism, by kind."""
    graph = copy_views(capture(Mixed(), (torch.randint(110, (8, 10)),), {}))
    axes = analyse(graph)
    found = plan(graph, ClusterSpec.preset("cpu-gloo", devices=2), strategy=ddp(), axes=axes)
    ops = [n for n in graph.fx.nodes if n.name in found.ops and n.meta["phase"] == "forward" and not is_bias(n)]
    works = [op_work(node, axes, found) for node in ops]
    return {f"{w.kind} {w.product}" if w.kind == "mm" else w.kind: w for w in works}


def test_sizes_of_a_product_are_those_of_one_device(works: Mapping[str, Work]) -> None:
    assert works["mm (1, 40, 36, 24)"].flops == 2 * 40 * 36 * 24
    assert works["mm (1, 40, 24, 36)"].bytes == 4 * (40 * 24 + 24 * 36 + 40 * 36)


def test_a_convolution_is_a_product_by_groups(works: Mapping[str, Work]) -> None:
    assert works["convolution"].product == (
        4,
        4 * 10,
        12,
        6 * 3,
    )  # groups, examples x places, channels, channels x taps
    assert works["convolution"].pieces == 1


def test_an_embedding_reads_the_rows_that_it_picks(works: Mapping[str, Work]) -> None:
    assert works["embedding"].bytes == 4 * 10 * 8 + 4 * 40 * 24


def test_kinds_tell_variants_apart_that_take_other_times(works: Mapping[str, Work]) -> None:
    assert {"gelu tanh", "attention", "attention written out"} <= works.keys()
    assert works["attention"].pieces == 4 * 3  # heads of every example of this device
