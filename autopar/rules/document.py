"""The rule table as a page: every op, its rule, and the models whose training step uses it.

In: the table, the models.  Out: `docs/rules.md`, written anew by `make rules`.  Next: `core.py`, how to read a rule.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

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

HF = ("GPT2LMHeadModel", "LlamaForCausalLM")


def occurrences() -> dict[str, list[str]]:
    """op -> names of the models whose joint graph has it."""
    from autopar import hf
    from autopar.axes import computes
    from autopar.capture import capture
    from autopar.models import awkward, gpt, llama, mlp

    found: dict[str, list[str]] = {}
    builds = [(module.__name__.rpartition(".")[2], module.tiny) for module in (mlp, gpt, llama)]
    builds += [(f"awkward.{name}", getattr(awkward, name)) for name in awkward.ALL]
    captured = [(name, capture(*build())) for name, build in builds]
    captured += [(f"hf:{name}", capture(*_keywords(hf.build(name, tiny=True)))) for name in HF]
    for name, graph in captured:
        for node in graph.fx.nodes:
            if computes(node):
                places = found.setdefault(str(node.target), [])
                if not lookup(node)[1]:
                    found.setdefault(f"{node.target} (runs whole)", []).append(name)
                if name not in places:
                    places.append(name)
    return found


def _keywords(built: tuple[nn.Module, dict[str, Tensor]]) -> tuple[nn.Module, tuple[()], dict[str, Tensor]]:
    return built[0], (), built[1]


def page(found: dict[str, list[str]]) -> str:
    """The whole page."""
    return HEAD + "".join(rows(found))


def rows(found: dict[str, list[str]]) -> Iterable[str]:
    known = {str(op): rule.text for op, rule in RULES.items() if not rule.given}
    for op in sorted({*known, *found}):
        yield f"| `{op}` | `{known.get(op, '..., ... -> ...')}` | {', '.join(found.get(op, [])) or '-'} |\n"


if __name__ == "__main__":
    sys.stdout.write(page(occurrences()))
