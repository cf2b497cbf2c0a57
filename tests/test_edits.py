"""A saved plan that was edited by hand is honoured, its numbers those of one device, or refused in one error."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import files, strategies
from autopar.api import Compiler
from autopar.axes import Axes
from autopar.choices import choice_of
from autopar.cluster import ClusterSpec
from autopar.errors import PlanError
from autopar.graph import Graph
from autopar.models import mlp
from autopar.plan import Plan
from autopar.program import Program
from autopar.verify.simulate import run
from tests.harness.reference import errors, run_whole, values_of

CLUSTER = ClusterSpec.preset("cpu-gloo", devices=4)
Edit = Callable[[dict[str, Any], random.Random], None]


@dataclass(frozen=True)
class Case:
    """A model, its graph, what one device computes, and the text of a plan."""

    model: nn.Module
    graph: Graph
    axes: Axes
    values: dict[str, Tensor]
    expected: list[Any]
    text: str


@pytest.fixture(scope="module")
def case() -> Case:
    torch.manual_seed(0)
    model, args = mlp.build(b=12, d=8, f=24, g=16, o=6)
    model.mid.bias.requires_grad_(False)
    compiler = Compiler(
        CLUSTER, precision="float64", strategy=strategies.zero(2, 2) * strategies.tensor(2), time_limit=20
    )
    graph = compiler.graph(model, args, {})
    made = compiler.made(graph, frozenset(), None)
    values = values_of(graph, model, args)
    return Case(model, graph, compiler.axes(graph), values, run_whole(graph, values), files.dumps(made))


def loaded(case: Case, document: dict[str, Any] | str, folder: Path) -> tuple[Compiler, Plan]:
    """The plan as `parallelize(plan=...)` takes it."""
    path = folder / "plan.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    compiler = Compiler(CLUSTER, precision="float64", given=path)
    return compiler, compiler.made(case.graph, frozenset(), None)


# ---- edits -----------------------------------------------------------------------------------------------------------

LETTERS = ("", "", "m", "n", "k", ".0", ".1", "+0", "+0+1", "g0.0", "nonsense", "@data")


def role(document: dict[str, Any], rng: random.Random) -> None:
    roles = document["ops"][rng.choice(list(document["ops"]))]
    roles[rng.randrange(len(roles))] = rng.choice(LETTERS)


def product(document: dict[str, Any], rng: random.Random) -> None:
    """All products of matrices in one way."""
    letters = [rng.choice(("", "m", "n", "k")) for _ in range(2)]
    document["ops"] |= {name: list(letters) for name in document["ops"] if name.startswith("mm")}


def level(document: dict[str, Any], rng: random.Random) -> None:
    kept = document["parameters"][rng.choice(list(document["parameters"]))]
    kept["level"] = rng.randrange(5)
    if rng.random() < 0.6:
        kept["home"] = kept["stored"]
    if rng.random() < 0.2:
        kept["keep"] = rng.random() < 0.7


def cut(document: dict[str, Any], rng: random.Random) -> None:
    kept = document["parameters"][rng.choice(list(document["parameters"]))]
    dims = files.read_layout(kept["stored"]).shape
    cuts = [rng.choice(("", "", "@data", "@model", "@data@model", "@model@data", "@pipe")) for _ in dims]
    layout = f"[{', '.join(f'{size}{where}' for size, where in zip(dims, cuts, strict=True))}]"
    kept["stored"] = layout + rng.choice(("", "", "", "", "{sum:data}"))
    if rng.random() < 0.7:
        kept["home"] = kept["stored"] if kept["level"] in (0, 3) else f"[{', '.join(map(str, dims))}]"


def mesh(document: dict[str, Any], rng: random.Random) -> None:
    turned = {"model": 2, "data": 2}
    document["mesh"] = rng.choice([turned, turned, {"data": 4, "model": 1}, {"data": 2}, {"data": 4}, {"rows": 4}])


def entry(document: dict[str, Any], rng: random.Random) -> None:
    section = document[rng.choice(("ops", "parameters"))]
    name = rng.choice(list(section))
    value = section.pop(name)
    if rng.random() < 0.5:
        section[f"{name}_other"] = value


def bucket(document: dict[str, Any], rng: random.Random) -> None:
    document[rng.choice(("bucket_bytes", "copied_bytes"))] = rng.choice((0, 100, 10**6, -1, "many"))


EDITS: tuple[Edit, ...] = (role, role, role, product, level, level, level, cut, cut, cut, mesh, entry, bucket)
MANY = 50


def edited(case: Case, seed: int) -> dict[str, Any]:
    """The plan's document with one or two edits."""
    rng = random.Random(seed)
    document: dict[str, Any] = json.loads(case.text)
    for edit in rng.sample(EDITS, rng.choice((1, 1, 2))):
        edit(document, rng)
    return document


# ---- honoured or refused ---------------------------------------------------------------------------------------------


def check_shows(program: Program, document: dict[str, Any], case: Case) -> None:
    """The program's mesh, ops, parameters and gradients are those of the document."""
    plan = program.plan
    assert dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)) == document["mesh"]
    assert list(plan.mesh.names) == list(document["mesh"])
    nodes, shown = case.graph.nodes, 0
    for node in (*program.forward.nodes, *program.backward.nodes):
        origin = node.meta.get("origin", "")
        if origin.startswith("mm") and "step" not in node.meta:
            choice = choice_of(case.axes, nodes[origin], tuple(document["ops"][origin]), plan.mesh)
            assert choice is not None and node.meta["layouts"] == choice.outputs
            shown += 1
    assert shown == sum(name.startswith("mm") for name in document["ops"])
    entries = {e.name: e.node for e in case.graph.inputs}
    for name, kept in document["parameters"].items():
        handed = kept["stored"] if kept["level"] == 3 else kept["home"]
        if entries[name] in program.input_layouts:
            assert str(program.input_layouts[entries[name]]) == handed
    for output, layout in zip(case.graph.outputs, program.output_layouts, strict=True):
        if output.kind == "gradient" and layout is not None:
            assert str(layout) == document["parameters"][output.name]["stored"]


def outcome(case: Case, document: dict[str, Any], folder: Path) -> str:
    """ "refused", with the file and a place in it, or "honoured", with the numbers of one device."""
    try:
        compiler, plan = loaded(case, document, folder)
    except PlanError as refused:
        place = str(refused).removeprefix(f"{folder / 'plan.json'}: ")
        assert place.startswith(("ops", "parameters", "mesh", "bucket_bytes", "copied_bytes")), refused
        return "refused"
    program = compiler.emit(case.graph, plan)
    check_shows(program, document, case)
    found, _ = run(program, case.values, [case.values[e.node] for e in case.graph.inputs if e.kind == "tangent"])
    worst = errors(case.graph, found, case.expected)
    assert max(worst.values()) < 1e-9, worst
    return "honoured"


@pytest.fixture(scope="module")
def outcomes() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("seed", range(MANY))
def test_an_edited_plan_is_honoured_or_refused(case: Case, seed: int, tmp_path: Path, outcomes: Counter[str]) -> None:
    outcomes[outcome(case, edited(case, seed), tmp_path)] += 1


def test_many_edits_are_honoured_and_many_refused(outcomes: Counter[str]) -> None:
    if sum(outcomes.values()) == MANY:  # all of them ran in this process
        assert min(outcomes["honoured"], outcomes["refused"]) >= MANY // 5, outcomes


# ---- one of each -----------------------------------------------------------------------------------------------------


def test_a_plan_that_was_not_edited_keeps_its_figures(case: Case, tmp_path: Path) -> None:
    _, plan = loaded(case, case.text, tmp_path)
    assert plan == files.loads(case.text)


def test_an_edited_plan_is_priced_anew_and_prints_what_it_does(case: Case, tmp_path: Path) -> None:
    document = json.loads(case.text)
    document["ops"] = {name: ["", ""] for name in document["ops"]}
    _, plan = loaded(case, document, tmp_path)
    before = files.loads(case.text)
    assert plan.costs["compute_s"] > before.costs["compute_s"]
    assert "gap" not in plan.certificate
    lines = [line for line in str(plan).splitlines() if " = mm " in line]
    assert lines and all(" whole " in line for line in lines)


PLACES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (
        lambda d: d["ops"].update(mm=["nonsense", ""]),
        "ops.mm: it cannot run as ['nonsense', ''] on mesh(",
    ),
    (lambda d: d["ops"].update(other=["", ""]), "ops.other: the model has no such name"),
    (lambda d: d["ops"].pop("mm"), "ops: the plan does not tell how %mm runs"),
    (lambda d: d["parameters"].pop("up.bias"), "parameters: the plan does not tell how up.bias is kept"),
    (
        lambda d: d["parameters"].update(wrong=d["parameters"]["up.bias"]),
        "parameters.wrong: the model has no such",
    ),
    (
        lambda d: d["parameters"]["up.bias"].update(level=3, home="[24]", stored="[24]"),
        "parameters.up.bias: level 3 has nothing to gather in [24]; that is level 0",
    ),
    (
        lambda d: d["parameters"]["up.bias"].update(level=2, home="[24]", stored="[24]"),
        "parameters.up.bias: level 2 stores less than [24]; that is level 0",
    ),
    (
        lambda d: d["parameters"]["mid.bias"].update(level=1, home="[16]", stored="[16@data]"),
        "parameters.mid.bias.level: it is frozen, and level 1 spreads gradients",
    ),
    (
        lambda d: d["parameters"]["up.bias"].update(level=0, home="[24]", stored="[24]", keep=True),
        "parameters.up.bias.keep: it is for level 3, and this is level 0",
    ),
    (
        lambda d: d["parameters"]["up.weight"].update(stored="[24@data, 8@data]"),
        "parameters.up.weight.stored: [24@data, 8@data] uses the mesh axis data twice",
    ),
    (
        lambda d: d.update(mesh={"data": 2, "model": 4}),
        "mesh: mesh(data=2, model=4) is not of the 4 devices of",
    ),
    (lambda d: d.update(mesh={"data": 2, "a b": 2}), "mesh.a b.[key]: String should match pattern"),
]


@pytest.mark.parametrize(("edit", "message"), PLACES)
def test_a_refusal_names_the_file_the_place_and_the_reason(
    case: Case, tmp_path: Path, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    document = json.loads(case.text)
    edit(document)
    with pytest.raises(PlanError) as refused:
        loaded(case, document, tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / 'plan.json'}: {message}")


def test_a_name_that_stands_twice_is_refused(case: Case, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="'mm' stands twice in one object"):
        loaded(case, case.text.replace('"mm": ', '"mm": ["", ""], "mm": ', 1), tmp_path)
