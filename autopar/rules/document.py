"""The rule table as a page: every op, its rule, and the models whose training step uses it.

In: the table, the models.  Out: `docs/rules.md`, written anew by `make rules`.  Next: `core.py`, how to read a rule.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from autopar.rules.core import RULES
from autopar.rules.table import lookup

HEAD = """# Rules

Every op of a training step's graph has one row. Letters name the dims of operands and results; equal letters are cut
together; a letter that is missing on the right leaves a pending sum when it is cut. How to read and write a row stands
in the docstring of `autopar/rules/core.py`. Any other op that torch tags as pointwise has the row `..., ... -> ...`; an
op that is neither runs whole on every device, with one line in the log.

Written by `make rules`.

| op | rule | where it occurs |
|---|---|---|
"""

HF = ("GPT2LMHeadModel", "LlamaForCausalLM", "MambaForCausalLM", "WhisperForConditionalGeneration")


def occurrences() -> dict[str, list[str]]:
    """op -> names of the models whose joint graph has it."""
    from autopar import hf
    from autopar.axes import computes
    from autopar.capture import capture
    from autopar.models import awkward, encoder, gpt, llama, mlp, moe, resnet, t5, unet, vit

    found: dict[str, list[str]] = {}
    modules = (mlp, gpt, llama, moe, resnet, unet, vit, encoder, t5)
    builds = [(module.__name__.rpartition(".")[2], module.tiny) for module in modules]
    builds += [(f"awkward.{name}", getattr(awkward, name)) for name in awkward.ALL]
    captured = [(name, capture(*called(build()))) for name, build in builds]
    captured += [(f"hf:{name}", capture(*called(hf.build(name, tiny=True)))) for name in HF]
    for name, graph in captured:
        for node in graph.fx.nodes:
            if computes(node):
                places = found.setdefault(str(node.target), [])
                if not lookup(node)[1]:
                    found.setdefault(f"{node.target} (runs whole)", []).append(name)
                if name not in places:
                    places.append(name)
    return found


def called(built: tuple[nn.Module, Any]) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    """A model and its example inputs as positional and keyword arguments."""
    model, inputs = built
    return (model, (), inputs) if isinstance(inputs, dict) else (model, inputs, {})


def page(found: dict[str, list[str]]) -> str:
    """The whole page."""
    return HEAD + "".join(rows(found))


def rows(found: dict[str, list[str]]) -> Iterable[str]:
    known = {str(op): rule.text for op, rule in RULES.items() if not rule.given}
    for op in sorted({*known, *found}):
        yield f"| `{op}` | `{known.get(op, '..., ... -> ...')}` | {', '.join(found.get(op, [])) or '-'} |\n"


if __name__ == "__main__":
    sys.stdout.write(page(occurrences()))
