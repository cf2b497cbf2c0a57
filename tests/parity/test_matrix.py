"""Every model on every world: plan families and random legal plans against the single device."""

from __future__ import annotations

import pytest

from autopar.verify.families import FAMILIES, names
from autopar.verify.run import Harness
from tests.parity.cases import BROAD, CELLS, COMMON, TARGETS, WORLDS, common_family

cells = pytest.mark.parametrize(("model", "world"), CELLS, ids=[f"{m}-{w}" for m, w in CELLS])


@pytest.mark.parametrize(("model", "world"), COMMON, ids=[f"{m}-{w}" for m, w in COMMON])
def test_a_family_and_random_plans_equal_one_device(harness: Harness, model: str, world: int) -> None:
    report = harness.verify(TARGETS[model], world, [common_family(model, world)], random=3, seed=world)
    assert report.exit_code == 0, report.text()


@pytest.mark.slow
@cells
def test_every_family_equals_one_device(harness: Harness, model: str, world: int) -> None:
    report = harness.verify(TARGETS[model], world)
    assert report.exit_code == 0, report.text()


@pytest.mark.slow
@cells
def test_25_random_legal_plans_equal_one_device(harness: Harness, model: str, world: int) -> None:
    report = harness.verify(TARGETS[model], world, [], random=25, seed=100 + world)
    assert report.exit_code == 0, report.text()


@pytest.mark.parametrize("model", BROAD)
def test_other_kinds_of_models_equal_one_device(harness: Harness, model: str) -> None:
    target, family = BROAD[model]
    report = harness.verify(target, 2, [family])
    assert report.exit_code == 0, report.text()


@pytest.mark.slow
@pytest.mark.parametrize("model", BROAD)
def test_other_kinds_of_models_equal_one_device_under_every_family(harness: Harness, model: str) -> None:
    report = harness.verify(BROAD[model][0], 4)
    assert report.exit_code == 0, report.text()


@pytest.mark.slow
@pytest.mark.parametrize("model", BROAD)
def test_other_kinds_of_models_equal_one_device_under_random_plans(harness: Harness, model: str) -> None:
    report = harness.verify(BROAD[model][0], 3, [], random=10, seed=11)
    assert report.exit_code == 0, report.text()


def test_the_common_run_takes_every_family_on_every_world() -> None:
    for world in WORLDS:
        taken = {common_family(model, w) for model, w in COMMON if w == world}
        assert taken | {family for _, family in BROAD.values()} == set(names(world))
    listed = {name for name, family in FAMILIES.items() if not family.named}
    assert {name for world in WORLDS for name in names(world)} == listed
