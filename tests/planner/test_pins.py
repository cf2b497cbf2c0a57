"""Pins are constraints on the programme: what they name is so, alone, beside a strategy, on one block of many."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import pins as reading
from autopar.axes import Axes, analyse, letter_names
from autopar.capture import capture
from autopar.cluster import ClusterSpec
from autopar.errors import AutoparError, InputError, NoPlan, UnsupportedError
from autopar.graph import Graph
from autopar.models import mlp
from autopar.models.gpt import build
from autopar.passes import copy_views, emit
from autopar.plan import Plan
from autopar.planner import plan
from autopar.strategies import ddp, pipeline, tensor, zero
from autopar.verify.simulate import run
from tests.harness.reference import errors, run_whole, values_of

CLUSTER = ClusterSpec.preset("cpu-gloo", devices=4)


@pytest.fixture(scope="module")
def case() -> tuple[Graph, Axes]:
    model, args = build(b=12, s=8, v=48, d=36, heads=12, f=60, layers=3)
    graph = copy_views(capture(model, args, {}))
    return graph, analyse(graph)


def planned(case: tuple[Graph, Axes], pins: dict[str, Any], **options: Any) -> Plan:
    graph, axes = case
    return plan(graph, CLUSTER, axes=axes, pins=reading.parse(pins), **options)


def words(case: tuple[Graph, Axes], made: Plan, module: str) -> dict[str, set[str]]:
    """Per mesh axis, the names of what it cuts at the ops of a module that have a name for it."""
    graph, axes = case
    out: dict[str, set[str]] = {axis: set() for axis in made.mesh.names}
    for node in graph.fx.nodes:
        if node.name in made.ops and f"{node.meta['module']}.".startswith(f"{module}."):
            names = letter_names(axes, node)
            for axis, role in zip(made.mesh.names, made.ops[node.name], strict=True):
                out[axis].add(names.get(role, role))
    return out


# ---- modules ---------------------------------------------------------------------------------------------------------


def test_a_pin_on_one_block_holds_there_and_nowhere_else(case: tuple[Graph, Axes]) -> None:
    """The blocks are one decision otherwise."""
    made = planned(case, {"modules": {"blocks.1.attn": "heads@model"}})
    assert made.mesh.names == ("data", "model")
    assert "heads" in words(case, made, "blocks.1.attn")["model"]
    for other in ("blocks.0.attn", "blocks.2.attn"):
        assert words(case, made, other) == {"data": {""}, "model": {""}}


def test_every_op_that_has_the_letter_is_cut(case: tuple[Graph, Axes]) -> None:
    graph, axes = case
    made = planned(case, {"mesh": {"data": 4}, "modules": {"blocks.*.attn": "batch@data"}})
    checked = 0
    for node in graph.fx.nodes:
        if node.name in made.ops and ".attn" in node.meta["module"] and "batch" in letter_names(axes, node).values():
            assert letter_names(axes, node)[made.ops[node.name][0]] == "batch", node
            checked += 1
    assert checked > 30


def test_the_same_pin_on_every_block_keeps_them_one_decision(case: tuple[Graph, Axes]) -> None:
    mesh = {"data": 2, "model": 2}
    free = planned(case, {"mesh": mesh})
    starred = planned(case, {"mesh": mesh, "modules": {"blocks.*.attn": "batch@data"}})
    one = planned(case, {"mesh": mesh, "modules": {"blocks.1.attn": "batch@data"}})
    assert starred.certificate["variables"] <= free.certificate["variables"] < one.certificate["variables"]


def test_a_mesh_axis_alone_cuts_something_and_whole_cuts_nothing(case: tuple[Graph, Axes]) -> None:
    made = planned(case, {"mesh": {"data": 4}, "modules": {"blocks.0.up": "data", "blocks.1": "whole"}}, strategy=ddp())
    assert "" not in words(case, made, "blocks.0.up")["data"]
    assert words(case, made, "blocks.1") == {"data": {""}}
    assert "batch" in words(case, made, "blocks.2")["data"]


def test_beside_a_strategy_a_pin_rules_the_axes_that_it_names(case: tuple[Graph, Axes]) -> None:
    made = planned(case, {"modules": {"blocks.1": "whole@model"}}, strategy=ddp(2) * tensor(2))
    here, other = words(case, made, "blocks.1"), words(case, made, "blocks.0")
    assert here["model"] == {""} and "heads" in other["model"]
    assert "batch" in here["data"] and "batch" in other["data"]


def test_stages_and_microbatches_are_not_pinned(case: tuple[Graph, Axes]) -> None:
    for pinned in ("batch@stage", "micro"):
        with pytest.raises(InputError, match=r"pins: modules.head.*the axis \w+ is that of a pipeline"):
            planned(case, {"modules": {"head": pinned}}, strategy=pipeline(4, microbatches=3))
    graph, axes = case
    found = planned(case, {"modules": {"blocks.0.attn": "whole"}}, strategy=pipeline(4, microbatches=3))
    emit(graph, axes, found)
    assert set(found.stages.values()) == {0, 1, 2, 3}


def test_the_deeper_pin_counts_then_the_one_without_stars(case: tuple[Graph, Axes]) -> None:
    pins = {"blocks.*.attn": "heads@data", "blocks": "whole", "blocks.1.attn": "sequence@data"}
    made = planned(case, {"mesh": {"data": 4}, "modules": pins})
    assert "heads" in words(case, made, "blocks.0.attn")["data"]
    assert "sequence" in words(case, made, "blocks.1.attn")["data"]
    assert words(case, made, "blocks.0.up") == {"data": {""}}


# ---- parameters ------------------------------------------------------------------------------------------------------


def test_parameters_are_kept_as_pinned(case: tuple[Graph, Axes]) -> None:
    """Also in a layout that the planner does not think of: it cuts the first dim that can be cut."""
    pins = {
        "tokens.weight": "whole",
        "blocks.1.up.weight": "[60, 36@data]",
        "blocks.2.up.weight": {"level": 2, "stored": "[60, 36@data]"},
        "blocks.*.down.weight": "@data",
        "blocks.0.down.weight": {"level": 3, "keep": True},
    }
    made = planned(case, {"mesh": {"data": 4}, "parameters": pins}).parameters
    assert (made["tokens.weight"].level, str(made["tokens.weight"].stored)) == (0, "[48, 36]")
    assert str(made["blocks.1.up.weight"].stored) == "[60, 36@data]"
    assert (made["blocks.2.up.weight"].level, str(made["blocks.2.up.weight"].stored)) == (2, "[60, 36@data]")
    assert [made[f"blocks.{i}.down.weight"].stored.axes for i in (1, 2)] == [{"data"}] * 2
    assert (made["blocks.0.down.weight"].level, made["blocks.0.down.weight"].keep) == (3, True)


def test_a_pinned_parameter_leaves_the_strategy(case: tuple[Graph, Axes]) -> None:
    made = planned(case, {"parameters": {"tokens.weight": "whole", "blocks.1.up": {"level": 1}}}, strategy=zero(3))
    levels = {name: kept.level for name, kept in made.parameters.items()}
    assert (levels.pop("tokens.weight"), levels.pop("blocks.1.up.weight"), levels.pop("blocks.1.up.bias")) == (0, 1, 1)
    assert set(levels.values()) == {3}


def test_a_layout_is_read_in_other_factors_of_the_same_dims(case: tuple[Graph, Axes]) -> None:
    """The rows of an output projection are 36, its columns 12 heads of 3."""
    made = planned(case, {"mesh": {"data": 4}, "parameters": {"blocks.0.attn.out.weight": "[36, 36@data]"}})
    assert str(made.parameters["blocks.0.attn.out.weight"].stored) == "[36, (12@data*3)]"


def test_what_is_pinned_is_emitted_with_the_numbers_of_one_device() -> None:
    """Layouts and levels that no strategy has, copies of level 2 that are cut themselves."""
    torch.manual_seed(0)
    model, args = mlp.build(b=12, d=8, f=24, g=16, o=6)
    graph = copy_views(capture(model, args, double=True))
    axes = analyse(graph)
    pins = {
        "mesh": {"model": 2, "data": 2},
        "modules": {"up": "batch@data n@model", "mid": "k@model", "down": "whole"},
        "parameters": {
            "up.weight": {"level": 2, "stored": "[24@model, 8@data]", "home": "[24@model, 8]"},
            "mid.weight": {"level": 1, "stored": "@data"},
            "down.weight": "[6, 16@data@model]",
            "down.bias": {"level": 3},
        },
    }
    made = planned((graph, axes), pins)
    program, values = emit(graph, axes, made), values_of(graph, model, args)
    placed = {e.name: str(program.input_layouts[e.node]) for e in graph.inputs if e.node in program.input_layouts}
    assert placed["up.weight"] == "[24@model, 8]"
    assert str(made.parameters["down.weight"].stored) == "[6, 16@data@model]"
    tangents = [values[e.node] for e in graph.inputs if e.kind == "tangent"]
    found, _ = run(program, values, tangents)
    worst = errors(graph, found, run_whole(graph, values))
    assert max(worst.values()) < 1e-9, worst


# ---- the mesh --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "strategy", "found"),
    [
        ({"model": 4}, None, "mesh(model=4)"),
        ({"model": 2}, None, "mesh(data=2, model=2)"),
        ({"model": 2, "data": 2}, None, "mesh(model=2, data=2)"),
        ({"model": 2, "data": 2}, ddp() * tensor(), "mesh(model=2, data=2)"),
    ],
)
def test_the_mesh_is_the_pinned_one_in_its_order(
    case: tuple[Graph, Axes], mesh: dict[str, int], strategy: Any, found: str
) -> None:
    assert str(planned(case, {"mesh": mesh}, strategy=strategy).mesh) == found


# ---- refusals --------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], Any, type[AutoparError], str]] = [
    (
        {"modules": {"blocks.*.attn": "vocab@model"}},
        None,
        UnsupportedError,
        "pins: modules.blocks.*.attn: vocab@model: no op there can be cut so on mesh(data=2, model=2)\n"
        "  model can cut batch, head, heads, k, m, model, n, sequence there",
    ),
    (
        {"modules": {"blok.1.attn": "heads@data"}},
        None,
        InputError,
        "pins: modules.blok.1.attn: heads@data: there is no such name here; near it blocks.1.attn, ",
    ),
    (
        {"parameters": {"tokens": "whole", "tokenz.weight": "whole"}},
        None,
        InputError,
        "pins: parameters.tokenz.weight: whole: there is no such name here; near it tokens.weight",
    ),
    (
        {"modules": {"blocks.1": "heads@tensor"}},
        None,
        InputError,
        "pins: modules.blocks.1: heads@tensor: mesh(data=4) or mesh(data=2, model=2) has no axis tensor\n"
        "  try: another axis, or pin the mesh too, like mesh: {tensor: 4}",
    ),
    (
        {"parameters": {"norm.weight": {"level": 3, "stored": "whole"}}},
        None,
        UnsupportedError,
        'pins: parameters.norm.weight: {"level": 3, "stored": "whole"}: norm.weight cannot be kept so on mesh(data=4)\n'
        "  it can be kept as level 0 stored [36]; ",
    ),
    (
        {"parameters": {"tokens.weight": "[47@data, 36]"}},
        None,
        InputError,
        "pins: parameters.tokens.weight: [47@data, 36]: the dims of the parameter are [48, 36]",
    ),
    (
        {"parameters": {"blocks.0.attn.qkv.weight": "[108@data, 36]"}},
        ddp(),
        UnsupportedError,
        "pins: parameters.blocks.0.attn.qkv.weight: [108@data, 36]: on mesh(data=4) its dims are cut as [(3*12*3), 36]",
    ),
    (
        {"mesh": {"data": 3}},
        None,
        InputError,
        "pins: mesh: the sizes of data=3 multiply to 3, and the cluster has 4 devices\n"
        "  try: sizes that multiply to 4, each one of 1, 2, 4",
    ),
    (
        {"mesh": {"data": 2, "model": 2}},
        ddp(),
        InputError,
        "pins: mesh: mesh(data=2, model=2) does not fit the strategy ddp()",
    ),
]


@pytest.mark.parametrize(("pins", "strategy", "error", "message"), REFUSED)
def test_an_impossible_pin_is_refused_by_name_with_what_would_be_legal(
    case: tuple[Graph, Axes], pins: dict[str, Any], strategy: Any, error: type[AutoparError], message: str
) -> None:
    with pytest.raises(error) as refused:
        planned(case, pins, strategy=strategy)
    assert str(refused.value).startswith(message)


def test_two_cuts_that_leave_a_device_without_a_piece_name_the_op() -> None:
    model, args = build(b=2, s=8, v=48, d=36, heads=12, f=60, layers=1)
    graph = copy_views(capture(model, args, {}))
    pins = {"mesh": {"data": 2, "model": 2}, "modules": {"blocks.0.up": "batch@data batch@model"}}
    with pytest.raises(UnsupportedError) as refused:
        planned((graph, analyse(graph)), pins)
    first, able, source = str(refused.value).split("\n")
    assert first.startswith("pins: modules.blocks.0.up: batch@data batch@model: it leaves no way to run %")
    assert able.startswith("  it can run as ['', ''], ") and source.startswith("  from gpt.py:")


class Wide(nn.Module):
    """Nearly all of it is one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.big, self.small = nn.Linear(64, 512, bias=False), nn.Linear(512, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.small(self.big(x)).square().mean()


def test_pins_for_which_the_memory_does_not_suffice_are_named() -> None:
    """And only those; the budget that the refusal tells works."""
    graph = copy_views(capture(Wide(), (torch.randn(8, 64),), {}))
    case = graph, analyse(graph)
    least = planned(case, {}, memory_bytes=300e3)
    assert least.costs["peak_bytes"] <= 300e3
    pins = {"mesh": {"data": 4}, "parameters": {"small.weight": {"level": 3}, "big.weight": "whole"}}
    with pytest.raises(NoPlan) as refused:
        planned(case, pins, memory_bytes=300e3)
    assert str(refused.value).splitlines()[-1] == "  it fits without parameters.big.weight: whole"
    assert planned(case, pins, memory_bytes=refused.value.needed_bytes).ops


# ---- reading ---------------------------------------------------------------------------------------------------------

FILE = """
mesh: {data: 2, model: 2}
modules:
  blocks.1.attn: heads@model batch@data
parameters:
  tokens.weight: whole
  blocks.*.up.weight: {level: 3, keep: false}
"""


def test_a_file_and_a_mapping_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "pins.yaml").write_text(FILE)
    read = reading.load(tmp_path / "pins.yaml")
    given = reading.parse(
        {
            "mesh": {"data": 2, "model": 2},
            "modules": {"blocks.1.attn": "heads@model batch@data"},
            "parameters": {"tokens.weight": "whole", "blocks.*.up.weight": {"level": 3, "keep": False}},
        }
    )
    assert str(read) == str(given)
    assert (read.mesh, read.modules, read.parameters) == (given.mesh, given.modules, given.parameters)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mesh: {data: two}", "mesh.data: Input should be a valid integer (found 'two')"),
        ("mesh: [2]", "mesh: Input should be a valid dictionary (found [2])"),
        ("module: {a: whole}", "module: there is no such key; there are mesh, modules, parameters"),
        ("parameters: {w: {lvl: 3}}", "parameters.w.lvl: there is no such key; there are level, stored, home, keep"),
        ("modules: {a: 3}", "modules.a: Input should be a valid string (found 3)"),
        ("modules: {a: 'heads @model'}", "modules.a: 'heads @model' is no pin; write what mesh axes cut, like "),
        ("modules: {a: b@data c@data}", "modules.a: 'b@data c@data' tells twice what one mesh axis does"),
        ("parameters: {w: {level: 4}}", "parameters.w.level: Input should be less than or equal to 3 (found 4)"),
        ("parameters: {w: {}}", "parameters.w: nothing is pinned; write whole, a layout, or level, stored, home, keep"),
        ("parameters: {w: {level: 2, keep: true}}", "parameters.w.keep: it is for level 3, whose gathered copy may"),
        ("parameters: {w: {stored: '[4@]'}}", "parameters.w.stored: '4@' is no dim of a layout; write one like "),
        ("parameters: {w: 4 x 4}", "parameters.w: '4 x 4' is no layout; write one like "),
        ("- a", "pins are a mapping with mesh, modules and parameters, not list"),
        ("modules: {a: [\n", "line 2: expected the node content, but found '<stream end>'"),
        ("modules: {a: \x07}", "unacceptable character #x0007: special characters are not allowed"),
    ],
)
def test_a_mistake_is_one_error_with_its_path_in_the_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "pins.yaml").write_text(text)
    with pytest.raises(InputError) as refused:
        reading.load(tmp_path / "pins.yaml")
    assert str(refused.value).startswith(f"{tmp_path / 'pins.yaml'}: {message}")


def test_pins_are_part_of_what_a_plan_was_made_for(tmp_path: Path) -> None:
    (tmp_path / "pins.yaml").write_text("parameters: {up.weight: whole}")
    model, args = mlp.divisible()
    made = autopar.plan(model, CLUSTER, example_inputs=args, pins=str(tmp_path / "pins.yaml"))
    assert made.fingerprint["options"] == 'optimizer=AdamW, pins={"parameters": {"up.weight": "whole"}}'
    assert autopar.plan(model, CLUSTER, example_inputs=args).fingerprint["options"] == "optimizer=AdamW"


@pytest.mark.parametrize("pins", [3, [("modules", {})], {"modules": {"a": 3}}])
def test_what_is_no_pins_is_refused(pins: Any) -> None:
    model, args = mlp.divisible()
    with pytest.raises(InputError, match=r"^pins"):
        autopar.plan(model, CLUSTER, example_inputs=args, pins=pins)


def test_pins_and_a_plan_do_not_go_together(tmp_path: Path) -> None:
    model, _ = mlp.divisible()
    with pytest.raises(InputError, match="leave one out, or edit the plan"):
        autopar.parallelize(model, CLUSTER, pins={"mesh": {"data": 4}}, plan=tmp_path / "plan.json")


# ---- the page --------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "pins.md").read_text()


def test_the_example_of_the_page_is_planned_and_its_file_says_the_same(tmp_path: Path) -> None:
    code, text = (re.search(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S) for kind in ("python", "yaml"))
    assert code is not None and text is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    (tmp_path / "pins.yaml").write_text(text[1])
    assert str(reading.load(tmp_path / "pins.yaml")) == str(reading.parse(names["pins"]))
    assert str(names["plan"].mesh) == "mesh(data=2, model=2)"
    assert names["plan"].parameters["blocks.1.up.weight"].level == 3
