"""Buffers of collectives by hand: 5 x 7 elements on two devices, of which the first has 3 rows or 4 columns."""

from __future__ import annotations

import pytest

from autopar.cost.staging import chain, staging_elements
from autopar.layout import Layout, Mesh, Step, conversion

MESH = Mesh(("data",), (2,))
WHOLE = Layout.whole(((5,), (7,)))
ROWS, COLUMNS = WHOLE.with_cut((0, 0), ("data",)), WHOLE.with_cut((1, 0), ("data",))
PENDING = Layout(WHOLE.factors, WHOLE.cuts, (("data", "sum"),))

CASES = {
    "rows come padded, and the result is the run in front": (ROWS, WHOLE, (42,), 0 + 7),
    "columns are put in order, then the padding goes": (COLUMNS, WHOLE, (40, 40, 35), 80 - 20 - 35),
    "rows are padded, then summed": (PENDING, ROWS, (42, 21), 35 + 42 - 35 - 21),
    "columns are padded, put in front, then summed": (PENDING, COLUMNS, (40, 40, 20), 80 - 35 - 20),
    "a sum has a buffer for its result": (PENDING, WHOLE, (35,), 0),
}


def step(before: Layout, after: Layout) -> Step:
    (found,) = conversion(before, after, MESH) or ()
    return found


@pytest.mark.parametrize("name", CASES)
def test_buffers_follow_one_another(name: str) -> None:
    before, after, buffers, beside = CASES[name]
    assert chain(step(before, after), MESH) == buffers
    assert staging_elements(step(before, after), MESH) == beside
