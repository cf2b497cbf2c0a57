"""What a rule is: one line that tells how an op's operands and results share letters.

In: the text of a rule and a node.  Out: an `Instance`, the rule with this node's sizes.  Next: `matmul.py`.

    rule(aten.mm.default, "m k, k n -> m n", flops="2 m k n", linear="each")

Left of the arrow one entry per tensor argument of the op (of its schema, in order; one that is None at a node drops
out, one that is a list of tensors has one entry for all of them), right of it one per result. Entries are letters, one
per dim; `...` stands for any number of leading dims, aligned from the right as in broadcasting; `1` for a dim of size 1
and `(a b)` for a dim that is a product. A dim of size 1 has no letter. A letter that is missing on the right was summed
over, so cutting it leaves a pending sum.

Keywords
    whole   letters that must not be cut
    linear  how a pending sum passes: "each" operand alone, the others whole (products); "all" operands together (sums);
            or numbers of entries: "0 1" for each alone, "1+2" for two together
    kinds   letter -> "max" | "min" where the missing letter was not summed over
    flops   "2 m k n": a number and letters, floating-point operations of the whole op
    shape   position of the argument that holds the result's sizes; made a device's own when the program is bound
    local   letter(s) -> function that emits a small subgraph when such a letter is cut (see `local.py`)
    bind    function that rewrites a node's arguments for one device (see `passes/bind.py`)
    positional  letters along which a device's piece must be one run of the whole dim, because its place counts
    sizes   letters whose size no single dim shows
    names   letter -> name of the axis, for printing and for strategies ("h": "heads")
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar.errors import RuleError
from autopar.rules.local import Local

Dims = tuple[tuple[str, ...], ...]  # of one tensor: the letters of every dim, major first


@dataclass(frozen=True)
class Instance:
    """A rule at one node.

    inputs, outputs   per tensor, per dim: letters; operands in the order of `operands(node)`
    groups            views only: (operand dims, result dims) whose flattened orders agree; their letters come with the
                      factor analysis
    sizes             letter -> size
    linear            sets of operands through which a pending sum passes, the other operands whole
    flops             (number, letters): floating-point operations of the whole op
    rows              of every operand, of every result: see `Layout.rows`
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)
    flops: tuple[float, tuple[str, ...]] | None = None
    groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    local: Mapping[str, Local] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    positional: frozenset[str] = frozenset()
    rows: tuple[tuple[Fraction | None, ...], tuple[Fraction | None, ...]] = ((), ())

    @cached_property
    def signature(self) -> Hashable:
        """What the choices of an op depend on, besides the mesh and whether a mesh axis may do something at all."""
        tables = (self.sizes, self.kinds, self.local)
        return self.inputs, self.outputs, self.rows, *(tuple(sorted(table.items())) for table in tables)


@dataclass(frozen=True)
class Rule:
    """The rule of one op: how to make an `Instance`, and what emission needs.

    given   the rule with its keywords, where it is a user's and no row of the table
    """

    make: Callable[[fx.Node], Instance]
    text: str
    shape: int | None = None
    bind: Callable[..., Any] | None = None
    given: str = ""


RULES: dict[Any, Rule] = {}


def rule(
    op: Any, spec: str, *, shape: int | None = None, bind: Callable[..., Any] | None = None, **keywords: Any
) -> None:
    """Register the rule of `op` (an overload or a list of them); see the module docstring."""
    for one in op if isinstance(op, (list, tuple)) else (op,):
        RULES[one] = Rule(lambda node: instantiate(node, spec, **keywords), spec, shape, bind)


def computed(
    op: Any, text: str, *, shape: int | None = None, bind: Callable[..., Any] | None = None
) -> Callable[[Callable[[fx.Node], Instance]], Callable[[fx.Node], Instance]]:
    """Register a function node -> Instance as the rule of `op`, for ops whose letters depend on arguments."""

    def register(make: Callable[[fx.Node], Instance]) -> Callable[[fx.Node], Instance]:
        for one in op if isinstance(op, (list, tuple)) else (op,):
            RULES[one] = Rule(make, text, shape, bind)
        return make

    return register


# --- tensors of a node ------------------------------------------------------------------------------------------------


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """A node's positional arguments, of which a rule knows the types."""
    return node.args


def slots(node: fx.Node) -> list[Any]:
    """What stands in every tensor argument of the op's schema: a node, a list of nodes, a number, or None."""
    schema = node.target._schema  # type: ignore[union-attr]
    out = []
    for position, argument in enumerate(schema.arguments):
        if "Tensor" not in str(argument.type):
            continue
        if position < len(args_of(node)) and not argument.kwarg_only:
            out.append(args_of(node)[position])
        else:
            out.append(node.kwargs.get(argument.name))
    return out


def operands(node: fx.Node) -> list[fx.Node]:
    """Every tensor that the node reads, in schema order."""
    if not hasattr(node.target, "_schema"):
        return list(node.all_input_nodes)
    out: list[fx.Node] = []
    for slot in slots(node):
        entries = slot if isinstance(slot, (list, tuple)) else [slot]
        out += [entry for entry in entries if isinstance(entry, fx.Node)]
    return out


def returns_list(node: fx.Node) -> bool:
    """Whether the op's one result is a list of tensors, as many as it pleases."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and len(schema.returns) == 1 and "List[" in str(schema.returns[0].type)


def results(node: fx.Node) -> list[torch.Tensor | None]:
    """Fake tensors of what the node computes; an op that was told to leave one out has None there."""
    value = node.meta["val"]
    return list(value) if isinstance(value, (list, tuple)) else [value]


# --- from text to an instance -----------------------------------------------------------------------------------------

ENTRY = re.compile(r"\.\.\.|\([^)]*\)|\S+")


def parse(entry: str, shape: tuple[int, ...], what: str) -> Iterator[tuple[str, ...]]:
    """Letters of every dim of one tensor; `...` becomes `.0`, `.1`, ... counted from the right."""
    parts = ENTRY.findall(entry)
    rest = len(shape) - len([p for p in parts if p != "..."])
    if rest < 0 or (rest and "..." not in parts):
        raise RuleError(f"rule entry `{entry}` does not fit a tensor of shape {list(shape)} in {what}")
    for part in parts:
        if part == "...":
            yield from ((f".{i}",) for i in reversed(range(rest)))
        else:
            yield tuple(part.strip("()").split())


def instantiate(
    node: fx.Node,
    spec: str,
    *,
    whole: str = "",
    linear: str | None = None,
    kinds: Mapping[str, str] | None = None,
    flops: str | None = None,
    local: Mapping[str, Local] | None = None,
    names: Mapping[str, str] | None = None,
    positional: str = "",
    sizes: Mapping[str, int] | None = None,
) -> Instance:
    """The rule `spec` with the sizes of `node`."""
    left, right = spec.split("->")
    entries: list[str] = []
    tensors: list[torch.Tensor] = []
    places: list[range] = []  # of every entry, its operands
    given = slots(node)
    for entry, slot in zip(left.split(","), given, strict=False):
        here = [x.meta["val"] for x in (slot if isinstance(slot, (list, tuple)) else [slot]) if isinstance(x, fx.Node)]
        places.append(range(len(tensors), len(tensors) + len(here)))
        entries += [entry] * len(here)
        tensors += here
    found: dict[str, int] = dict(sizes or {})

    def read(entry: str, tensor: torch.Tensor) -> Dims:
        row = []
        for letters, size in zip(parse(entry, tuple(tensor.shape), node.name), tensor.shape, strict=True):
            kept = () if letters == ("1",) or size == 1 else tuple(x for x in letters if found.get(x) != 1)
            fresh = [x for x in kept if x not in found]
            if len(fresh) == 1:  # what the others leave of the dim
                found[fresh[0]] = size // math.prod(found[x] for x in kept if x in found)
            if len(fresh) > 1:
                raise RuleError(f"({' '.join(kept)}) of `{spec}` does not tell {' and '.join(fresh)} at {node.name}")
            if len(kept) == 1 and found[kept[0]] != size:
                raise RuleError(f"letter {kept[0]} of `{spec}` is {found[kept[0]]} and {size} at {node.name}")
            if kept and math.prod(found[x] for x in kept) != size:
                raise RuleError(f"({' '.join(kept)}) of `{spec}` does not make {size} at {node.name}")
            row.append(kept)
        return tuple(row)

    made = results(node)
    count = len(entries)
    ends = right.split(",") * (len(made) if returns_list(node) else 1)
    every = [*zip(entries, tensors, strict=True), *zip(ends, made, strict=False)]
    dims: list[Dims] = [()] * len(every)
    # plain letters first, so that products find the sizes of their parts
    for i in sorted(range(len(every)), key=lambda i: "(" in every[i][0]):
        entry, tensor = every[i]
        dims[i] = () if tensor is None else read(entry, tensor)
    inputs, outputs = tuple(dims[:count]), tuple(dims[count:])
    passing: tuple[frozenset[int], ...] = ()
    if linear == "all":
        complete = all(place and isinstance(slot, (fx.Node, list, tuple)) for place, slot in zip(places, given))
        passing = (frozenset(range(len(inputs))),) if complete else ()
    elif linear == "each":
        passing = tuple(frozenset([i]) for i in range(len(inputs)))
    elif linear:
        groups = [[places[int(i)] for i in together.split("+")] for together in linear.split()]
        passing = tuple(frozenset(i for place in group for i in place) for group in groups if all(group))
    work = None
    if flops:
        number, *letters = flops.split()
        work = (float(number), tuple(x for x in letters if found.get(x, 1) != 1))
    return Instance(
        inputs,
        outputs,
        found,
        frozenset(whole.split()),
        passing,
        dict(kinds or {}),
        work,
        local=dict(local or {}),
        names=dict(names or {}),
        positional=frozenset(positional.split()),
    )


def run_whole(node: fx.Node) -> Instance:
    """No dim of any operand or result may be cut."""
    sizes: dict[str, int] = {}

    def dims(tensor: torch.Tensor, prefix: str) -> tuple[tuple[str, ...], ...]:
        out = tuple((f"{prefix}{d}",) if n != 1 else () for d, n in enumerate(tensor.shape))
        sizes.update({f"{prefix}{d}": n for d, n in enumerate(tensor.shape) if n != 1})
        return out

    inputs = tuple(dims(o.meta["val"], f"i{i}.") for i, o in enumerate(operands(node)))
    made = enumerate(results(node))
    outputs = tuple(dims(t, f"o{i}.") if isinstance(t, torch.Tensor) else () for i, t in made)
    return Instance(inputs, outputs, sizes, whole=frozenset(sizes))
