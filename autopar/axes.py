"""Which factors every tensor dim is made of, found by unifying all rules over the graph.

In: a captured graph.  Out: `Axes`: factors of every dim, every node's rule in them, names.  Next: `choices.py`.

Every dim starts as one atom. A rule that gives two dims one letter unifies them; where a dim is a product of letters,
its atoms are split at common divisors, and the split shows wherever that atom occurs. Where sizes do not nest (6 and 4)
nothing is merged and those dims stay whole at that op.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from torch import fx

from autopar.graph import Graph
from autopar.rules.core import Dims, Instance, args_of, operands, results
from autopar.rules.experts import passing
from autopar.rules.table import lookup
from autopar.uncollected import uncollected

Value = tuple[str, int]  # (node name, index of its result)
Factors = tuple[tuple[int, ...], ...]


class Atom:
    """One factor, or what it was split into or merged with."""

    __slots__ = ("names", "parts", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.parts: list[Atom] | None = None
        self.names: list[str] = []

    def leaves(self) -> list[Atom]:
        if self.parts is None:
            return [self]
        if len(self.parts) == 1:
            leaves = self.parts[0].leaves()
            self.parts = leaves if len(leaves) == 1 else self.parts
            return leaves
        return [leaf for part in self.parts for leaf in part.leaves()]


def leaves(atoms: Iterable[Atom]) -> list[Atom]:
    return [leaf for atom in atoms for leaf in atom.leaves()]


def nest(left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether two factorisations of one number have a common refinement that keeps the order."""
    a, b = list(left), list(right)
    while a and b:
        x, y = a.pop(0), b.pop(0)
        if x > y and x % y == 0:
            a.insert(0, x // y)
        elif y > x and y % x == 0:
            b.insert(0, y // x)
        elif x != y:
            return False
    return not a and not b


def unify(left: list[Atom], right: list[Atom]) -> None:
    """Make two atom lists the same one, splitting where needed; nothing happens where sizes do not nest."""
    while True:
        a, b = leaves(left), leaves(right)
        if not nest([x.size for x in a], [x.size for x in b]):
            return
        pair = next(((x, y) for x, y in zip(a, b, strict=False) if x is not y), None)
        if pair is None:
            return
        small, large = sorted(pair, key=lambda atom: atom.size)
        if small.size == large.size:
            small.names += large.names
            large.parts = [small]
        else:
            large.parts = [Atom(small.size), Atom(large.size // small.size)]
            for part in large.parts:
                part.names = list(large.names)


@dataclass(frozen=True)
class Axes:
    """The result of the analysis.

    factors    value -> sizes of the factors of every dim
    labels     value -> name of every one of those factors ("batch", "heads", "f3", ...)
    instances  node name -> its rule, in letters that are factors
    unknown    names of nodes whose op has no rule
    known_choices  what `choices.py` has enumerated, by signature of a rule and mesh
    """

    factors: dict[Value, Factors]
    labels: dict[Value, tuple[tuple[str, ...], ...]]
    instances: dict[str, Instance]
    unknown: tuple[str, ...] = ()
    known_choices: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def operands(self, node: fx.Node) -> list[Value]:
        """The values that a node reads, in the order of `Choice.inputs`."""
        return [source(operand) for operand in operands(node)]

    def rule(self, node: fx.Node) -> Instance:
        return self.instances[node.name]

    def without_rule(self, graph: Graph) -> Iterator[str]:
        """A line for every op that has no rule and is not autopar's own: it runs whole on every device."""
        nodes = graph.nodes
        first = {str(nodes[name].target): nodes[name] for name in reversed(self.unknown)}
        for op, node in sorted(first.items()):
            if not op.startswith("autopar."):
                source = node.meta.get("source", "")
                yield f"{op} has no rule and runs whole on every device" + (f", from {source}" if source else "")


def source(node: fx.Node) -> Value:
    """The value that a node stands for: itself, or the result that a getitem picks."""
    if is_getitem(node):
        return args_of(node)[0].name, int(args_of(node)[1])
    return node.name, 0


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def computes(node: fx.Node) -> bool:
    """Whether the node is an op with a rule (not an end of the graph, not a getitem)."""
    return node.op == "call_function" and not is_getitem(node)


@uncollected()
def analyse(graph: Graph) -> Axes:
    """Factors of every tensor dim of `graph`."""
    atoms: dict[Value, list[list[Atom]]] = {}
    raw: dict[str, Instance] = {}
    letters: dict[str, dict[str, list[Atom]]] = {}
    rows: dict[Value, Fraction | None] = {}
    unknown = []
    for node in graph.fx.nodes:
        if node.op == "output" or is_getitem(node):
            continue
        for i, tensor in enumerate(results(node)):
            if tensor is not None:
                atoms[node.name, i] = [[Atom(n)] if n != 1 else [] for n in tensor.shape]
        if not computes(node):
            continue
        instance, known = lookup(node)
        if not known:
            unknown.append(node.name)
        given = tuple(rows.get(source(o)) for o in operands(node))
        made = (passing(node, given),) * len(results(node))
        rows |= {(node.name, i): found for i, found in enumerate(made)}
        raw[node.name] = replace(instance, rows=(given, made)) if any(given + made) else instance
        tensors = [atoms[source(o)] for o in operands(node)] + _result_atoms(node, atoms)
        letters[node.name] = _constrain(instance, tensors)
    _tie_results(graph, atoms)
    _name_inputs(graph, atoms)
    instances = {}
    for node in graph.fx.nodes:
        if node.name in raw:
            tensors = [atoms[source(o)] for o in operands(node)] + _result_atoms(node, atoms)
            instances[node.name] = refine(raw[node.name], tensors, letters[node.name])
    factors = {v: tuple(tuple(x.size for x in leaves(dim)) for dim in dims) for v, dims in atoms.items()}
    return Axes(factors, _labels(atoms), instances, tuple(unknown))


def _result_atoms(node: fx.Node, atoms: dict[Value, list[list[Atom]]]) -> list[list[list[Atom]]]:
    return [atoms.get((node.name, i), []) for i in range(len(results(node)))]


def _constrain(instance: Instance, tensors: list[list[list[Atom]]]) -> dict[str, list[Atom]]:
    """Unify what the rule equates; the atoms of every letter."""
    mine = {letter: ([Atom(n)] if n != 1 else []) for letter, n in instance.sizes.items()}
    for dims, tensor in zip((*instance.inputs, *instance.outputs), tensors, strict=True):
        for names, atoms in zip(dims, tensor, strict=True):
            if names:
                unify([a for n in names for a in mine[n]], atoms)
    for before, after in instance.groups:
        unify([a for d in before for a in tensors[0][d]], [a for d in after for a in tensors[1][d]])
    for letter, name in instance.names.items():
        for atom in leaves(mine.get(letter, [])):
            atom.names.append(name)
    return mine


def refine(instance: Instance, tensors: list[list[list[Atom]]], mine: dict[str, list[Atom]]) -> Instance:
    """The rule with one letter per factor; letters whose dims do not share their factors become whole.

    So do letters that stand in a dim with one of those: `c` of (g c) and c, where another dim does not agree about g.
    """
    sizes = [[[x.size for x in leaves(dim)] for dim in tensor] for tensor in tensors]
    if instance.groups:
        return _refine_view(instance, sizes)
    parts = {letter: [x.size for x in leaves(atoms)] for letter, atoms in mine.items()}
    every = (*instance.inputs, *instance.outputs)
    broken: set[str] = set()
    for dims, tensor in zip(every, sizes, strict=True):
        for names, found in zip(dims, tensor, strict=True):
            if [n for name in names for n in parts[name]] != found:
                broken |= set(names)
    together = [set(names) for dims in every for names in dims]
    while torn := [names for names in together if names & broken and names - broken]:
        broken.update(*torn)
    out: list[Dims] = []
    table: dict[str, int] = {}
    fresh: set[str] = set()
    for t, (dims, tensor) in enumerate(zip(every, sizes, strict=True)):
        row = []
        for d, (names, found) in enumerate(zip(dims, tensor, strict=True)):
            if broken & set(names):
                dim = tuple(f"!{t}.{d}.{i}" for i in range(len(found)))
                fresh |= set(dim)
            else:
                dim = tuple(x for name in names for x in split_letter(name, len(parts[name])))
            table |= dict(zip(dim, found, strict=True))
            row.append(dim)
        out.append(tuple(row))

    def spread(name: str) -> list[str]:
        return [] if name in broken else split_letter(name, len(parts.get(name, [])))

    count = len(instance.inputs)
    flops = instance.flops
    if flops:
        flops = (flops[0], tuple(x for name in flops[1] for x in (spread(name) or [name])))
        table |= {name: instance.sizes[name] for name in flops[1] if name not in table}
    kinds: dict[str, str] = {}
    for key, kind in instance.kinds.items():
        name, _, result = key.partition(":")
        kinds |= {x + (f":{result}" if result else ""): kind for x in spread(name)}
    return replace(
        instance,
        inputs=tuple(out[:count]),
        outputs=tuple(out[count:]),
        sizes=table,
        whole=frozenset(fresh)
        | {x for name in instance.whole for x in spread(name)}
        | {x for name in instance.positional for x in spread(name)[1:]},
        kinds=kinds,
        flops=flops,
        local={x: f for name, f in instance.local.items() for x in spread(name)},
        names={x: label for name, label in instance.names.items() for x in spread(name)},
    )


def split_letter(name: str, count: int) -> list[str]:
    """Names of the factors of a letter: itself, or `k~0`, `k~1`, ..."""
    return [name] if count == 1 else [f"{name}~{i}" for i in range(count)]


def _refine_view(instance: Instance, sizes: list[list[list[int]]]) -> Instance:
    """Letters of a view: one per factor of each group whose two sides agree, whole ones elsewhere."""
    ins, outs = [()] * len(sizes[0]), [()] * len(sizes[1])  # type: list[tuple[str, ...]], list[tuple[str, ...]]
    table: dict[str, int] = {}
    whole: set[str] = set()
    for g, (before, after) in enumerate(instance.groups):
        left = [n for d in before for n in sizes[0][d]]
        same = left == [n for d in after for n in sizes[1][d]]
        for side, dims, shapes in ((ins, before, sizes[0]), (outs, after, sizes[1])):
            count = 0
            for d in dims:
                prefix = f"g{g}" if same else f"!{'i' if side is ins else 'o'}{g}"
                side[d] = tuple(f"{prefix}.{count + i}" for i in range(len(shapes[d])))
                table |= dict(zip(side[d], shapes[d], strict=True))
                whole |= set() if same else set(side[d])
                count += len(shapes[d])
    return replace(
        instance, inputs=(tuple(ins),), outputs=(tuple(outs),), sizes=table, whole=frozenset(whole), groups=()
    )


def letter_names(axes: Axes, node: fx.Node) -> dict[str, str]:
    """Letter of an op's rule -> name of the factor."""
    instance = axes.rule(node)
    found: dict[str, str] = {}
    tensors = [*axes.operands(node), *((node.name, i) for i in range(len(instance.outputs)))]
    for value, dims in zip(tensors, (*instance.inputs, *instance.outputs), strict=True):
        for letters, names in zip(dims, axes.labels.get(value, ()), strict=False):
            found |= dict(zip(letters, names, strict=False))
    return found


def _tie_results(graph: Graph, atoms: dict[Value, list[list[Atom]]]) -> None:
    """A gradient has its parameter's factors, a buffer's new value the buffer's, unless their sizes do not nest."""
    ends = {(e.kind, e.name): e.node for e in graph.inputs}
    nodes = graph.nodes
    for output in graph.outputs:
        kind = {"gradient": "parameter", "buffer": "buffer", "input_gradient": "input"}.get(output.kind)
        if kind is None or output.node is None:
            continue
        for a, b in zip(atoms[ends[kind, output.name], 0], atoms[source(nodes[output.node])], strict=True):
            unify(a, b)


def _name_inputs(graph: Graph, atoms: dict[Value, list[list[Atom]]]) -> None:
    """Dim 0 of the inputs is the batch, dim 1 of integer inputs the sequence."""
    for entry in graph.inputs:
        if entry.kind != "input":
            continue
        dims = atoms[entry.node, 0]
        value = graph.node(entry.node).meta["val"]
        if dims:
            for atom in leaves(dims[0])[:1]:
                atom.names.insert(0, "batch")
        if len(dims) > 1 and not value.dtype.is_floating_point:
            for atom in leaves(dims[1])[:1]:
                atom.names.append("sequence")


def _labels(atoms: dict[Value, list[list[Atom]]]) -> dict[Value, tuple[tuple[str, ...], ...]]:
    """A name for every factor: the commonest that a rule gave it, else `f` and a number in order of appearance."""
    known: dict[int, str] = {}

    def label(atom: Atom) -> str:
        if id(atom) not in known:
            best = max(sorted(set(atom.names)), key=atom.names.count, default="")
            if "batch" in atom.names:
                best = "batch"
            known[id(atom)] = best or f"f{sum(v.startswith('f') and v[1:].isdigit() for v in known.values())}"
        return known[id(atom)]

    return {v: tuple(tuple(label(x) for x in leaves(dim)) for dim in dims) for v, dims in atoms.items()}


def local_flops(instance: Instance, cut: dict[str, int]) -> float:
    """Operations of one device when letter x is cut into pieces of which the largest is `size / cut[x]`, rounded up."""
    if instance.flops is None:
        return 0.0
    number, names = instance.flops
    return number * math.prod(-(-instance.sizes[x] // cut.get(x, 1)) for x in names)
