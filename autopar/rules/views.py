"""Ops that move elements without computing: reshapes, transposes, slices, joins, and tensors made from nothing.

In: nothing.  Out: rows of the rule table.  Next: `lookups.py`.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx, ops

from autopar.rules import bind
from autopar.rules.core import Instance, args_of, computed, instantiate, operands, rule
from autopar.rules.reductions import argument

aten = ops.aten


def shape_of(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def row(*tensors: list[str]) -> str:
    """`a b, c -> d`: all but the last are operands."""
    return ", ".join(" ".join(t) for t in tensors[:-1]) + " -> " + " ".join(tensors[-1])


def regroup(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Smallest runs of dims with equal products, for a view: ((dims before), (dims after)), ..."""
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        left, right = [i] if i < len(before) else [], [j] if j < len(after) else []
        i, j = i + len(left), j + len(right)
        while math.prod(before[d] for d in left) != math.prod(after[d] for d in right):
            if math.prod(before[d] for d in left) < math.prod(after[d] for d in right):
                left.append(i)
                i += 1
            else:
                right.append(j)
                j += 1
        groups.append((tuple(left), tuple(right)))
    return tuple(groups)


@computed([aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim], "(a b) -> a b", bind=bind.view)
def view(node: fx.Node) -> Instance:
    before, after = shape_of(args_of(node)[0]), shape_of(node)
    blank: tuple[tuple[str, ...], ...] = ()
    if 0 in before:
        return whole_view(before, after)
    return Instance(
        (blank + ((),) * len(before),),
        (blank + ((),) * len(after),),
        {},
        linear=(frozenset([0]),),
        groups=regroup(before, after),
    )


def whole_view(before: tuple[int, ...], after: tuple[int, ...]) -> Instance:
    """A view none of whose dims may be cut."""
    ins = tuple((f"i{d}",) if n != 1 else () for d, n in enumerate(before))
    outs = tuple((f"o{d}",) if n != 1 else () for d, n in enumerate(after))
    sizes = {f"i{d}": n for d, n in enumerate(before)} | {f"o{d}": n for d, n in enumerate(after)}
    return Instance((ins,), (outs,), sizes, whole=frozenset(sizes), linear=(frozenset([0]),))


@computed([aten.permute.default], "a b -> b a")
def permute(node: fx.Node) -> Instance:
    letters = [f"d{i}" for i in range(len(shape_of(node)))]
    return instantiate(node, row(letters, [letters[d] for d in args_of(node)[1]]), linear="each")


@computed([aten.expand.default], "1 a -> b a", shape=1)
def expand(node: fx.Node) -> Instance:
    source, result = shape_of(args_of(node)[0]), shape_of(node)
    letters = [f"d{i}" for i in range(len(result))]
    return instantiate(node, row(letters[len(result) - len(source) :], letters), linear="each")


def along(node: fx.Node, dim: int) -> tuple[list[str], int]:
    """Letters of operand 0 and the position of `dim` in them."""
    rank = len(shape_of(operands(node)[0]))
    return [f"d{i}" for i in range(rank)], dim % rank


def aligned(size: int, start: int, length: int) -> bool:
    """Whether [start, start + length) is one of the equal parts of a dim."""
    return 0 < length < size and size % length == 0 and start % length == 0


@computed(aten.slice.Tensor, "(c a) -> a", bind=bind.slice)
def slices(node: fx.Node) -> Instance:
    """A slice of one of several equal parts selects from an outer factor; any other keeps its dim whole."""
    letters, at = along(node, argument(node, 1, "dim", 0))
    size, length = shape_of(args_of(node)[0])[at], shape_of(node)[at]
    start = argument(node, 2, "start", None) or 0
    step = argument(node, 4, "step", 1)
    if length == size and step == 1:
        return instantiate(node, row(letters, letters), linear="each")
    source, result = list(letters), list(letters)
    if step == 1 and aligned(size, start % size if start < size else start, length):
        source[at] = "(c p)"
        result[at] = "p"
        sizes = {"c": size // length, "p": length}
        return instantiate(node, row(source, result), sizes=sizes, whole="c", linear="each")
    source[at], result[at] = "u", "v"
    return instantiate(node, row(source, result), whole="u v", linear="each")


@computed(aten.slice_backward.default, "a -> (c a)", shape=1, bind=bind.slice_backward)
def slice_backward(node: fx.Node) -> Instance:
    letters, at = along(node, args_of(node)[2])
    length, size = shape_of(args_of(node)[0])[at], shape_of(node)[at]
    start, step = args_of(node)[3] or 0, args_of(node)[5]
    if length == size and step == 1:
        return instantiate(node, row(letters, letters), linear="each")
    source, result = list(letters), list(letters)
    if step == 1 and aligned(size, start % size if start < size else start, length):
        source[at], result[at] = "p", "(c p)"
        sizes = {"c": size // length, "p": length}
        return instantiate(node, row(source, result), sizes=sizes, whole="c", linear="each")
    source[at], result[at] = "u", "v"
    return instantiate(node, row(source, result), whole="u v", linear="each")


@computed([aten.select.int], "a b -> b")
def select(node: fx.Node) -> Instance:
    letters, at = along(node, args_of(node)[1])
    kept = letters[:at] + letters[at + 1 :]
    return instantiate(node, row(letters, kept), whole=letters[at], linear="each")


@computed([aten.select_backward.default], "b -> a b", shape=1, bind=bind.select_backward)
def select_backward(node: fx.Node) -> Instance:
    result = [f"d{i}" for i in range(len(shape_of(node)))]
    at = args_of(node)[2] % len(result)
    return instantiate(node, row(result[:at] + result[at + 1 :], result), whole=result[at], linear="each")


@computed(aten.slice_scatter.default, "a u, a v -> a u")
def slice_scatter(node: fx.Node) -> Instance:
    letters, at = along(node, argument(node, 2, "dim", 0))
    source = [*letters[:at], "v", *letters[at + 1 :]]
    return instantiate(node, row(letters, source, letters), whole=f"{letters[at]} v", linear="0+1")


@computed(aten.select_scatter.default, "a u, a -> a u")
def select_scatter(node: fx.Node) -> Instance:
    letters, at = along(node, args_of(node)[2])
    return instantiate(node, row(letters, letters[:at] + letters[at + 1 :], letters), whole=letters[at], linear="0+1")


@computed(aten.unfold.default, "a u -> a v w")
def unfold(node: fx.Node) -> Instance:
    letters, at = along(node, args_of(node)[1])
    result = [*letters[:at], "v", *letters[at + 1 :], "w"]
    return instantiate(node, row(letters, result), whole=f"{letters[at]} v w", linear="each")


@computed(aten.unfold_backward.default, "a v w -> a u", shape=1)
def unfold_backward(node: fx.Node) -> Instance:
    rank = len(shape_of(node))
    letters, at = [f"d{i}" for i in range(rank)], args_of(node)[2] % rank
    source = [*letters[:at], "v", *letters[at + 1 :], "w"]
    return instantiate(node, row(source, letters), whole=f"{letters[at]} v w", linear="each")


@computed([aten.cat.default], "a, a -> (c a)")
def cat(node: fx.Node) -> Instance:
    """Equal parts become an outer factor that stays whole; unequal ones keep the dim whole."""
    parts = operands(node)
    letters, at = along(node, argument(node, 1, "dim", 0))
    lengths = [shape_of(p)[at] for p in parts]
    sources = []
    result = list(letters)
    equal = len(set(lengths)) == 1
    for i in range(len(parts)):
        sources.append([("p" if equal else f"u{i}") if d == at else x for d, x in enumerate(letters)])
    result[at] = "(c p)" if equal else "v"
    whole = "c" if equal else " ".join(["v", *(f"u{i}" for i in range(len(parts)))])
    sizes = {"c": len(parts), "p": lengths[0]} if equal else {}
    found = dict(sizes)

    def dims(letters: list[str], shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
        out = []
        for text, size in zip(letters, shape, strict=True):
            kept = () if size == 1 else tuple(x for x in text.strip("()").split() if found.get(x) != 1)
            if len(kept) == 1:
                found.setdefault(kept[0], size)
            out.append(kept)
        return tuple(out)

    inputs = tuple(dims(s, shape_of(p)) for s, p in zip(sources, parts, strict=True))
    outputs = (dims(result, shape_of(node)),)
    return Instance(inputs, outputs, found, frozenset(whole.split()), (frozenset(range(len(parts))),))


@computed([aten.constant_pad_nd.default], "a b -> a c")
def pad(node: fx.Node) -> Instance:
    before, after = shape_of(args_of(node)[0]), shape_of(node)
    same = [x == y for x, y in zip(before, after, strict=True)]
    source = [f"d{i}" if s else f"u{i}" for i, s in enumerate(same)]
    result = [f"d{i}" if s else f"v{i}" for i, s in enumerate(same)]
    whole = " ".join(x for x in (*source, *result) if not x.startswith("d"))
    zero = (args_of(node)[2] if len(args_of(node)) > 2 else 0) == 0
    return instantiate(node, row(source, result), whole=whole, linear="each" if zero else None)


@computed([aten.flip.default], "a k -> a k")
def flip(node: fx.Node) -> Instance:
    letters = [f"d{i}" for i in range(len(shape_of(node)))]
    whole = " ".join(letters[d % len(letters)] for d in args_of(node)[1])
    return instantiate(node, row(letters, letters), whole=whole, linear="each")


@computed([aten.triu.default, aten.tril.default, aten.diagonal.default], "b u v -> b u v")
def triangle(node: fx.Node) -> Instance:
    if node.target is aten.diagonal.default:
        before, after = shape_of(args_of(node)[0]), shape_of(node)
        return whole_view(before, after)
    letters = [f"d{i}" for i in range(len(shape_of(node)))]
    return instantiate(node, row(letters, letters), whole=" ".join(letters[-2:]), linear="each")


rule(aten.full.default, " -> ...", shape=0)
rule(aten.arange.start_step, " -> n", positional="n", bind=bind.arange)
