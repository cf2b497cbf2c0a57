"""`autopar verify-rule`: right rules pass, wrong ones are named with their numbers."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch import fx
from typer.testing import CliRunner

from autopar.axes import Axes, analyse, computes
from autopar.capture import capture
from autopar.choices import choices
from autopar.commands import app
from autopar.errors import InputError
from autopar.layout import Mesh
from autopar.models import awkward, encoder, gpt, llama, mlp, resnet, unet, vit
from autopar.verify.rule import MOST_S, verify_rule
from autopar.verify.target import split_inputs

OPS = "tests.rules.own_ops"


def lines(function: str) -> list[str]:
    return verify_rule(f"{OPS}:{function}").text().splitlines()


@pytest.mark.parametrize(("function", "cuts"), [("mixes", 83), ("keyed", 24), ("tops", 15), ("products", 8)])
def test_right_rules_are_proved_under_every_cut(function: str, cuts: int) -> None:
    report = verify_rule(f"{OPS}:{function}")
    assert report.exit_code == 0
    assert report.text().splitlines()[-1] == f"ok: {cuts} of {cuts} cuts equal the whole op"


def test_lists_optional_operands_and_sums_through_several_entries() -> None:
    """With the optional operand, sums pass through the list and it together; without it not."""
    first, second = verify_rule(f"{OPS}:mixes").proofs
    assert (first.ends, second.ends) == (
        ("xs_0", "xs_1", "w", "result 0", "result 1"),
        ("xs_0", "xs_1", "bias", "w", "result 0", "result 1"),
    )
    roles = [{role for cut in proof.cuts for role in cut.choice.roles} for proof in (first, second)]
    assert roles == [{"", "b", "d", "e", "+2"}, {"", "b", "d", "e", "+0+1+2", "+3"}]


def test_letters_named_whole_are_never_cut() -> None:
    (proof,) = verify_rule(f"{OPS}:products").proofs
    assert {role for cut in proof.cuts for role in cut.choice.roles} == {"", "b"}


def test_a_wrong_rule_is_named_with_its_cuts_and_numbers() -> None:
    report = verify_rule(f"{OPS}:wrong")
    assert report.exit_code == 1
    found = [line for line in report.text().splitlines() if "WRONG: " in line and "mesh(data=2):" in line]
    assert [line.split(" off by ")[0] for line in found] == [
        "  WRONG: d@data on mesh(data=2):",
        "  WRONG: +0@data on mesh(data=2):",
    ]
    assert all(line.endswith(", the bound is 1e-09") for line in found)
    assert report.text().splitlines()[-1].startswith("WRONG: 8 of 24 cuts")


def test_a_cut_that_does_not_run_is_wrong() -> None:
    report = verify_rule(f"{OPS}:broken")
    assert report.exit_code == 1
    assert "n@data on mesh(data=3): RuntimeError: " in report.text()


def test_what_an_example_leaves_untried_is_noted() -> None:
    notes = [line for line in lines("short") if line.startswith("  note: ")]
    assert notes == [
        "  note: b = 12 makes equal pieces only; another size, like 7, tries unequal ones",
        "  note: d = 12 makes equal pieces only; another size, like 7, tries unequal ones",
        "  note: b and d are both 12: a rule that takes one for the other may pass; make them differ",
    ]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"{OPS}:without", f"{OPS}:without runs no op that has a rule: not own.plain.default"),
        (f"{OPS}:raises", f"{OPS}:raises failed: KeyError: 'nothing here'"),
        (f"{OPS}:nothing", f"cannot find {OPS}:nothing: "),
        ("nothing", "'nothing' is no function; write package.module:function"),
    ],
)
def test_a_wrong_call_is_one_error(spec: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        verify_rule(spec)
    assert str(refused.value).startswith(message)


def test_the_command_prints_and_exits_with_the_verdict() -> None:
    done = {name: CliRunner().invoke(app, ["verify-rule", f"{OPS}:{name}", "--json"]) for name in ("tops", "wrong")}
    assert {name: result.exit_code for name, result in done.items()} == {"tops": 0, "wrong": 1}
    (op,) = json.loads(done["tops"].stdout)["ops"]
    assert op["cuts"][2] == {
        "mesh": "mesh(data=2)",
        "cut": "k@data",
        "layouts": {"x": "[7, 5@data]", "result 0": "[7]{max:data}", "result 1": "[5@data]"},
        "error": "0.0e+00",
        "problem": "",
    }


# ---- how long choices take to list -----------------------------------------------------------------------------------


def graphs() -> Iterator[tuple[str, Any, Axes]]:
    """Every model, with sizes that divide where it has them: those can be cut in most ways."""
    modules = (mlp, gpt, llama, vit, resnet, unet, encoder)
    builds = [module.divisible for module in modules]
    for build in [*builds, *(getattr(awkward, name) for name in awkward.ALL)]:
        model, inputs = build()
        graph = capture(model, *split_inputs(inputs))
        yield f"{build.__module__}.{build.__name__}", graph, analyse(graph)


def seconds(axes: Axes, node: fx.Node) -> float:
    """Of this thread, to list the choices of an op anew."""
    axes.known_choices.clear()
    started = time.thread_time()
    choices(axes, node, Mesh(("data", "model"), (4, 2)))
    return time.thread_time() - started


def test_no_op_of_a_model_takes_long_to_list_its_choices() -> None:
    slow = {}
    gc.collect()
    gc.disable()
    try:
        for name, graph, axes in graphs():
            for node in graph.fx.nodes:
                if computes(node) and seconds(axes, node) > MOST_S:
                    again = min(seconds(axes, node) for _ in range(3))  # another process may have had the core
                    slow |= {f"{name} {node.name}": again} if again > MOST_S else {}
    finally:
        gc.enable()
    assert slow == {}
