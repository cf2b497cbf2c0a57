"""A timeline as a file that Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) draw.

In: a `Timeline`.  Out: JSON in the Trace Event Format.  Next: `bill.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autopar.cost.timeline import Timeline


def trace(told: Timeline, name: str) -> dict[str, Any]:
    """Complete events ("X") in microseconds, a thread for each stream, and the threads' names."""
    streams = {stream: i for i, stream in enumerate(dict.fromkeys(event.stream for event in told.events))}
    threads = [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": stream}}
        for stream, tid in streams.items()
    ]
    events = [
        {
            "ph": "X",
            "pid": 0,
            "tid": streams[e.stream],
            "ts": 1e6 * e.start_s,
            "dur": 1e6 * e.seconds,
            "name": e.name,
            "cat": e.phase,
            "args": {"source": e.source},
        }
        for e in told.events
    ]
    process = {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}
    totals = {"step_s": told.step_s, "exposed_s": told.exposed_s, "utilisation": told.utilisation}
    return {"traceEvents": [process, *threads, *events], "displayTimeUnit": "ms", "otherData": totals}


def save_trace(told: Timeline, name: str, path: Path) -> None:
    """Write a trace."""
    path.write_text(json.dumps(trace(told, name)) + "\n", encoding="utf-8")
