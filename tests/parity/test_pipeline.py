"""Pipelines against the single device: stages, microbatches of unequal sizes, tied weights, products."""

from __future__ import annotations

from functools import partial

import pytest

from autopar.cluster import ClusterSpec
from autopar.parsing import read_strategy
from autopar.planner import plan
from autopar.verify.rank import analysed, captured
from autopar.verify.report import Row
from autopar.verify.run import OPTIMIZERS, STEPS, Harness
from tests.parity.cases import BROAD, TARGETS

ALL = TARGETS | {name: target for name, (target, _) in BROAD.items()}
COMMON = [
    ("gpt", 2, "pipeline(2, microbatches=2)"),
    ("gpt", 2, "pipeline(2, microbatches=3)"),
    ("gpt", 3, "pipeline(3, microbatches=3)"),
    ("gpt-divisible", 4, "ddp(2) * pipeline(2, microbatches=2)"),
    ("unet", 2, "pipeline(2, microbatches=2)"),
]
MORE = [
    ("gpt", 2, "pipeline(2, microbatches=1)"),
    ("gpt-divisible", 4, "pipeline(4, microbatches=2)"),
    ("gpt-divisible", 4, "pipeline(2, microbatches=2) * tensor(2)"),
    ("gpt-divisible", 4, "megatron(2, sp=True) * pipeline(2, microbatches=3)"),
    ("llama", 2, "pipeline(2, microbatches=2)"),
    ("hf-gpt2", 2, "pipeline(2, microbatches=3)"),
    ("hf-llama", 3, "pipeline(3, microbatches=2)"),
    ("t5", 2, "pipeline(2, microbatches=2)"),
    ("vit", 2, "pipeline(2, microbatches=2)"),
    ("encoder", 3, "pipeline(3, microbatches=2)"),
    ("mlp", 3, "pipeline(3, microbatches=3)"),
    ("recurrent", 2, "pipeline(2, microbatches=2)"),
]


def row(harness: Harness, model: str, world: int, strategy: str) -> Row:
    target, cluster = ALL[model], ClusterSpec.preset("cpu-gloo", devices=world)
    make = partial(plan, captured(target), cluster, strategy=read_strategy(strategy), axes=analysed(target))
    return harness.row(strategy, make, target, world, str(harness.reference.file(target, OPTIMIZERS, STEPS)))


@pytest.mark.parametrize(("model", "world", "strategy"), COMMON)
def test_a_pipeline_equals_one_device(harness: Harness, model: str, world: int, strategy: str) -> None:
    found = row(harness, model, world, strategy)
    assert found.status == "ok", found


@pytest.mark.slow
@pytest.mark.parametrize(("model", "world", "strategy"), MORE)
def test_more_pipelines_equal_one_device(harness: Harness, model: str, world: int, strategy: str) -> None:
    found = row(harness, model, world, strategy)
    assert found.status == "ok", found
