"""Small subgraphs for ops that need more than running on local pieces when one of their letters is cut.

In: an `Emitter` (see `passes/expand_local.py`) standing at the node.  Out: the emitted nodes, one per result.

The emitter offers `at.operand(i)`, `at.axes` (mesh axes that cut the rule's local letters), `at.call(op, *args)`,
`at.all_reduce(x, kind)` over those axes, and `at.span(tensor, dim)`: start and length of this device's piece of a dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx, ops

if TYPE_CHECKING:
    from autopar.passes.expand_local import Emitter

aten = ops.aten

Emit = Callable[["Emitter"], "list[fx.Node | None]"]


@dataclass(frozen=True)
class Local:
    """How to emit an op one of whose letters is cut, and the reductions in it, in order."""

    emit: Emit
    reduces: tuple[str, ...]


def reducing(*kinds: str) -> Callable[[Emit], Local]:
    """Mark a local function with the reductions it performs, so that they can be priced before they are emitted."""

    def mark(emit: Emit) -> Local:
        return Local(emit, kinds)

    return mark


def wide(at: Emitter, x: fx.Node) -> fx.Node:
    """`x` in the precision in which torch's own kernels accumulate."""
    low = x.meta["val"].dtype in (torch.float16, torch.bfloat16)
    return at.call(aten._to_copy.default, x, dtype=torch.float32) if low else x


def narrow(at: Emitter, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if x.meta["val"].dtype == dtype else at.call(aten._to_copy.default, x, dtype=dtype)


@reducing("max", "sum")
def softmax(at: Emitter) -> list[fx.Node | None]:
    """Softmax or its logarithm over a cut dim: the largest value and the sum of exponentials are reduced."""
    dim = at.args[1]
    x = wide(at, at.operand(0))
    top = at.all_reduce(at.call(aten.amax.default, x, [dim], True), "max")
    z = at.call(aten.sub.Tensor, x, top)
    e = at.call(aten.exp.default, z)
    total = at.all_reduce(at.call(aten.sum.dim_IntList, e, [dim], True), "sum")
    if at.node.target is aten._softmax.default:
        out = at.call(aten.div.Tensor, e, total)
    else:
        out = at.call(aten.sub.Tensor, z, at.call(aten.log.default, total))
    return [narrow(at, out, at.node.meta["val"].dtype)]


@reducing("sum")
def softmax_backward(at: Emitter) -> list[fx.Node | None]:
    """grad - softmax * sum(grad), or softmax * (grad - sum(grad * softmax)), with the sum reduced."""
    dim = at.args[2]
    grad, out = wide(at, at.operand(0)), wide(at, at.operand(1))
    if at.node.target is aten._softmax_backward_data.default:
        product = at.call(aten.mul.Tensor, grad, out)
        total = at.all_reduce(at.call(aten.sum.dim_IntList, product, [dim], True), "sum")
        result = at.call(aten.sub.Tensor, product, at.call(aten.mul.Tensor, out, total))
    else:
        total = at.all_reduce(at.call(aten.sum.dim_IntList, grad, [dim], True), "sum")
        result = at.call(aten.sub.Tensor, grad, at.call(aten.mul.Tensor, at.call(aten.exp.default, out), total))
    return [narrow(at, result, at.node.meta["val"].dtype)]


@reducing("sum", "sum")
def layer_norm(at: Emitter) -> list[fx.Node | None]:
    """Layer norm over a cut dim: mean, then the mean of squared differences, each reduced."""
    x, (weight, bias) = wide(at, at.operand(0)), at.optional(2, 3)
    normalized, eps = at.args[1], at.args[4]
    dims = list(range(-len(normalized), 0))
    count = math.prod(normalized)
    mean = at.call(aten.div.Scalar, at.all_reduce(at.call(aten.sum.dim_IntList, x, dims, True), "sum"), count)
    centred = at.call(aten.sub.Tensor, x, mean)
    squares = at.call(aten.sum.dim_IntList, at.call(aten.mul.Tensor, centred, centred), dims, True)
    variance = at.call(aten.div.Scalar, at.all_reduce(squares, "sum"), count)
    rstd = at.call(aten.rsqrt.default, at.call(aten.add.Scalar, variance, eps))
    y = at.call(aten.mul.Tensor, centred, rstd)
    if weight is not None:
        y = at.call(aten.mul.Tensor, y, weight)
    if bias is not None:
        y = at.call(aten.add.Tensor, y, bias)
    return [narrow(at, y, at.node.meta["val"][0].dtype), mean, rstd]


@reducing("sum", "sum")
def layer_norm_backward(at: Emitter) -> list[fx.Node | None]:
    """The three gradients of a layer norm over a cut dim; two means are reduced."""
    dy, x, mean, rstd = (wide(at, at.operand(i)) for i in range(4))
    (weight,) = at.optional(5)
    normalized, mask = at.args[2], at.args[7]
    dims, rows = list(range(-len(normalized), 0)), list(range(x.meta["val"].dim() - len(normalized)))
    count = math.prod(normalized)
    unit = at.call(aten.mul.Tensor, at.call(aten.sub.Tensor, x, mean), rstd)
    g = dy if weight is None else at.call(aten.mul.Tensor, dy, weight)

    def average(t: fx.Node) -> fx.Node:
        return at.call(aten.div.Scalar, at.all_reduce(at.call(aten.sum.dim_IntList, t, dims, True), "sum"), count)

    results: list[fx.Node | None] = [None, None, None]
    if mask[0]:
        inner = at.call(aten.sub.Tensor, g, average(g))
        inner = at.call(
            aten.sub.Tensor, inner, at.call(aten.mul.Tensor, unit, average(at.call(aten.mul.Tensor, g, unit)))
        )
        results[0] = narrow(at, at.call(aten.mul.Tensor, inner, rstd), at.node.meta["val"][0].dtype)
    for i, term in ((1, unit), (2, None)):
        if mask[i]:
            t = dy if term is None else at.call(aten.mul.Tensor, dy, term)
            t = at.call(aten.sum.dim_IntList, t, rows, False) if rows else t
            results[i] = narrow(at, t, at.node.meta["val"][i].dtype)
    return results


def shifted(at: Emitter, index: fx.Node, table: int | None, dim: int) -> tuple[fx.Node, fx.Node]:
    """(row numbers inside this device's piece, which of them lie in it) for an index into a cut dim.

    `table` is the operand that is indexed, or None where the result is (its dim `dim` is cut).
    """
    start, length = at.span(table, dim)
    row = at.call(aten.sub.Scalar, index, start)
    inside = at.call(aten.logical_and.default, at.call(aten.ge.Scalar, row, 0), at.call(aten.lt.Scalar, row, length))
    return masked(at, row, inside), inside


def masked(at: Emitter, x: fx.Node, inside: fx.Node) -> fx.Node:
    """`x` where `inside`, else zero."""
    return at.call(aten.masked_fill.Scalar, x, at.call(aten.logical_not.default, inside), 0)


@reducing()
def embedding(at: Emitter) -> list[fx.Node | None]:
    """Rows of a table cut by rows: each device looks up what it holds, zero elsewhere; the sum is pending."""
    table, index = at.operand(0), at.operand(1)
    safe, inside = shifted(at, index, 0, 0)
    rows = at.call(aten.embedding.default, table, safe)
    return [masked(at, rows, at.call(aten.unsqueeze.default, inside, -1))]


@reducing()
def embedding_backward(at: Emitter) -> list[fx.Node | None]:
    """Each device adds the gradients of the rows it holds."""
    grad, index = at.operand(0), at.operand(1)
    padding = at.args[3]
    safe, inside = shifted(at, index, None, 0)
    if padding >= 0:
        inside = at.call(aten.logical_and.default, inside, at.call(aten.ne.Scalar, index, padding))
    kept = masked(at, grad, at.call(aten.unsqueeze.default, inside, -1))
    _, length = at.span(None, 0)
    return [at.call(aten.embedding_dense_backward.default, kept, safe, length, -1, False)]


@reducing()
def nll(at: Emitter) -> list[fx.Node | None]:
    """The negative log-likelihood over cut classes: the device that holds a target's class contributes its term."""
    logp, target = at.operand(0), at.operand(1)
    reduction, ignore = at.args[3], at.args[4]
    valid = at.call(aten.ne.Scalar, target, ignore)
    safe, inside = shifted(at, target, 0, logp.meta["val"].dim() - 1)
    inside = at.call(aten.logical_and.default, inside, valid)
    picked = at.call(aten.gather.default, logp, -1, at.call(aten.unsqueeze.default, safe, -1))
    terms = at.call(aten.neg.default, masked(at, at.call(aten.squeeze.dim, picked, -1), inside))
    count = at.call(aten.sum.default, at.call(aten._to_copy.default, valid, dtype=logp.meta["val"].dtype))
    if reduction == 0:
        return [terms, at.call(aten.zeros_like.default, count)]
    return [at.call(aten.sum.default, terms), count]


@reducing()
def nll_backward(at: Emitter) -> list[fx.Node | None]:
    """-gradient at the target's class on the device that holds it, zero elsewhere."""
    grad, logp, target = at.operand(0), at.operand(1), at.operand(2)
    reduction, ignore = at.args[4], at.args[5]
    safe, inside = shifted(at, target, 1, logp.meta["val"].dim() - 1)
    inside = at.call(aten.logical_and.default, inside, at.call(aten.ne.Scalar, target, ignore))
    column = at.call(aten._to_copy.default, at.call(aten.unsqueeze.default, inside, -1), dtype=logp.meta["val"].dtype)
    spread = at.call(aten.unsqueeze.default, grad, -1) if reduction == 0 else grad
    value = at.call(aten.mul.Tensor, column, at.call(aten.neg.default, spread))
    zeros = at.call(aten.zeros_like.default, logp)
    return [at.call(aten.scatter.src, zeros, -1, at.call(aten.unsqueeze.default, safe, -1), value)]
