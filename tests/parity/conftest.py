"""One harness, and so one set of ranks, for all cells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autopar.verify.run import Harness
from tests.parity.cases import WORLDS


@pytest.fixture(scope="session")
def harness() -> Iterator[Harness]:
    with Harness(max(WORLDS)) as made:
        yield made
