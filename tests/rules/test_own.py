"""`autopar.rule`: what it takes, what it refuses at once, and that another rule is another plan."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn, ops

import autopar
from autopar.errors import RuleError
from autopar.fingerprint import FIELDS
from autopar.rules.core import RULES
from tests.rules import own_ops

SPEC = "b d, d -> b d"


@torch.library.custom_op("own::scale", mutates_args=())
def scale(x: Tensor, w: Tensor, sizes: list[int] | None = None) -> Tensor:
    return x * w


scale.register_fake(lambda x, w, sizes=None: torch.empty_like(x))


@torch.library.custom_op("own::change", mutates_args=("x",))
def change(x: Tensor, w: Tensor) -> None:
    x.mul_(w)


WRONG: list[tuple[Any, str, dict[str, Any], str]] = [
    (scale, "b d -> b d", {}, "it has 1 entries for 2 tensor arguments (x, w)"),
    (scale, "b d, d -> b d, d", {}, "it has 2 entries for 1 results"),
    (scale, "b d, d", {}, "a rule has one arrow, with operands on its left and results on its right"),
    (
        scale,
        "b d, d -> b e",
        {},
        "e stands only on the right, where nothing tells the size of a piece; name it in whole",
    ),
    (scale, "b d, d -> ... d", {}, "... stands only on the right, where nothing tells the size of a piece; name it in"),
    (scale, "b d!, d -> b d", {}, "'d!' in `b d!` is no letter; write a, b or heads, `1`, `...`, `(a b)`"),
    (scale, "d d, d -> d d", {}, "d stands twice in `d d`; every dim of a tensor has a letter of its own"),
    (scale, "b (h e), d -> b d", {}, "nothing tells the sizes of h and e in `(h e)`; give one of them in sizes"),
    (scale, SPEC, {"whole": "k"}, "whole names k, but the letters are b, d"),
    (scale, SPEC, {"names": {"h": "heads"}}, "names names h, but the letters are b, d"),
    (scale, SPEC, {"flops": "b d"}, "flops='b d' starts with no number; write one like '2 m k n'"),
    (scale, SPEC, {"linear": "2"}, "linear='2': '2' is no entry; write 'each', 'all', or 0 to 1"),
    (
        scale,
        SPEC,
        {"kinds": {"b": "mean"}},
        "kinds has 'b': 'mean'; a key is a letter or letter:result, a value max, min, same",
    ),
    (scale, SPEC, {"shape": 1}, "shape=1, but that argument is no list of sizes"),
    (change, "b d, d -> ", {}, "the op changes x in place, which no program does; let it return a new tensor"),
]


@pytest.mark.parametrize(("op", "spec", "keywords", "message"), WRONG)
def test_a_rule_that_does_not_fit_the_schema_is_refused_at_once(
    op: Any, spec: str, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuleError) as refused:
        autopar.rule(op, spec, **keywords)
    first, schema = str(refused.value).split("\n")
    assert first.startswith(f"the rule `{spec}` does not fit own.") and message in first
    assert schema.startswith("  the op is own::")
    assert ops.own.scale.default not in RULES


def test_what_is_no_op_is_refused() -> None:
    with pytest.raises(RuleError, match="is no op; give what torch"):
        autopar.rule(torch.relu, "b -> b")


def test_an_op_has_one_rule() -> None:
    for op, known in ((ops.aten.mm.default, "m k, k n -> m n"), (own_ops.top, "b k -> b, k kinds={'k:0': 'max'}")):
        with pytest.raises(RuleError) as refused:
            autopar.rule(op, "a b, b c -> a c" if known.startswith("m") else "b k -> b, k")
        assert str(refused.value).splitlines()[0].endswith(f"has a rule already: `{known}`")


def test_a_rule_that_does_not_fit_a_tensor_names_the_node() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ops.own.keyed(x, w=torch.ones(5)).sum()

    with pytest.raises(RuleError, match=r"rule entry `b d` does not fit a tensor of shape \[2, 3, 5\] in keyed"):
        planned(Net(), torch.rand(2, 3, 5))


# ---- plans -----------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A layer, the op, a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = scale(self.layer(x), torch.ones(10))
        return (self.layer(x) * factor).sum()


def planned(model: nn.Module, x: Tensor) -> autopar.Plan:
    there = autopar.ClusterSpec.preset("cpu-gloo", devices=2)
    return autopar.plan(model, there, example_inputs=(x,), strategy="ddp()")


def test_another_rule_is_another_plan(caplog: pytest.LogCaptureFixture) -> None:
    """Without a rule the op runs whole, with one log line; with one it is cut, and the fingerprint tells."""
    found = {}
    try:
        with caplog.at_level(logging.WARNING, "autopar"):
            found["none"] = planned(Scaled(), torch.rand(8, 6))
            (line,) = [record.message for record in caplog.records]
            autopar.rule(scale, SPEC)
            found["cut"] = planned(Scaled(), torch.rand(8, 6))
            RULES.pop(ops.own.scale.default)
            autopar.rule(scale, SPEC, whole="b d")
            found["whole"] = planned(Scaled(), torch.rand(8, 6))
    finally:
        RULES.pop(ops.own.scale.default, None)
    assert line.startswith("own.scale.default has no rule and runs whole on every device, from test_own.py:")
    assert len(caplog.records) == 1
    assert {name: plan.ops["scale"] for name, plan in found.items()} == {"none": ("",), "cut": ("b",), "whole": ("",)}
    prints = [tuple(plan.fingerprint[field] for field in FIELDS) for plan in found.values()]
    assert len(set(prints)) == 3
    assert {name: plan.fingerprint["rules"] for name, plan in found.items()} == {
        "none": "",
        "cut": "own.scale.default: b d, d -> b d",
        "whole": "own.scale.default: b d, d -> b d whole='b d'",
    }
