"""The models of the parity matrix, and which cells the common test run takes."""

from __future__ import annotations

from typing import Any

from autopar.verify.families import names
from autopar.verify.target import Target

WORLDS = (2, 3, 4)
TINY_GPT2: dict[str, Any] = {"n_embd": 36, "n_layer": 2, "n_head": 12, "vocab_size": 49, "n_positions": 16}
TINY_LLAMA: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 35,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 49,
    "batch": 5,
    "sequence": 7,
}

TARGETS = {
    "mlp": Target.parse("autopar.models.mlp:tiny"),
    "mlp-divisible": Target.parse("autopar.models.mlp:divisible"),
    "gpt": Target.parse("autopar.models.gpt:tiny"),
    "gpt-divisible": Target.parse("autopar.models.gpt:divisible"),
    "llama": Target.parse("autopar.models.llama:tiny"),
    "llama-divisible": Target.parse("autopar.models.llama:divisible"),
    "hf-gpt2": Target.parse("hf:GPT2LMHeadModel", TINY_GPT2),
    "hf-llama": Target.parse("hf:LlamaForCausalLM", TINY_LLAMA),
    "square": Target.parse("autopar.models.awkward:square"),
    "scores": Target.parse("autopar.models.awkward:scores"),
    "gram": Target.parse("autopar.models.awkward:gram"),
    "recurrent": Target.parse("autopar.models.awkward:recurrent"),
    "fused": Target.parse("autopar.models.awkward:fused"),
}
CELLS = [(model, world) for model in TARGETS for world in WORLDS]
COMMON = [(m, w) for m, w in CELLS if not m.endswith("-divisible") or (m, w) == ("llama-divisible", max(WORLDS))]

# Other kinds of models, each with a family of its own in the common run; the whole matrix takes fewer plans of them.
BROAD = {
    "moe": (Target.parse("autopar.models.moe:tiny"), "expert"),
    "resnet": (Target.parse("autopar.models.resnet:tiny"), "ddp"),
    "unet": (Target.parse("autopar.models.unet:tiny"), "zero3"),
    "vit": (Target.parse("autopar.models.vit:tiny"), "tensor"),
    "encoder": (Target.parse("autopar.models.encoder:tiny"), "megatron"),
    "t5": (Target.parse("autopar.models.t5:tiny"), "zero2"),
}


def common_family(model: str, world: int) -> str:
    """One family of a cell, another one for the next model and the next world: on every world every family comes up."""
    known = [name for name in names(world) if name != "expert"]
    return known[([m for m, w in COMMON if w == world].index(model) + world) % len(known)]
