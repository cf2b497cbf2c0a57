"""Small programmes whose relaxation is fractional."""

from __future__ import annotations

import pytest

from autopar.planner import solver
from autopar.planner.solver import Model


def cover(spare: float) -> Model:
    """At least one of each two of three, which cost 1 each (relaxed 1.5, whole 2), or a fourth for all, at `spare`."""
    model = Model()
    a, b, c, rest = (model.binary() for _ in range(4))
    for one, other in ((a, b), (b, c), (a, c)):
        model.row([(one, 1.0), (other, 1.0), (rest, 1.0)], 1.0)
    for variable, amount in ((a, 1.0), (b, 1.0), (c, 1.0), (rest, spare)):
        model.cost(variable, amount)
    return model


@pytest.mark.parametrize("whole", [0, 1500])
def test_a_large_programme_is_branched_further_where_what_it_used_is_far_from_the_bound(
    monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    monkeypatch.setattr(solver, "BRANCHED_WHOLE", whole)
    found = cover(spare=1.6).minimise(10)  # the relaxation uses a, b, c only: 2 with them, 1.6 with the fourth
    assert found.objective == pytest.approx(1.6)
    assert found.bound <= found.objective


def test_a_large_programme_near_its_bound_is_not_branched_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "BRANCHED_WHOLE", 0)
    monkeypatch.setattr(solver, "NEAR", 0.3)
    found = cover(spare=1.6).minimise(10)
    assert (found.status, found.objective, found.bound) == ("feasible", pytest.approx(2.0), pytest.approx(1.5))


@pytest.mark.parametrize("whole", [0, 1500])
def test_what_has_no_whole_solution_is_told(monkeypatch: pytest.MonkeyPatch, whole: int) -> None:
    monkeypatch.setattr(solver, "BRANCHED_WHOLE", whole)
    model = Model()
    a, b = model.binary(), model.binary()
    model.row([(a, 1.0), (b, -1.0)], 0.5, 0.5)
    model.cost(a, 1.0)
    assert model.minimise(10).status == "infeasible"
