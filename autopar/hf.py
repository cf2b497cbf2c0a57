"""Build a transformers model from the name of its class and a few values of its config, with a batch to run it on.

In: `LlamaForCausalLM` and `{"num_hidden_layers": 2, ...}`.  Out: (model, example keyword arguments with labels).
Next: `cli.py`, which spells it `hf:LlamaForCausalLM --set num_hidden_layers=2`.

`batch`, `sequence` and `seed` are taken as sizes of the batch, everything else as keys of the config.
"""

from __future__ import annotations

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
    """The model and its keyword arguments `input_ids` and `labels`.

    tiny    start from small sizes instead of the published ones
    Raises `InputError` for a class that transformers does not have, or a key that its config does not have.
    """
    import transformers

    kind = getattr(transformers, name, None)
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise InputError(f"transformers {transformers.__version__} has no model class {name}")
    values = dict(config or {})
    batch, sequence, seed = (int(values.pop(key, n)) for key, n in (("batch", 7), ("sequence", 7), ("seed", 0)))
    made = configured(kind.config_class, values, tiny)  # type: ignore[attr-defined]
    made.use_cache = False
    torch.manual_seed(seed)
    model = kind(made)
    model.train()
    return model, example(made, batch, sequence)


def configured(kind: Any, values: Mapping[str, Any], tiny: bool) -> Any:
    """A config of the given class; unknown keys are refused."""
    plain = kind()
    known = {*plain.to_dict(), *getattr(kind, "attribute_map", {}), *vars(plain)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise InputError(f"{kind.__name__} has no key {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    small = TINY.get(kind.model_type, TINY["other"]) if tiny else {}
    return kind(**{**{key: item for key, item in small.items() if key in known}, **values})


def example(config: Any, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """Token ids and labels from a fixed seed; the first half of the first sequence's labels is left out."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (batch, sequence), generator=rng)
    labels = ids.clone()
    labels[0, : sequence // 2] = -100
    return {"input_ids": ids, "labels": labels}
