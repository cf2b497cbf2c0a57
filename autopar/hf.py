"""Build a transformers model from the name of its class and a few values of its config, with a batch to run it on.

In: `LlamaForCausalLM` and `{"num_hidden_layers": 2, ...}`.  Out: (model, example keyword arguments with labels).
Next: `cli.py`, which spells it `hf:LlamaForCausalLM --set num_hidden_layers=2`.

`batch`, `sequence` and `seed` are taken as sizes of the batch, everything else as keys of the config.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError

TINY: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 53,
        "n_positions": 16,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 6,
        "n_inner": 36,
    },
    "other": {
        "vocab_size": 53,
        "hidden_size": 48,
        "intermediate_size": 60,
        "moe_intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 32,
        "num_local_experts": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def value(text: str) -> Any:
    """`2`, `0.1`, `true`, `null`, `[1, 2]` as JSON, anything else as a string."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def settings(pairs: list[str]) -> dict[str, Any]:
    """`["a=1", "b=gelu"]` as a dict."""
    out = {}
    for pair in pairs:
        key, found, text = pair.partition("=")
        if not found or not key:
            raise InputError(f"--set takes key=value, not {pair!r}")
        out[key] = value(text)
    return out


def build(
    name: str, config: Mapping[str, Any] | None = None, *, tiny: bool = False
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and its keyword arguments: `input_ids` or `pixel_values`, and `labels`.

    tiny    start from small sizes instead of the published ones
    Raises `InputError` as `prepared` does.
    """
    kind, made, inputs = prepared(name, config or {}, tiny)
    torch.manual_seed(int((config or {}).get("seed", 0)))
    model = kind(made)
    model.train()
    return model, inputs


def prepared(name: str, config: Mapping[str, Any], tiny: bool = False) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """(class, config, inputs): all that there is before a model is built.

    Raises `InputError` for a class that transformers does not have or that takes other inputs, or a key that its config
    does not have.
    """
    import transformers

    kind = getattr(transformers, name, None)
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise InputError(f"transformers {transformers.__version__} has no model class {name}")
    values = {key: item for key, item in config.items() if key != "seed"}
    batch, sequence = int(values.pop("batch", 7)), int(values.pop("sequence", 7))
    made = configured(kind.config_class, values, tiny)  # type: ignore[attr-defined]
    made.use_cache = False
    fill_in(made, name)
    return kind, made, example(kind, made, batch, sequence)


def configured(kind: Any, values: Mapping[str, Any], tiny: bool) -> Any:
    """A config of the given class; unknown keys are refused."""
    plain = kind()
    known = {*plain.to_dict(), *getattr(kind, "attribute_map", {}), *vars(plain)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise InputError(f"{kind.__name__} has no key {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    small = TINY.get(kind.model_type, TINY["other"]) if tiny else {}
    return kind(**{**{key: item for key, item in small.items() if key in known}, **values})


def fill_in(config: Any, name: str) -> None:
    """What published checkpoints or a first call set and a fresh config may not have: tokens, the kind of labels."""
    decodes = getattr(config, "is_encoder_decoder", False)
    if getattr(config, "pad_token_id", None) is None and (decodes or name.endswith("ForSequenceClassification")):
        config.pad_token_id = 0
    if decodes and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id
    if name.endswith(CLASSES) and getattr(config, "problem_type", None) is None:
        config.problem_type = "single_label_classification"


TOKENS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")  # a label for every token
CLASSES = ("ForSequenceClassification", "ForImageClassification")  # one label for every row


def example(kind: Any, config: Any, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """What a class takes, and labels for its loss, from a fixed seed; a class that takes other things is refused."""
    rng = torch.Generator().manual_seed(0)
    inputs = (
        tokens if kind.main_input_name == "input_ids" else pixels if kind.main_input_name == "pixel_values" else None
    )
    given = inputs(config, batch, sequence, rng) if inputs is not None else None
    if given is None or not kind.__name__.endswith(TOKENS + CLASSES) or "labels" not in takes(kind):
        raise InputError(
            f"{kind.__name__} needs other inputs than tokens or pictures of one size with labels, which hf: makes\n"
            "  try: a function of yours that returns (model, inputs), as package.module:function"
        )
    if kind.__name__.endswith(CLASSES):
        return {**given, "labels": torch.randint(config.num_labels, (batch,), generator=rng)}
    labels = given["input_ids"].clone()
    labels[0, : sequence // 2] = -100
    return {**given, "labels": labels}


def takes(kind: Any) -> Mapping[str, Any]:
    """Parameters of a class's forward."""
    return inspect.signature(kind.forward).parameters


def tokens(config: Any, batch: int, sequence: int, rng: torch.Generator) -> dict[str, torch.Tensor] | None:
    """Token ids; the first half of the first sequence's labels will be left out."""
    size = getattr(config, "vocab_size", None)
    return {"input_ids": torch.randint(size, (batch, sequence), generator=rng)} if isinstance(size, int) else None


def pixels(config: Any, batch: int, sequence: int, rng: torch.Generator) -> dict[str, torch.Tensor] | None:
    """Pictures of the size that the config tells."""
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if size is None or channels is None:
        return None
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return {"pixel_values": torch.randn(batch, channels, height, width, generator=rng)}
