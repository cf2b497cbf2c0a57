"""The single device runs in a process that knows no compiler."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.errors import InputError
from autopar.hf import settings
from autopar.verify.reference import Reference, read
from autopar.verify.target import Target


def test_the_reference_trains_in_double_and_imports_no_compiler(tmp_path: Path) -> None:
    reference = Reference(tmp_path)
    try:
        target = Target.parse("autopar.models.gpt:tiny")
        record = read(str(reference.file(target, ("sgd", "adamw"), 2)))
        again = reference.file(target, ("sgd", "adamw"), 2)
        with pytest.raises(RuntimeError, match="the untouched model does not run: InputError: cannot find"):
            reference.file(Target.parse("autopar.models.gpt:huge"), ("sgd",), 1)
    finally:
        reference.close()
    assert again == tmp_path / "reference0.safetensors"
    assert {key.split("/")[2] for key in record} == {"loss", "gradients", "parameters"}
    assert {t.dtype for t in record.values()} == {torch.float64}
    assert record["sgd/1/loss/"] < record["sgd/0/loss/"]
    assert "sgd/0/parameters/head.weight" in record, "a tied parameter stands under all of its names"
    assert "sgd/0/gradients/head.weight" not in record, "and has one gradient"
    assert torch.equal(record["sgd/0/loss/"], record["adamw/0/loss/"]), "dropout draws by seed and step"


def deadly() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model that takes the process with it."""
    os._exit(7)


def test_a_process_that_ended_is_told_of_once_and_started_again(tmp_path: Path) -> None:
    reference = Reference(tmp_path)
    try:
        with pytest.raises(RuntimeError, match="the reference process ended with exit code 7"):
            reference.file(Target.parse(f"{__name__}:deadly"), ("sgd",), 1)
        assert reference.file(Target.parse("autopar.models.gpt:tiny"), ("sgd",), 1)
    finally:
        reference.close()


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.a(x) if x.mean().item() > 0 else self.a(-x)
        return out


def opaque() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model whose file uses what autopar offers to those who write models."""
    return autopar.opaque(Decides()), (torch.randn(4, 3),)


def careless() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model whose file loads the compiler."""
    import_module("autopar.capture")
    return nn.Linear(3, 3), (torch.randn(4, 3),)


def test_a_model_may_be_opaque_but_not_bring_the_compiler(tmp_path: Path) -> None:
    reference = Reference(tmp_path)
    try:
        assert read(str(reference.file(Target.parse(f"{__name__}:opaque"), ("sgd",), 1)))
        with pytest.raises(InputError, match=r"careless loads autopar\.\w+, and the reference runs without"):
            reference.file(Target.parse(f"{__name__}:careless"), ("sgd",), 1)
    finally:
        reference.close()


def test_equal_targets_build_equal_models() -> None:
    target = Target.parse("hf:GPT2LMHeadModel", settings(["n_embd=24", "n_layer=1", "n_head=4", "vocab_size=50"]))
    first, second = target.build(), target.build(double=True)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a.double(), b)
    assert torch.equal(first.kwargs["input_ids"], second.kwargs["input_ids"])
    assert first.model.training


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gpt", "'gpt' is no model; write package.module:function or hf:ClassName"),
        (
            "autopar.models:nothing",
            "cannot find autopar.models:nothing: module 'autopar.models' has no attribute 'nothing'",
        ),
        ("hf:NoSuchModel", f"transformers {transformers.__version__} has no model class NoSuchModel"),
    ],
)
def test_a_wrong_model_is_told_in_one_line(spec: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        Target.parse(spec).build()
    assert str(error.value) == message
