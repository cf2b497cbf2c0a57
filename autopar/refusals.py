"""What capture refuses by name, of a model before it is traced and of the graph it gives.

In: the parameters of a model, a traced joint graph.  Out: nothing, or an error.  Next: `labels.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar import _torch, tree
from autopar.errors import CaptureError, UnsupportedError
from autopar.graph import Input
from autopar.swap import Named


def check_parameters(parameters: Sequence[Named]) -> None:
    """No parameter that is trained is complex: torch's optimizers, given DTensors, update pieces of one wrongly."""
    for parameter in parameters:
        if parameter.tensor.is_complex() and parameter.tensor.requires_grad:
            raise UnsupportedError(
                f"parameter {parameter.names[0]} is {parameter.tensor.dtype}: torch's optimizers give "
                "wrong numbers for complex parameters that are kept in pieces\n"
                "  try: a real parameter with a last dim of 2, and torch.view_as_complex(parameter) in the forward"
            )


def check_constants(joint: _torch.Joint, parameters: Sequence[Named]) -> None:
    """No parameter got into the graph as a constant, and nothing draws from torch's own generator."""
    owned = {id(p.tensor): p.names[0] for p in parameters}
    for value in joint.attributes.values():
        if isinstance(value, nn.Parameter) or id(value) in owned:
            name = owned.get(id(value), f"a parameter of shape {tuple(value.shape)}")
            raise CaptureError(
                f"{name} is used as a constant, so it would get no gradient: it is no parameter of a submodule, or the "
                "model keeps a second reference to it\n  try: register it as a parameter and use it under that name"
            )
    for node in joint.graph.nodes:
        if _torch.random_op(node.target):
            raise UnsupportedError(
                f"{node.target} draws random numbers that differ between devices\n"
                f"  from {node.meta.get('custom', {}).get('source', '')}\n"
                "  try: dropout, rand, rand_like, randn, randn_like, bernoulli, or random numbers passed as an input"
            )


def check_changes(joint: _torch.Joint, inputs: Sequence[Input]) -> None:
    """No parameter is changed in place while gradients flow through it, and every result is a dense tensor."""
    for kind, index in joint.inputs:
        if kind == "changed":
            raise UnsupportedError(
                f"the model changes {inputs[index].kind} {inputs[index].name} in place in its forward, which a program "
                f"does not do\n  from {source_of_change(joint, index)}\n"
                "  try: change it between steps; for an embedding without max_norm"
            )
    for node in joint.graph.nodes:
        if any(isinstance(t, Tensor) and t.layout != torch.strided for t in tree.flatten(node.meta.get("val"))[0]):
            raise UnsupportedError(
                f"{node.target} gives a sparse tensor, which cannot be spread over devices\n"
                f"  from {node.meta.get('custom', {}).get('source', '')}\n  try: an embedding with sparse=False"
            )


def source_of_change(joint: _torch.Joint, index: int) -> str:
    """The user's line that changes an argument."""
    (output,) = (node for node in joint.graph.nodes if node.op == "output")
    results: Any = output.args[0]
    changed = results[joint.results.index(("mutation", index))]
    source: str = changed.meta.get("custom", {}).get("source", "")
    return source
