"""The joint forward and backward graph of one training step, with every end of it labelled.

In: what `capture` traced.  Out: the value every later room reads.  Next: `layout.py`.

Every node of `Graph.fx` carries in `meta`
    val     fake tensor (or tuple of them), on the device `cpu` whatever the cluster is made of
    phase   "forward" or "backward"
    module  path of the submodule it came from ("h.0.attn", "" for the root)
    source  the user's line, "model.py:31, in GPT.forward: logits = self.head(x)" ("" where there is none)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx import Node


@dataclass(frozen=True)
class Input:
    """One placeholder.

    kind    "parameter" | "buffer" | "input" (a tensor leaf of the user's arguments) | "tangent" (the gradient that
            comes in for one output) | "rng" (int64[2]: seed, step; what the random ops draw from)
    name    of the first name for parameters and buffers; "args[0]['ids']"-like for inputs; the output's for tangents
    names   every name of a tied parameter or buffer
    trainable   a parameter that gets a gradient
    """

    node: str
    kind: str
    name: str
    names: tuple[str, ...] = ()
    trainable: bool = False


@dataclass(frozen=True)
class Output:
    """One result of the graph.

    kind    "loss" (the scalar that backward starts from) | "output" (any other tensor leaf) | "buffer" (new value of a
            buffer) | "gradient" (of the parameter `name`) | "input_gradient" (of the input `name`)
    node    name of the node that computes it, or None for a gradient that is always zero
    """

    kind: str
    name: str
    node: str | None


@dataclass
class Graph:
    """A captured training step.

    fx          placeholders in the order of `inputs`; one output node returning the tuple of `outputs`
    in_tree     pytree spec of (args, kwargs); `constants` holds its non-tensor leaves by position
    out_tree    pytree spec of what forward returned; `out_leaves` tells for each leaf either ("output", index into
                `outputs`) or ("constant", value)
    attributes  tensors that the graph reads with `get_attr` (constants lifted while tracing)
    reads       (module path, attribute) of the Python values that forward read on its modules
    writes      plain values that forward left in attributes, under the same names
    stored      dtype in which each parameter is stored, by name, where it is computed with in another
    unreduced   nodes whose operand must not have been summed over devices: casts to the dtype of reductions
    """

    fx: fx.Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    in_tree: Any = None
    out_tree: Any = None
    out_leaves: tuple[tuple[str, Any], ...] = ()
    constants: dict[int, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    reads: tuple[tuple[str, str], ...] = ()
    writes: dict[tuple[str, str], Any] = field(default_factory=dict)
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)
    unreduced: frozenset[str] = frozenset()

    def node(self, name: str) -> Node:
        """The node called `name`."""
        return self.nodes[name]

    def stored_dtype(self, entry: Input) -> torch.dtype:
        """In which a parameter is stored."""
        computed: torch.dtype = self.node(entry.node).meta["val"].dtype
        return self.stored.get(entry.name, computed)

    @property
    def trained(self) -> tuple[Input, ...]:
        """The parameters that an optimizer changes: those to which a gradient comes."""
        reached = {o.name for o in self.outputs if o.kind == "gradient" and o.node is not None}
        return tuple(e for e in self.inputs if e.kind == "parameter" and e.trainable and e.name in reached)

    @property
    def nodes(self) -> dict[str, Node]:
        """Every node by name, in the order they run."""
        return {node.name: node for node in self.fx.nodes}
