"""A batch for a transformers model: words, pictures or sounds, and labels for its loss.

In: a class, its config, sizes.  Out: `example`, keyword arguments.  Next: `hf.py`.

What a class is for stands in the auto-mappings of transformers; those listed here have labels that are made here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.errors import InputError

Inputs = dict[str, Tensor]
WORDS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")  # a label for every token
CLASSES = ("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION")  # one label for every row
UNMASKED = ("longt5", "switch_transformers")  # they make no mask of their own while they are traced
PICTURE = 32  # of a model whose config tells no size


def classes_of(purpose: str) -> dict[str, str]:
    """Names of the classes of one auto-mapping -> kind of model."""
    from transformers.models.auto import modeling_auto

    names: dict[str, Any] = getattr(modeling_auto, f"MODEL_FOR_{purpose}_MAPPING_NAMES")
    pairs = ((name, kind) for kind, entry in names.items() for name in ([entry] if isinstance(entry, str) else entry))
    return dict(pairs)


def serves(name: str, purposes: tuple[str, ...]) -> bool:
    """Whether a class stands in one of the auto-mappings."""
    return any(name in classes_of(purpose) for purpose in purposes)


def example(kind: Any, config: Any, batch: int, sequence: int) -> Inputs:
    """What a class takes, and labels for its loss, from a fixed seed; a class that takes other things is refused."""
    rng = torch.Generator().manual_seed(0)
    name, make = kind.__name__, INPUTS.get(kind.main_input_name)
    given = make(config, batch, sequence, rng) if make is not None and serves(name, WORDS + CLASSES) else None
    if given is None or "labels" not in takes(kind):
        raise InputError(
            f"{name} needs other inputs than tokens, pictures of one size or sounds with labels, which hf: makes\n"
            "  try: a function of yours that returns (model, inputs), as package.module:function"
        )
    if config.model_type in UNMASKED:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    if serves(name, CLASSES):
        return {**given, "labels": torch.randint(config.num_labels, (batch,), generator=rng)}
    words = given.get("input_ids")
    labels = torch.randint(words_of(config), (batch, sequence), generator=rng) if words is None else words.clone()
    labels[0, : sequence // 2] = -100
    return {**given, "labels": labels}


def takes(kind: Any) -> Mapping[str, Any]:
    """Parameters of a class's forward."""
    return inspect.signature(kind.forward).parameters


def words_of(config: Any) -> Any:
    """How many words a model knows."""
    own = getattr(config, "vocab_size", None)
    return own if isinstance(own, int) else getattr(config.get_text_config(), "vocab_size", None)


def tokens(config: Any, batch: int, sequence: int, rng: torch.Generator) -> Inputs | None:
    """Token ids; the first half of the first sequence's labels will be left out."""
    size = words_of(config)
    return {"input_ids": torch.randint(size, (batch, sequence), generator=rng)} if isinstance(size, int) else None


def pixels(config: Any, batch: int, sequence: int, rng: torch.Generator) -> Inputs:
    """Pictures of the size that the config tells, or small ones."""
    seen = getattr(config, "vision_config", config)
    size, channels = getattr(seen, "image_size", PICTURE), getattr(seen, "num_channels", 3)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return {"pixel_values": torch.randn(batch, channels, height, width, generator=rng)}


def sounds(config: Any, batch: int, sequence: int, rng: torch.Generator) -> Inputs | None:
    """Spectra of the length that two steps of stride 2 and 1 make `max_source_positions` of."""
    bins, positions = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if bins is None or positions is None:
        return None
    return {"input_features": torch.randn(batch, bins, 2 * positions, generator=rng)}


INPUTS: dict[str, Callable[[Any, int, int, torch.Generator], Inputs | None]] = {
    "input_ids": tokens,
    "pixel_values": pixels,
    "input_features": sounds,
}
