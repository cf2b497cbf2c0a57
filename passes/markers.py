"""Placeholders for what depends on the rank: collectives on a mesh axis, and this device's piece of a dim.

In: nothing.  Out: functions that stand as targets in a program's graphs until `bind` replaces them.  Next: `lower.py`.

A collective's node carries `meta["step"]` (`layout.Step`); a span's carries `meta["span"]` (layout, dim).
"""

from __future__ import annotations

from typing import Any


def _unbound(name: str) -> Any:
    raise AssertionError(f"{name} runs only in a bound program")


def all_reduce(x: Any, axis: str, kind: str) -> Any:
    return _unbound("all_reduce")


def reduce_scatter(x: Any, axis: str, kind: str) -> Any:
    return _unbound("reduce_scatter")


def all_gather(x: Any, axis: str) -> Any:
    return _unbound("all_gather")


def all_to_all(x: Any, axis: str) -> Any:
    return _unbound("all_to_all")


def slice(x: Any, axis: str) -> Any:
    return _unbound("slice")


def to_pending(x: Any, axis: str) -> Any:
    return _unbound("to_pending")


def relabel(x: Any, axis: str) -> Any:
    return _unbound("relabel")


def span_start() -> Any:
    return _unbound("span_start")


def span_length() -> Any:
    return _unbound("span_length")


COLLECTIVES = {f.__name__: f for f in (all_reduce, reduce_scatter, all_gather, all_to_all, slice, to_pending, relabel)}
SPANS = (span_start, span_length)
