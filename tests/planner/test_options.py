"""The ways to keep a parameter."""

from __future__ import annotations

from autopar.layout import Layout, Mesh
from autopar.planner.options import options, shard, storable

ONE, TWO = Mesh(("data",), (4,)), Mesh(("data", "model"), (2, 4))


def test_a_dim_that_divides_is_preferred_to_an_outer_one_that_does_not() -> None:
    whole = Layout.whole(((50257,), (768,)))
    assert shard(whole, "data", ONE) == whole.with_cut((1, 0), ("data",))


def test_an_uneven_cut_is_taken_where_no_device_goes_without() -> None:
    whole = Layout.whole(((50257,),))
    assert shard(whole, "data", ONE) == whole.with_cut((0, 0), ("data",))
    assert shard(Layout.whole(((5,),)), "data", ONE) is None  # 2, 2, 1 and nothing
    assert shard(Layout.whole(((3,),)), "data", ONE) is None


def test_a_fused_factor_is_cut_inside() -> None:
    whole = Layout.whole(((3, 12, 16), (35,)))
    assert shard(whole, "data", ONE) == whole.with_cut((0, 1), ("data",))


def test_cuts_nest_and_no_piece_is_empty() -> None:
    column = Layout.whole(((6,), (7,))).with_cut((0, 0), ("data",))
    assert shard(column, "model", TWO) == column.with_cut((1, 0), ("model",))
    assert not storable(Layout.whole(((6,),)).with_cut((0, 0), ("model", "data")), TWO)
    assert not storable(Layout.whole(((8,),)).with_pending("data", "sum"), TWO)


def test_frozen_parameters_have_no_levels_for_gradients() -> None:
    factors = ((8,), (12,))
    assert {w.level for w in options(factors, [], ONE, levels=(0, 1, 2, 3))} == {0, 1, 2, 3}
    assert {w.level for w in options(factors, [], ONE, levels=(0, 1, 2, 3), trainable=False)} == {0, 3}


def test_storage_is_home_and_more() -> None:
    whole = Layout.whole(((8,), (12,)))
    for way in options(whole.factors, [whole.with_cut((1, 0), ("model",))], TWO, levels=(1, 2)):
        assert way.home.axes < way.stored.axes
