"""A traced graph gets its labels: what every end is, and for every node its phase, module and line.

In: a `Joint` and what capture knows about the call.  Out: a `Graph`, not yet normalised.  Next: `normalise.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.fx as fx
from torch import Tensor

from autopar import _torch, tree
from autopar.errors import UnsupportedError
from autopar.graph import Graph, Input, Output

PREFIX = {"parameter": "p", "buffer": "b", "input": "in", "tangent": "grad", "rng": "rng"}


def label(
    joint: _torch.Joint, described: Sequence[Input], seen: Mapping[str, Any], in_tree: tree.Tree, leaves: Sequence[Any]
) -> Graph:
    """Placeholders and results by name; the graph itself is rebuilt with readable names of its placeholders."""
    names = seen["names"]
    inputs = [described[i] if kind == "argument" else Input("", "tangent", names[i]) for kind, i in joint.inputs]
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    placed: list[Input] = []
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            item = inputs[len(placed)]
            new = graph.placeholder(readable(item))
            new.meta = {"val": node.meta["val"], "module": module_of(item), "source": ""}
            placed.append(replace(item, node=new.name))
        elif node.op == "output":
            flat = node.args[0]
        else:
            new = graph.node_copy(node, env.__getitem__)
            custom = node.meta.get("custom") or inherited(new)
            new.meta = {
                "val": node.meta.get("val"),
                "module": custom.get("module", ""),
                "source": custom.get("source", ""),
                **({"region": custom["region"]} if "region" in custom else {}),
                "traced": "backward" if node.meta.get("partitioner_tag") == "is_backward" else "forward",
            }
        env[node] = new if node.op != "output" else node
    results = [
        (output(kind, i, described, seen), None if node is None else env[node])
        for (kind, i), node in zip(joint.results, flat, strict=True)
        if kind != "nothing"
    ]
    order = {"loss": 0, "output": 1, "buffer": 2, "gradient": 3, "input_gradient": 4}
    results.sort(key=lambda pair: order[pair[0].kind])
    graph.output(tuple(node for _, node in results))
    outputs = tuple(replace(item, node=None if node is None else node.name) for item, node in results)
    return Graph(
        fx=graph,
        inputs=tuple(placed),
        outputs=outputs,
        in_tree=in_tree,
        out_tree=seen["out_tree"],
        out_leaves=seen["out_leaves"],
        constants={i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)},
        attributes=joint.attributes,
        reads=seen["reads"],
        writes=seen["writes"],
    )


def inherited(node: fx.Node) -> dict[str, Any]:
    """Labels of a sum of gradients, which autograd adds without any: those of its last operand."""
    last = node.all_input_nodes[-1:]
    return {key: node.meta[key] for node in last for key in ("module", "source", "region") if key in node.meta}


def readable(item: Input) -> str:
    """A name for a placeholder: `p_blocks_0_attn_qkv_weight`, `in_args_0`."""
    name = re.sub(r"\W+", "_", item.name).strip("_")
    return "rng" if item.kind == "rng" else f"{PREFIX[item.kind]}_{name}"


def module_of(item: Input) -> str:
    """The submodule that owns a parameter or buffer."""
    return item.name.rpartition(".")[0] if item.kind in ("parameter", "buffer") else ""


def output(kind: str, index: int, described: Sequence[Input], seen: Mapping[str, Any]) -> Output:
    """What one result of the traced function is."""
    if kind == "output":
        return Output("loss" if seen["loss"] and index == 0 else "output", seen["names"][index], None)
    item = described[index]
    if kind == "gradient":
        return Output("gradient" if item.kind == "parameter" else "input_gradient", item.name, None)
    if item.kind != "buffer":
        raise UnsupportedError(
            f"the model changes {item.kind} {item.name} in place, which a program does not do\n"
            "  try: clone it first, or register it as a buffer"
        )
    return Output("buffer", item.name, None)
