"""Functions that make large graphs run without Python's garbage collector.

In: a function.  Out: the same one, faster.  Next: `capture.py`.

A graph is tens of thousands of objects that all live until it is done, and the collector walks through all of them each
time some hundreds were added.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """As a decorator: the collector stands still while the function runs, and is as before afterwards."""
    ran = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ran:
            gc.enable()
