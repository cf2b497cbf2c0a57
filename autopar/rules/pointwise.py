"""Ops that work on every element by itself, with broadcasting.

In: nothing.  Out: rows of the rule table; any other op that torch tags as pointwise gets the plain row from `lookup`.
Next: `reductions.py`.
"""

from __future__ import annotations

import torch
from torch import fx, ops

from autopar.rules import bind
from autopar.rules.core import Instance, args_of, computed, instantiate, rule, slots

aten = ops.aten

rule([aten.add.Tensor, aten.sub.Tensor], "..., ... -> ...", linear="all")
rule(aten.mul.Tensor, "..., ... -> ...", linear="each")
rule(aten.div.Tensor, "..., ... -> ...", linear="0")
rule(aten.div.Scalar, "... -> ...", linear="each")
rule(aten.neg.default, "... -> ...", linear="each")
rule(aten.where.self, "..., ..., ... -> ...", linear="1+2")
rule(aten.zeros_like.default, "... -> ...")
rule([aten.complex.default, aten.polar.default], "..., ... -> ...")
rule(aten.view_as_real.default, "... -> ... p", whole="p", linear="each")
rule(aten.view_as_complex.default, "... p -> ...", whole="p", linear="each", bind=bind.view_as_complex)
# the backward of these is linear in the gradient that comes in, operand 0
rule([aten.gelu_backward.default, aten.silu_backward.default], "..., ... -> ...", linear="0")
rule([aten.sigmoid_backward.default, aten.tanh_backward.default], "..., ... -> ...", linear="0")
rule(aten.threshold_backward.default, "..., ... -> ...", linear="0")
rule([aten.softplus_backward.default, aten.elu_backward.default], "..., ... -> ...", linear="0")
rule([aten.hardswish_backward.default, aten.hardsigmoid_backward.default], "..., ... -> ...", linear="0")
rule([aten.leaky_relu_backward.default, aten.hardtanh_backward.default], "..., ... -> ...", linear="0")
rule([aten.mish_backward.default, aten.softshrink_backward.default], "..., ... -> ...", linear="0")
rule(aten._prelu_kernel_backward.default, "..., ..., ... -> ..., ...", linear="0")
# not tagged as pointwise by torch
rule(aten.hardswish.default, "... -> ...")
rule([aten.floor_divide.default, aten._prelu_kernel.default], "..., ... -> ...")


@computed(aten._to_copy.default, "... -> ...")
def cast(node: fx.Node) -> Instance:
    """A cast passes a pending sum on between floating-point types that lose nothing, or where a user wants it so."""
    source, result = args_of(node)[0].meta["val"].dtype, node.meta["val"].dtype
    floats = source.is_floating_point and result.is_floating_point
    keeps = floats and (node.meta.get("reduction") or torch.finfo(result).bits >= torch.finfo(source).bits)
    return instantiate(node, "... -> ...", linear="each" if keeps else None)


def is_pointwise(node: fx.Node) -> bool:
    """Whether torch itself tags the op as pointwise and each result has the broadcast shape of the operands."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def pointwise(node: fx.Node) -> Instance:
    """The plain row for an op tagged as pointwise."""
    return instantiate(node, ", ".join("..." for _ in slots(node)) + " -> ...")
