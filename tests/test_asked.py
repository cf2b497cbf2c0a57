"""A wrong argument is one error that names it and tells what to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import strategies
from autopar.cluster import ClusterSpec
from autopar.errors import ClusterError, InputError
from autopar.models import mlp
from autopar.parsing import read_bytes, read_strategy

CLUSTER = ClusterSpec.preset("cpu-gloo", devices=2)
CALLS = {"parallelize": autopar.parallelize, "plan": autopar.plan}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"strategy": "zeor(3)"}, "'zeor(3)' is no strategy: there is no strategy zeor"),
        ({"strategy": 3}, "strategy is an int 3; write one like autopar.strategies.zero(3) or 'ddp(2) * tensor(2)'"),
        ({"memory_bytes": "8 apples"}, "'8 apples' is no number of bytes"),
        ({"memory_bytes": -1}, "memory_bytes is an int -1; give a number of bytes above 0, or one like '8GiB'"),
        ({"time_limit": 0}, "time_limit is an int 0; give a number of seconds above 0"),
        ({"seed": "a"}, "seed is a str 'a'; give a whole number of at most 64 bits"),
        ({"seed": 2**63}, "seed is an int"),
        ({"loss_fn": 3}, "loss_fn is an int 3; give a function or a module, like F.mse_loss or nn.MSELoss()"),
        ({"loss_fn": nn.MSELoss}, "loss_fn is the class MSELoss; give a function or a module"),
        ({"cluster": "dgx-h100"}, "cluster is a str 'dgx-h100'; give a ClusterSpec\n  try: ClusterSpec.preset(\"dgx-"),
        ({"cluster": 4}, "cluster is an int 4; give a ClusterSpec\n  try: ClusterSpec.preset(\"cpu-gloo\", devices=N)"),
        ({"model": nn.Linear}, "model is the class Linear; give an nn.Module"),
        ({"model": torch.sin}, "model is a builtin_function_or_method; give an nn.Module"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named(call: str, argument: dict[str, Any], message: str) -> None:
    model, inputs = mlp.tiny()
    given = {"model": model, "cluster": CLUSTER, "example_inputs": inputs, **argument}
    with pytest.raises(InputError) as caught:
        CALLS[call](**given)
    assert str(caught.value).startswith(message)


def test_a_plan_is_a_plan_or_its_file() -> None:
    with pytest.raises(InputError, match=r"^plan is a dict; give an autopar.Plan or the path of a file"):
        autopar.parallelize(mlp.tiny()[0], CLUSTER, plan={})  # type: ignore[arg-type]


def test_strategy_and_memory_are_understood_as_the_command_line_does() -> None:
    model, inputs = mlp.tiny()
    made = autopar.plan(model, CLUSTER, example_inputs=inputs, strategy="zero(3)", memory_bytes="1GiB")
    assert made.costs["budget_bytes"] == 2**30
    assert {way.level for way in made.parameters.values()} == {3}


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True])
@pytest.mark.parametrize("make", [strategies.ddp, strategies.tensor, strategies.megatron, strategies.fsdp])
def test_a_strategy_over_no_number_of_devices_is_refused_when_made(make: Any, size: Any) -> None:
    with pytest.raises(InputError, match=f"{make.__name__}.*: .* is no number of devices; give a whole number"):
        make(size)


@pytest.mark.parametrize("text", ["ddp(0)", "ddp(2.0)", "ddp('a')", "tensor(-1)", "zero(True)", "ddp(**{'n': 2})"])
def test_a_wrong_size_in_a_text_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no strategy"):
        read_strategy(text)


@pytest.mark.parametrize("text", ["1.2.3GB", ".", "GB"])
def test_points_alone_make_no_number(text: str) -> None:
    with pytest.raises(InputError, match="is no number of bytes"):
        read_bytes(text)


@pytest.mark.parametrize("devices", ["2", 0, 1.5, True])
def test_a_cluster_has_a_whole_number_of_devices(devices: Any) -> None:
    for make in (
        lambda: ClusterSpec.preset("cpu-gloo", devices=devices),
        lambda: ClusterSpec.preset("cpu-gloo", hosts=devices),
        lambda: ClusterSpec.detect(devices),
        lambda: CLUSTER.with_devices(devices),
    ):
        with pytest.raises(ClusterError, match="must be a whole number of at least 1"):
            make()
