"""Ten families of transformers, small, against the single device: four plan families and ten random plans each."""

from __future__ import annotations

import pytest

from autopar.verify.run import Harness
from autopar.verify.target import Target

FAMILIES = ("ddp", "zero3", "tensor", "auto")
MODELS = (
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "BertForMaskedLM",
    "T5ForConditionalGeneration",
    "ViTForImageClassification",
    "ResNetForImageClassification",
    "WhisperForConditionalGeneration",
    "MambaForCausalLM",
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_family_of_transformers_equals_one_device(harness: Harness, model: str) -> None:
    target = Target.parse(f"hf:{model}", {"tiny": True})
    report = harness.verify(target, 2, FAMILIES, random=10, seed=3)
    assert report.exit_code == 0, report.text()
