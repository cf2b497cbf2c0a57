"""Shared by all tests: golden texts, ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autopar.verify.pool import Pool

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden texts anew")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that takes ranks carries the mark `ranks`: such tests need the machine to themselves."""
    for item in items:
        if {"ranks", "harness", "pool"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.ranks)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares `text` with tests/golden/NAME.txt, or writes it under --update-golden."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            GOLDEN.mkdir(exist_ok=True)
            path.write_text(text + "\n")
        assert path.exists(), f"no {path}; run pytest with --update-golden"
        assert text + "\n" == path.read_text()

    return compare


@pytest.fixture(autouse=True, scope="session")
def no_cached_plans() -> Iterator[None]:
    """Tests see only plans that they made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPAR_CACHE", "off")
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Four gloo ranks for the whole session; `ranks.run(fn, ..., world=2)` uses the first two."""
    with Pool(4) as pool:
        yield pool
