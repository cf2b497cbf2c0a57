"""The garbage collector is as it was after what runs without it."""

from __future__ import annotations

import gc

import pytest

from autopar.uncollected import uncollected


@uncollected()
def inner() -> bool:
    return gc.isenabled()


@uncollected()
def outer(fails: bool) -> tuple[bool, bool]:
    found = inner(), gc.isenabled()
    if fails:
        raise ValueError
    return found


def test_it_stands_still_inside_and_runs_again_after_errors_and_nested_calls() -> None:
    assert gc.isenabled()
    assert outer(False) == (False, False) and gc.isenabled()
    with pytest.raises(ValueError):
        outer(True)
    assert gc.isenabled()


def test_one_that_stood_still_before_stays_so() -> None:
    gc.disable()
    try:
        assert not inner() and not gc.isenabled()
    finally:
        gc.enable()
