"""When things happen: what overlaps, what waits, what a step adds up to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.api import Compiler
from autopar.cluster import ClusterSpec, parse
from autopar.cost.price import price
from autopar.cost.timeline import COMPUTE, Event, Timeline, timeline
from autopar.cost.trace import save_trace, trace
from autopar.models import mlp

DEVICE = {"memory_bytes": 1e10, "flops_per_s": {"float32": 1e12}, "memory_bytes_per_s": 1e11, "launch_s": 1e-6}


def cluster(kind: str, **device: object) -> ClusterSpec:
    links = [{"devices": 4, "latency_s": 1e-5, "bytes_per_s": 1e9}]
    return parse({"name": "here", "devices": 4, "device": {"type": kind, **DEVICE, **device}, "links": links}, "here")


def told(where: ClusterSpec, strategy: str = "ddp()", buckets: int = 2**20) -> tuple[Timeline, float]:
    """The timeline of a perceptron, and the sum of everything in it."""
    model, batch = mlp.build(b=16, d=200, f=300, g=240, o=60, dropout=0.0)
    compiler = Compiler(where, strategy=strategy)
    graph = compiler.graph(model, batch, {})
    plan = replace(compiler.made(graph, frozenset(), None), bucket_bytes=buckets, copied_bytes=buckets)
    program, axes = compiler.emit(graph, plan), compiler.axes(graph)
    return timeline(program, graph, axes, where, 2), price(program, graph, axes, where, 2)


def test_on_cpu_everything_happens_in_turn() -> None:
    found, total = told(cluster("cpu"))
    assert all(a.end_s <= b.start_s + 1e-12 for a, b in zip(found.events, found.events[1:]))
    assert found.exposed_s == pytest.approx(found.communication_s)
    assert found.step_s <= total  # less, by the latencies of reductions that share a bucket


def test_elsewhere_reductions_go_on_beside_backward() -> None:
    found, total = told(cluster("cuda"), buckets=0)
    backward = [e for e in found.events if e.phase == "backward"]
    sending = [e for e in backward if e.stream == "data"]
    assert any(s.start_s < c.start_s < s.end_s for s in sending for c in backward if c.stream == COMPUTE)
    assert found.exposed_s < found.communication_s
    assert found.step_s < total


def test_what_is_hidden_slows_the_ops_beside_it() -> None:
    events = (Event("a", "forward", COMPUTE, 0.0, 3.0), Event("r", "forward", "data", 1.0, 5.0))
    assert Timeline(events).exposed_s == pytest.approx(2.0)
    assert Timeline(events, overlap=1.5).exposed_s == pytest.approx(2.0 + 0.5 * 2.0)


def test_a_step_adds_the_optimizer_and_what_python_takes() -> None:
    plain, _ = told(cluster("cpu"))
    with_python, _ = told(cluster("cpu", step_s=1e-3, parameter_s=1e-4, agree_s=1e-5))
    assert with_python.step_s - plain.step_s == pytest.approx(1e-3 + 6 * 1e-4 + 1e-5)
    assert plain.step_s == pytest.approx(plain.compute_s + plain.exposed_s + plain.optimizer_s)


def test_zero_updates_a_part_of_every_parameter() -> None:
    whole, parts = told(cluster("cpu", launch_s=0.0))[0], told(cluster("cpu", launch_s=0.0), "zero(2)")[0]
    assert whole.optimizer_s == pytest.approx(4 * parts.optimizer_s)


def test_processes_that_share_cores_take_as_many_times_longer() -> None:
    alone, shared = told(cluster("cpu"))[0], told(cluster("cpu", at_once=2))[0]
    assert shared.compute_s == pytest.approx(2 * alone.compute_s)


def test_a_trace_holds_every_event_on_the_thread_of_its_stream(tmp_path: Path) -> None:
    found, _ = told(cluster("cuda"))
    save_trace(found, "mlp", tmp_path / "out.json")
    read = json.loads((tmp_path / "out.json").read_text())
    assert read == json.loads(json.dumps(trace(found, "mlp")))
    names = {e["tid"]: e["args"]["name"] for e in read["traceEvents"] if e["name"] == "thread_name"}
    drawn = [e for e in read["traceEvents"] if e["ph"] == "X"]
    assert len(drawn) == len(found.events)
    assert {(e["name"], names[e["tid"]]) for e in drawn} == {(e.name, e.stream) for e in found.events}
    assert max(e["ts"] + e["dur"] for e in drawn) == pytest.approx(1e6 * max(e.end_s for e in found.events))
