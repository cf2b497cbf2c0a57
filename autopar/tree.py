"""Nested arguments and results taken apart into leaves and put together again, types kept exactly.

In: any nest of tuples, lists, dicts, named tuples, dataclasses, and types registered with torch's pytree.
Out: `flatten` -> (leaves, Tree), `unflatten`.  Next: `capture.py`.

`Tree` is a value: equal structures compare equal, so it can be (part of) the key of a program.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autopar import _torch
from autopar.errors import CaptureError

PLAIN = (bool, numbers.Number, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
ARGUMENTS: tuple[Any, ...] = (*PLAIN, enum.Enum, type, slice, range, frozenset, set, Callable)


@dataclasses.dataclass(frozen=True)
class Tree:
    """One level of a nest.

    kind      "leaf" | "tuple" | "list" | "namedtuple" | "dict" | "dataclass" | "registered"
    type      the exact Python type of this level (None for a leaf)
    keys      keys of a dict in order, names of the fields of a dataclass; for "registered" its own context
    children  one per key or item
    """

    kind: str
    type: type | None = None
    keys: Any = ()
    children: tuple[Tree, ...] = ()

    @property
    def leaves(self) -> int:
        """How many leaves hang below."""
        return 1 if self.kind == "leaf" else sum(child.leaves for child in self.children)


LEAF = Tree("leaf")


def parts(value: Any) -> tuple[str, Any, list[Any]] | None:
    """(kind, keys, children) of one level; None for a leaf."""
    kind = type(value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return "namedtuple", kind._fields, list(value)
    if kind in (tuple, list):
        return kind.__name__, (), list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(f.name for f in dataclasses.fields(value))
        return "dataclass", names, [getattr(value, name) for name in names]
    if isinstance(value, dict):
        return "dict", tuple(value), list(value.values())
    registered = _torch.registered_flatten(value)
    if registered is not None:
        children, context = registered
        return "registered", context, list(children)
    return None


def flatten(value: Any) -> tuple[list[Any], Tree]:
    """Leaves in order, and the structure."""
    split = parts(value)
    if split is None:
        return [value], LEAF
    kind, keys, children = split
    leaves: list[Any] = []
    trees: list[Tree] = []
    for child in children:
        below, tree = flatten(child)
        leaves += below
        trees.append(tree)
    return leaves, Tree(kind, type(value), keys, tuple(trees))


def unflatten(tree: Tree, leaves: Sequence[Any]) -> Any:
    """The nest again, with other leaves."""
    if len(leaves) != tree.leaves:
        raise AssertionError(f"{tree.leaves} leaves expected, {len(leaves)} given")
    return _unflatten(tree, iter(leaves))


def _unflatten(tree: Tree, leaves: Any) -> Any:
    if tree.kind == "leaf":
        return next(leaves)
    children = [_unflatten(child, leaves) for child in tree.children]
    kind = tree.type
    assert kind is not None
    if tree.kind in ("tuple", "list"):
        return kind(children)
    if tree.kind == "namedtuple":
        return kind(*children)
    if tree.kind == "dict":
        return _mapping(kind, tree.keys, children)
    if tree.kind == "dataclass":
        return _dataclass(kind, dict(zip(tree.keys, children, strict=True)))
    return _torch.registered_unflatten(kind, children, tree.keys)


def _mapping(kind: type, keys: Sequence[Any], children: list[Any]) -> Any:
    pairs = zip(keys, children, strict=True)
    if kind is dict:
        return dict(pairs)
    out: Any = kind.__new__(kind)  # type: ignore[call-overload]
    if isinstance(out, dict):
        dict.__init__(out)
    for key, child in pairs:
        dict.__setitem__(out, key, child)
        move = getattr(out, "move_to_end", None)
        if move is not None:
            move(key)
    return out


def _dataclass(kind: type, fields: Mapping[str, Any]) -> Any:
    """A dataclass by its constructor where every field takes part in it, else field by field."""
    known = {f.name: f for f in dataclasses.fields(kind)}
    try:
        out = kind(**{name: value for name, value in fields.items() if known[name].init})
    except TypeError as error:
        raise CaptureError(
            f"{kind.__module__}.{kind.__qualname__} cannot be rebuilt from its fields ({error})\n"
            "  try: a plain dataclass, a tuple or a dict"
        ) from error
    for name, value in fields.items():
        if not known[name].init:
            object.__setattr__(out, name, value)
    return out


def paths(tree: Tree, at: str) -> list[str]:
    """A readable place of every leaf: `args[0]['ids']`, `out.loss`."""
    if tree.kind == "leaf":
        return [at]
    if tree.kind == "dict":
        steps = [f"[{key!r}]" for key in tree.keys]
    elif tree.kind in ("dataclass", "namedtuple"):
        steps = [f".{key}" for key in tree.keys]
    else:
        steps = [f"[{i}]" for i in range(len(tree.children))]
    return [path for step, child in zip(steps, tree.children, strict=True) for path in paths(child, at + step)]


def outline(tree: Tree) -> str:
    """The types of a nest on one line: `tuple(list(., .), dict(.))`; where the leaves are is told by `paths`."""
    if tree.type is None:
        return "."
    return f"{tree.type.__qualname__}({', '.join(map(outline, tree.children))})"


def foreign_argument(value: Any, path: str) -> str:
    """Why a leaf among the arguments cannot be kept as a constant of a program; "" if it can."""
    if isinstance(value, (torch.Tensor, *ARGUMENTS)):
        return ""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return (
        f"{path} is a {kind}, a type that cannot be taken apart into tensors and rebuilt\n"
        "  try: pass tensors, numbers, strings, tuples, lists, dicts or dataclasses of them, or register the type as a "
        "pytree node of torch"
    )
