"""Build a transformers model from the name of its class and a few values of its config, with a batch to run it on.

In: `LlamaForCausalLM` and `{"num_hidden_layers": 2, ...}`.  Out: (model, example keyword arguments with labels).
Next: `cli.py`, which spells it `hf:LlamaForCausalLM --set num_hidden_layers=2`.

`batch`, `sequence` and `seed` are taken as sizes of the batch, `tiny` as the wish for small sizes of everything that
is not given, everything else as keys of the config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.hf_inputs import CLASSES, example, serves
from autopar.hf_sizes import small


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
    """The model and its keyword arguments: words, pictures or sounds, and `labels`.

    tiny    start from small sizes instead of the published ones
    Raises `InputError` as `prepared` does.
    """
    kind, made, inputs = prepared(name, config or {}, tiny)
    torch.manual_seed(int((config or {}).get("seed", 0)))
    model = kind(made)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others do not take float64
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
    tiny = bool(values.pop("tiny", tiny))
    made = configured(kind.config_class, values, tiny)  # type: ignore[attr-defined]
    fill_in(made, name)
    return kind, made, example(kind, made, batch, sequence)


def configured(kind: Any, values: Mapping[str, Any], tiny: bool) -> Any:
    """A config of the given class; unknown keys are refused."""
    plain = kind()
    known = {*plain.to_dict(), *getattr(kind, "attribute_map", {}), *vars(plain)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise InputError(f"{kind.__name__} has no key {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    return kind(**{**(shrunk(plain, known) if tiny else {}), **values})


def shrunk(plain: Any, known: set[str]) -> dict[str, Any]:
    """Small values for what a config has, those of the configs inside it included."""
    inner = {key: vars(plain).get(key) for key in plain.sub_configs}
    made = {key: configured(type(part), {}, True) for key, part in inner.items() if part is not None}
    return {**small(type(plain), known), **made}


def fill_in(config: Any, name: str) -> None:
    """What published checkpoints or a first call set and a fresh config may not have: tokens, the kind of labels."""
    decodes = getattr(config, "is_encoder_decoder", False)
    rows = serves(name, CLASSES)
    if getattr(config, "pad_token_id", None) is None and (decodes or rows):
        config.pad_token_id = 0
    if decodes and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id
    if rows and getattr(config, "problem_type", None) is None:
        config.problem_type = "single_label_classification"
    inner = (vars(config).get(key) for key in config.sub_configs)
    for part in (config, *(part for part in inner if part is not None)):
        part.use_cache = False
        known_words(part)


def known_words(config: Any) -> None:
    """Tokens of the published vocabulary that a smaller one does not have become its last word."""
    words = vars(config).get("vocab_size")
    for key, item in list(vars(config).items()):
        if key.endswith("_token_id") and isinstance(item, int) and isinstance(words, int) and item >= words:
            setattr(config, key, words - 1)
