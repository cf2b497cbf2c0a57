"""The ways in which one op can run on a mesh.

In: a node's rule in factors, a mesh.  Out: its `Choice`s.  Next: `planner/program.py`.

Every mesh axis plays one role at an op: it cuts a letter, or the op runs whole along it, or a pending sum passes
through. The roles of the axes multiply. What a role means for the layouts follows from the letters alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from torch import fx

from autopar.axes import Axes, Factors
from autopar.layout import Layout, Mesh, Step, chunk
from autopar.rules.core import Dims, Instance, results

WHOLE = ""


@dataclass(frozen=True)
class Choice:
    """One way to run an op.

    roles    per mesh axis, what it does: the letter it cuts, "" (whole), "+0" or "+0+1" (those operands pending)
    inputs   layout required of every tensor operand, in the order of `Axes.operands(node)`
    outputs  layout of every result; one that the op leaves out has a layout without dims
    inner    collectives inside the op's own subgraph (softmax over a cut dim)
    """

    roles: tuple[str, ...]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    inner: tuple[Step, ...] = ()


def choices(axes: Axes, node: fx.Node, mesh: Mesh) -> tuple[Choice, ...]:
    """Every legal choice of `node`, the whole one first; ops of the same letters and sizes share them."""
    instance = axes.rule(node)
    per_axis = tuple(tuple(roles(instance, mesh.size(axis), node)) for axis in mesh.names)
    key = (instance.signature, per_axis, mesh)
    known: tuple[Choice, ...] | None = axes.known_choices.get(key)
    if known is None:
        found = (_choice(instance, combination, mesh) for combination in itertools.product(*per_axis))
        known = axes.known_choices[key] = tuple(c for c in found if c is not None)
    return known


def choice_of(axes: Axes, node: fx.Node, picked: tuple[str, ...], mesh: Mesh) -> Choice | None:
    """The choice with these roles; None where the op has no such role, or a device would be left without a piece."""
    instance = axes.rule(node)
    if any(role not in roles(instance, mesh.size(axis), node) for axis, role in zip(mesh.names, picked, strict=True)):
        return None
    return _choice(instance, picked, mesh)


def _choice(instance: Instance, picked: tuple[str, ...], mesh: Mesh) -> Choice | None:
    ins = tuple(_operand(instance, i, picked, mesh) for i in range(len(instance.inputs)))
    outs = tuple(_result(instance, i, picked, mesh) for i in range(len(instance.outputs)))
    if any(starves(layout, mesh) for layout in (*ins, *outs)):
        return None
    return Choice(picked, ins, outs, inner(instance, picked, mesh))


def roles(instance: Instance, size: int, node: fx.Node) -> Iterator[str]:
    """What a mesh axis of `size` devices can do at an op."""
    yield WHOLE
    for letter, n in instance.sizes.items():
        if letter not in instance.whole and fills(n, size) and _occurs(instance, letter):
            yield letter
    if all(t is None or t.dtype.is_floating_point for t in results(node)):
        for together in instance.linear:
            if together:
                yield "".join(f"+{i}" for i in sorted(together))


def _occurs(instance: Instance, letter: str) -> bool:
    return any(letter in dim for dims in (*instance.inputs, *instance.outputs) for dim in dims)


def fills(size: int, devices: int) -> bool:
    """Whether cutting `size` leaves every device a piece."""
    return size >= devices and chunk(size, devices, devices - 1)[1] > 0


def starves(layout: Layout, mesh: Mesh) -> bool:
    """Whether some device has an empty piece of some factor."""
    for _, size, cut in layout.places():
        for axis in cut:
            if not fills(size, mesh.size(axis)):
                return True
            size = chunk(size, mesh.size(axis), mesh.size(axis) - 1)[1]
    return False


def factors_of(dims: Dims, instance: Instance) -> Factors:
    return tuple(tuple(instance.sizes[x] for x in dim) for dim in dims)


def _cut(dims: Dims, instance: Instance, picked: tuple[str, ...], mesh: Mesh, rows: Fraction | None = None) -> Layout:
    cuts = tuple(tuple(tuple(a for a, r in zip(mesh.names, picked, strict=True) if r == x) for x in d) for d in dims)
    return Layout(factors_of(dims, instance), cuts, rows=rows)


def _operand(instance: Instance, i: int, picked: tuple[str, ...], mesh: Mesh) -> Layout:
    layout = _cut(instance.inputs[i], instance, picked, mesh, instance.rows[0][i] if instance.rows[0] else None)
    for axis, role in zip(mesh.names, picked, strict=True):
        if role.startswith("+") and str(i) in role[1:].split("+"):
            layout = layout.with_pending(axis, "sum")
    return layout


def _result(instance: Instance, i: int, picked: tuple[str, ...], mesh: Mesh) -> Layout:
    dims = instance.outputs[i]
    layout = _cut(dims, instance, picked, mesh, instance.rows[1][i] if instance.rows[1] else None)
    for axis, role in zip(mesh.names, picked, strict=True):
        if role.startswith("+"):
            layout = layout.with_pending(axis, "sum")
        elif role and not any(role in dim for dim in dims) and any(role in d for t in instance.inputs for d in t):
            kind = instance.kinds.get(f"{role}:{i}", instance.kinds.get(role, "sum"))
            layout = layout if kind == "same" else layout.with_pending(axis, kind)
    return layout


def inner(instance: Instance, picked: tuple[str, ...], mesh: Mesh) -> tuple[Step, ...]:
    """The collectives of the op's own subgraph: each reduces a tensor like operand 0 without its local letters."""
    cut = [a for a, r in zip(mesh.names, picked, strict=True) if r in instance.local]
    kinds = next(iter(instance.local.values())).reduces if cut else ()
    if not kinds:
        return ()
    like = next(i for i, dims in enumerate(instance.inputs) if any(x in instance.local for d in dims for x in d))
    kept = tuple(tuple(x for x in d if x not in instance.local) for d in instance.inputs[like])
    base = _cut(kept, instance, picked, mesh)
    steps = []
    for kind in kinds:
        for i, axis in enumerate(cut):
            before = base
            for other in cut[i:]:
                before = before.with_pending(other, kind)
            steps.append(Step("all_reduce", axis, before, before.with_pending(axis, None)))
    return tuple(steps)


def whole_roles(mesh: Mesh) -> tuple[str, ...]:
    return (WHOLE,) * len(mesh.names)
