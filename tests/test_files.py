"""Plans as JSON: what is written is read back, what is wrong is refused with its place in the file."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from autopar import files
from autopar.cluster import ClusterSpec
from autopar.errors import PlanError, UnsafeFileError
from autopar.fingerprint import check, fingerprint
from autopar.graph import Graph, Input, Output
from autopar.layout import Layout, Mesh
from autopar.plan import ParameterPlan, Plan

AXES = ("data", "model", "pipe")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    factors = draw(st.lists(st.lists(st.integers(2, 99), max_size=3).map(tuple), max_size=4).map(tuple))
    free = list(draw(st.permutations(AXES)))
    cuts = tuple(tuple(tuple(free.pop() for _ in range(draw(st.integers(0, len(free))))) for _ in d) for d in factors)
    pending = tuple(sorted((axis, draw(st.sampled_from(["sum", "max", "min"]))) for axis in free))
    return Layout(factors, cuts, pending)


def example() -> Plan:
    weight = Layout(((9, 7), (5,)), (((), ("model",)), ((),)))
    return Plan(
        Mesh(("data", "model"), (2, 3)),
        {"mm": ("m", "k"), "relu": (".1", "")},
        {"weight": ParameterPlan(3, weight, weight.with_cut((1, 0), ("data",)), keep=True)},
        inputs={"x": Layout(((12,), (5,)), ((("data", "model"),), ((),)))},
        costs={"step_s": 0.25},
        certificate={"gap": 0.0, "tried": ["mesh(data=6): 0.4 s"]},
        fingerprint={"graph": "abc"},
    )


@given(layouts())
def test_a_layout_reads_back_from_how_it_prints(layout: Layout) -> None:
    assert files.read_layout(files.write_layout(layout)) == layout


def test_a_plan_reads_back_from_its_json(tmp_path: Path) -> None:
    example().save(tmp_path / "plan.json")
    assert files.load(tmp_path / "plan.json") == Plan.load(str(tmp_path / "plan.json")) == example()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("autopar_plan",), 7, "plan: autopar_plan is 7, this version of autopar reads 1"),
        (("mesh", "data"), "2", "plan: mesh.data: Input should be a valid integer"),
        (
            ("parameters", "weight", "level"),
            4,
            "plan: parameters.weight.level: Input should be less than or equal to 3",
        ),
        (("parameters", "weight", "sharded"), 1, "plan: parameters.weight.sharded: Extra inputs are not permitted"),
        (
            ("parameters", "weight", "home"),
            "[9@pipe]",
            "plan: parameters.weight.home: mesh(data=2, model=3) has no axis pipe",
        ),
        (
            ("parameters", "weight", "stored"),
            "9 x 5",
            "plan: parameters.weight.stored: '9 x 5' is no layout; write one like [64@data, 16]{sum:model}",
        ),
        (("ops", "mm"), ["m"], "plan: ops.mm: 1 roles for the 2 axes of mesh(data=2, model=3)"),
    ],
)
def test_a_mistake_is_told_with_its_path_in_the_file(path: tuple[str, ...], value: object, message: str) -> None:
    document = json.loads(files.dumps(example()))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(PlanError) as error:
        files.loads(json.dumps(document))
    what, _, way_out = str(error.value).partition("\n")
    assert what == message
    assert way_out.startswith("  try: ")


def test_broken_json_is_told_with_its_line() -> None:
    with pytest.raises(PlanError, match=r"^plan:3: no JSON: "):
        files.loads('{\n"mesh": {},\noops')


class Payload:
    def __reduce__(self) -> tuple[object, ...]:
        return (open, ("marker", "w"))


def test_a_pickle_is_refused_unopened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(UnsafeFileError, match="is no JSON text and was not opened; plans are JSON files"):
        files.load(tmp_path / "plan.json")
    assert not (tmp_path / "marker").exists()


# --- the cache --------------------------------------------------------------------------------------------------------


def test_a_cached_plan_is_made_once(tmp_path: Path) -> None:
    made = []

    def make() -> Plan:
        made.append(1)
        return example()

    for _ in range(3):
        assert files.cached({"graph": "abc"}, make, tmp_path) == example()
    assert len(made) == 1


def test_a_corrupt_cache_entry_is_logged_and_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files.cached({"graph": "abc"}, example, tmp_path)
    (entry,) = tmp_path.iterdir()
    for garbage in ("{", "\x80pickle", '{"autopar_plan": 1}', files.dumps(example()).replace("abc", "xyz")):
        entry.write_text(garbage)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "autopar"):
            assert files.cached({"graph": "abc"}, example, tmp_path) == example()
        assert len(caplog.records) == 1
        assert files.load(entry) == example()


def test_the_cache_folder_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    assert files.cache_folder() == tmp_path


# --- fingerprints -----------------------------------------------------------------------------------------------------


def graph(batch: int, sequence: int, op: object = torch.ops.aten.relu.default, name: str = "x") -> Graph:
    traced = fx.Graph()
    x = traced.placeholder(name)
    x.meta["val"] = torch.empty(batch, sequence, device="meta")
    y = traced.call_function(op, (x,))  # type: ignore[arg-type]
    y.meta["val"] = x.meta["val"]
    traced.output((y,))
    return Graph(traced, (Input(name, "input", "args[0]"),), (Output("output", "", y.name),))


def plan_for(made_for: dict[str, str]) -> Plan:
    plan = example()
    return Plan(plan.mesh, plan.ops, plan.parameters, fingerprint=made_for)


def test_a_plan_is_refused_under_another_shape_and_the_field_is_named() -> None:
    plan = plan_for(fingerprint(graph(16, 32), "cluster"))
    check(plan, fingerprint(graph(16, 32), "cluster"))
    with pytest.raises(PlanError) as error:
        check(plan, fingerprint(graph(32, 8), "cluster"))
    assert str(error.value) == (
        "the plan was made for something else: inputs: args[0]: f32[16, 32] in the plan, args[0]: f32[32, 8] here\n"
        '  try: plan again, or load it with reuse="placements" to keep where its parameters are and price the rest anew'
    )


def test_a_plan_for_another_cluster_is_refused_with_the_fields_that_differ() -> None:
    plan = plan_for(fingerprint(graph(16, 32), ClusterSpec.preset("cpu-gloo", devices=6)))
    with pytest.raises(PlanError) as error:
        check(plan, fingerprint(graph(16, 32), ClusterSpec.preset("cpu-gloo", devices=4)))
    assert str(error.value) == (
        "the plan was made for another cluster: devices 6 in the plan, 4 here; links.0.devices 6 in the plan, 4 here\n"
        "  try: the cluster that it was made for (`autopar run --plan FILE` alone takes that), plan again for this "
        'one (`autopar plan --cluster ... --devices ...`), or reuse="placements" on as many devices'
    )


def test_a_fingerprint_sees_ops_and_clusters_but_no_names() -> None:
    base = fingerprint(graph(16, 32), "cluster")
    assert fingerprint(graph(16, 32, name="z"), "cluster") == base
    other = fingerprint(graph(16, 32, op=torch.ops.aten.sigmoid.default), "cluster")
    assert {field for field in base if base[field] != other[field]} == {"graph"}
    assert fingerprint(graph(16, 32), "another")["cluster"] != base["cluster"]
    assert fingerprint(graph(16, 32), "cluster", {"memory_bytes": 5})["options"] == "memory_bytes=5"
