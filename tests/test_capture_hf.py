"""Capture of transformers models: labels give the loss, attention stays causal, types come back."""

from __future__ import annotations

import pytest
import torch

from autopar import CaptureError, InputError, tree
from autopar.capture import capture
from autopar.cluster import ClusterSpec
from autopar.hf import build, prepared, settings
from autopar.planning import plan_target
from autopar.verify.target import Target
from tests.graphs import run_eager, run_graph, worst

SEQUENCE = 11  # no other size in these models

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_attention_is_causal_and_nothing_is_sequence_by_sequence(name: str) -> None:
    model, kwargs = build(name, {"sequence": SEQUENCE}, tiny=True)
    graph = capture(model, (), kwargs)
    attention = [n for n in graph.fx.nodes if str(n.target) == "autopar.attention.default"]
    assert len(attention) == 2 and all(n.args[3] is None and n.args[4] is True for n in attention)
    for node in graph.fx.nodes:
        values = node.meta["val"] if isinstance(node.meta.get("val"), (tuple, list)) else [node.meta.get("val")]
        for value in values:
            assert value is None or tuple(value.shape).count(SEQUENCE) < 2, node.format_node()
        device = node.kwargs.get("device")
        assert device is None or device == torch.device("cpu")


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_graph_equals_eager_in_float64(name: str) -> None:
    model, kwargs = build(name, tiny=True)
    graph = capture(model, (), kwargs, double=True)
    assert worst(run_graph(graph, model, (), kwargs), run_eager(model, (), kwargs)) <= 1e-13
    leaves = [None] * graph.out_tree.leaves
    assert type(tree.unflatten(graph.out_tree, leaves)) is type(model(**kwargs))


SMALL_PICTURES = {"image_size": 12, "patch_size": 4}


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ViTForImageClassification", SMALL_PICTURES),
        ("T5ForConditionalGeneration", {}),
        ("MBartForConditionalGeneration", {}),
        ("BertForMaskedLM", {}),
        ("LlamaForSequenceClassification", {}),
        ("WhisperForConditionalGeneration", {}),
        ("SwitchTransformersForConditionalGeneration", {"num_experts": 2}),
        ("SwinForImageClassification", {}),
        ("Gemma3ForConditionalGeneration", {}),
        ("MambaForCausalLM", {}),
    ],
)
def test_a_batch_is_made_of_what_the_class_takes(name: str, config: dict[str, int]) -> None:
    model, kwargs = build(name, config, tiny=True)
    graph = capture(model, (), kwargs, double=True)
    assert worst(run_graph(graph, model, (), kwargs), run_eager(model, (), kwargs)) <= 1e-12


@pytest.mark.parametrize(
    "name", ["CLIPModel", "ViTModel", "LlamaModel", "PerceiverForMaskedLM", "LlavaForConditionalGeneration"]
)
def test_a_class_that_takes_other_inputs_is_refused_before_it_is_built(name: str) -> None:
    with pytest.raises(InputError, match=rf"^{name} needs other inputs (.|\n)*try: a function of yours"):
        build(name)


def test_tiny_is_a_setting_and_gives_small_sizes_to_configs_inside_one() -> None:
    _, config, inputs = prepared("CLIPForImageClassification", {"tiny": True, "batch": 3})
    assert config.vision_config.hidden_size == 48 and config.text_config.vocab_size == 53
    assert inputs["pixel_values"].shape == (3, 3, 32, 32)


def test_a_picture_model_whose_config_tells_no_size_gets_a_small_one() -> None:
    _, config, inputs = prepared("ResNetForImageClassification", {"tiny": True})
    assert not hasattr(config, "image_size") and inputs["pixel_values"].shape == (7, 3, 32, 32)


def test_tokens_that_a_small_vocabulary_does_not_have_become_its_last_word() -> None:
    _, config, _ = prepared("GPT2LMHeadModel", {"tiny": True})
    assert config.eos_token_id == config.bos_token_id == 52


def test_a_model_whose_constructor_reads_values_is_planned() -> None:
    small = {**SMALL_PICTURES, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    target = Target.parse("hf:ViTForImageClassification", {**small, "intermediate_size": 20})
    made = plan_target(target, ClusterSpec.preset("cpu-gloo", devices=2))
    assert made.plan.mesh.devices == 2


def test_given_position_ids_may_be_packed_and_keep_the_mask() -> None:
    model, kwargs = build("LlamaForCausalLM", tiny=True)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(kwargs["input_ids"].shape)
    graph = capture(model, (), {**kwargs, "position_ids": positions}, double=True)
    (mask,) = {n.args[3] for n in graph.fx.nodes if str(n.target) == "autopar.attention.default"}
    assert mask is not None
    want = run_eager(model, (), {**kwargs, "position_ids": positions})
    assert worst(run_graph(graph, model, (), {**kwargs, "position_ids": positions}), want) <= 1e-13


def test_recorded_outputs_come_once_and_the_model_stays_as_it_was() -> None:
    built = Target.parse("hf:MixtralForCausalLM", {"tiny": True, "output_router_logits": True}).build()
    for _ in range(2):
        graph = capture(built.model, built.args, built.kwargs)
        assert sum("router_logits" in output.name for output in graph.outputs) == 2
    assert len(built.model(*built.args, **built.kwargs).router_logits) == 2


def test_a_cache_in_the_output_is_refused_with_the_way_out() -> None:
    model, kwargs = build("LlamaForCausalLM", tiny=True)
    with pytest.raises(CaptureError, match=r"DynamicCache, a type that cannot be rebuilt(.|\n)*use_cache=False"):
        capture(model, (), {**kwargs, "use_cache": True})


def test_unknown_classes_and_keys_are_named() -> None:
    with pytest.raises(InputError, match="no model class LamaForCausalLM"):
        build("LamaForCausalLM")
    with pytest.raises(InputError, match=r"LlamaConfig has no key hidden; it has .*hidden_size"):
        build("LlamaForCausalLM", {"hidden": 3})
    assert settings(["a=1", "b=gelu", "c=[2]"]) == {"a": 1, "b": "gelu", "c": [2]}
