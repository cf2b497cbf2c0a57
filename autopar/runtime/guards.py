"""What a program is good for, and that all ranks ask for the same one.

In: the arguments of a call, the state of the module.  Out: a `Key`; an `InputError` on all ranks if they differ.
Next: `step.py`.

Ranks compare one small vector of hashes before anything else is sent. Only when it differs do they exchange texts, to
say which rank and which leaf.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import InputError
from autopar.graph import Graph
from autopar.runtime.bits import checksum
from autopar.runtime.local import Local, joined
from autopar.runtime.parameters import Slots
from autopar.runtime.world import World
from autopar.tree import Tree, flatten, foreign_argument, outline, paths

LEAF = ("args", "kwargs")  # what the name of a leaf begins with
LOCALS = 8  # lengths of Local inputs that the first comparison has room for


@dataclass(frozen=True)
class TensorLeaf:
    """One tensor among the arguments: its global shape, and whether each rank brings a part of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    local: bool

    def __str__(self) -> str:
        text = f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"
        text += " requires_grad" if self.requires_grad else ""
        return f"Local({text})" if self.local else text


@dataclass(frozen=True)
class Key:
    """Everything that a program depends on beside the numbers."""

    tree: Tree
    leaves: tuple[Any, ...]
    training: tuple[bool, ...]
    trainable: tuple[bool, ...]
    autocast: tuple[Any, ...]
    gradients: bool
    state: int = 0  # of the attributes of its modules, see `attributes.py`


@dataclass(frozen=True)
class Call:
    """The arguments of one forward, taken apart.

    tensors   this rank's tensors, in order of the leaves
    problem   why no program can take these arguments; told once the ranks are known to agree, as one that raised alone
              would leave the others waiting
    """

    tree: Tree
    leaves: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    problem: str = ""

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        values, tree = flatten((args, dict(kwargs)))
        leaves: list[Any] = []
        tensors: list[Tensor] = []
        problem = ""
        for path, value in zip(leaf_names(tree), values, strict=True):
            tensor = value.tensor if isinstance(value, Local) else value
            if isinstance(tensor, DTensor):
                problem = problem or f"{path} is a DTensor; pass the whole tensor on every rank, or autopar.Local(part)"
                leaves.append(("DTensor", f"DTensor{tuple(tensor.shape)}"))
            elif isinstance(tensor, Tensor):
                tensors.append(tensor)
                shape = tuple(tensor.shape)
                leaves.append(TensorLeaf(shape, tensor.dtype, tensor.requires_grad, isinstance(value, Local)))
            else:
                problem = problem or foreign_argument(value, path)
                leaves.append(constant(value))
        return Call(tree, tuple(leaves), tuple(tensors), problem)


def constant(value: Any) -> Any:
    """A non-tensor argument in a form that can be compared: itself where it can be hashed, else its text."""
    try:
        hash(value)
    except TypeError:
        return (type(value).__qualname__, repr(value))
    return (type(value).__qualname__, value)


def leaf_names(tree: Tree) -> list[str]:
    """Readable places of the leaves of (args, kwargs): `args[0]`, `kwargs['labels']`."""
    args, kwargs = tree.children
    return paths(args, "args") + paths(kwargs, "kwargs")


def leaf_text(leaf: Any) -> str:
    """One leaf as text, on one line and without addresses."""
    return one_line(leaf if isinstance(leaf, TensorLeaf) else repr(leaf[1]))


Mode = tuple[tuple[bool, ...], tuple[bool, ...], tuple[Any, ...], bool]


def mode(modules: Iterable[nn.Module], parameters: Sequence[Slots], device_type: str) -> Mode:
    """The part of a key that is not about arguments."""
    training = tuple(module.training for module in modules)
    trainable = tuple(slot.get().requires_grad for slot in parameters)
    autocast: tuple[Any, ...] = ()
    if torch.is_autocast_enabled(device_type):
        autocast = (str(torch.get_autocast_dtype(device_type)), torch.is_autocast_cache_enabled())
    return training, trainable, autocast, torch.is_grad_enabled()


def key_of_graph(graph: Graph, now: Mode, local: frozenset[str] = frozenset()) -> Key:
    """The key of the calls that a captured graph is for, with the module as it is now and gradients on."""
    nodes = graph.nodes
    differentiable = {o.name for o in graph.outputs if o.kind == "input_gradient"}
    tensors = iter(
        TensorLeaf(tuple(val.shape), val.dtype, entry.name in differentiable, entry.node in local)
        for entry in graph.inputs
        if entry.kind == "input"
        for val in (nodes[entry.node].meta["val"],)
    )
    count = graph.in_tree.leaves
    leaves = tuple(constant(graph.constants[i]) if i in graph.constants else next(tensors) for i in range(count))
    return Key(graph.in_tree, leaves, *now[:3], True)


@dataclass(frozen=True)
class Asked:
    """A call that all ranks are comparing with theirs.

    state    the part of its key that is not about arguments
    text     all that must be the same
    answer   waits for every rank's hash of it, and what else it told
    """

    call: Call
    state: Mode
    world: World
    text: str
    answer: Callable[[], Tensor]

    @property
    def lengths(self) -> list[int]:
        """Of this rank's Local inputs."""
        return [leaf.shape[0] for leaf in self.call.leaves if isinstance(leaf, TensorLeaf) and leaf.local]

    @property
    def expected(self) -> Key | None:
        """The key, if all ranks make the same call; None where it also depends on what the others bring."""
        return None if self.lengths else Key(self.call.tree, self.call.leaves, *self.state)

    def agreed(self) -> tuple[Key, list[list[int]]]:
        """The key of the call, once all ranks are found to make the same; and every rank's `flags`."""
        call, lengths, rows = self.call, self.lengths, self.answer().tolist()
        if any(row[0] != rows[0][0] for row in rows):
            raise InputError(first_difference(self.world.gather_text(self.text)))
        if call.problem:
            raise InputError(call.problem)
        if len(lengths) > LOCALS:
            every = self.world.gather(torch.tensor(lengths)).tolist()
        else:
            every = [row[2 : 2 + len(lengths)] for row in rows]
        leaves = with_global_lengths(call, every)
        return Key(call.tree, leaves, *self.state), [row[2 + LOCALS :] for row in rows]


def ask(
    call: Call,
    state: Mode,
    world: World,
    *,
    values: bool,
    flags: Sequence[int] = (),
    told: Mapping[str, Any] = MappingProxyType({}),
    held: Mapping[str, Tensor] = MappingProxyType({}),
) -> Asked:
    """Begin to compare a call with those of the other ranks.

    values   compare the numbers of whole inputs too, and of `held`, the other tensors that should be equal
    flags    what every rank is told of this one
    told     name -> what must be the same on all ranks beside the call
    """
    text = describe(call, state, values, told, held)
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    lengths = [leaf.shape[0] for leaf in call.leaves if isinstance(leaf, TensorLeaf) and leaf.local]
    room = [*lengths[:LOCALS], *[-1] * (LOCALS - len(lengths))]
    return Asked(call, state, world, text, world.post(torch.tensor([digest, len(lengths), *room, *flags])))


def with_global_lengths(call: Call, lengths: list[list[int]]) -> tuple[Any, ...]:
    """The leaves with the global length of dim 0 in those that are Local."""
    out: list[Any] = []
    column = 0
    for path, leaf in zip(leaf_names(call.tree), call.leaves, strict=True):
        if isinstance(leaf, TensorLeaf) and leaf.local:
            total = joined(path, [row[column] for row in lengths])
            leaf = TensorLeaf((total, *leaf.shape[1:]), leaf.dtype, leaf.requires_grad, True)
            column += 1
        out.append(leaf)
    return tuple(out)


def describe(call: Call, state: Mode, values: bool, told: Mapping[str, Any], held: Mapping[str, Tensor]) -> str:
    """What must be the same on all ranks, one line a thing, the name first."""
    lines, hashes = [], []
    structure = f"structure of the arguments\t{outline(call.tree)}"
    tensors = iter(call.tensors)
    for path, leaf in zip(leaf_names(call.tree), call.leaves, strict=True):
        text = leaf_text(leaf)
        if isinstance(leaf, TensorLeaf):
            tensor = next(tensors)
            if leaf.local:
                text = leaf_text(TensorLeaf(leaf.shape[1:], leaf.dtype, leaf.requires_grad, True))
            elif values and tensor.device.type != "meta":
                hashes.append(hashed(path, tensor))
        lines.append(f"{path}\t{text}")
    training, trainable, autocast, gradients = state
    lines.append(structure)
    lines.append(f"training flags\t{''.join('01'[flag] for flag in training)}")
    lines.append(f"requires_grad of parameters\t{''.join('01'[flag] for flag in trainable)}")
    lines.append(f"autocast\t{autocast or 'off'}")
    lines.append(f"grad mode\t{'on' if gradients else 'off'}")
    lines += [f"{name}\t{one_line(value)}" for name, value in told.items()]
    if values:
        hashes += [hashed(name, tensor) for name, tensor in held.items() if tensor.device.type != "meta"]
    return "\n".join(lines + hashes)


def hashed(name: str, tensor: Tensor) -> str:
    """The line for the numbers of a tensor."""
    return f"hash of the values of {name}\t{checksum(tensor) & (2**64 - 1):016x}"


def one_line(value: Any) -> str:
    """A value as text without addresses, on one line."""
    return " ".join(re.sub(r"\b0x[0-9a-f]+", "0x", str(value)).split())


def first_difference(texts: list[str]) -> str:
    """Which rank makes another call than most, and in what; the same text on all ranks."""
    common = max(texts, key=texts.count)
    rank = next(r for r, text in enumerate(texts) if text != common)
    usual = next(r for r, text in enumerate(texts) if text == common)
    theirs = dict(line.split("\t", 1) for line in texts[rank].split("\n"))
    ours = dict(line.split("\t", 1) for line in common.split("\n"))
    counts = [sum(name.startswith(LEAF) for name in t) for t in (theirs, ours)]
    head = f"the ranks call the module with different inputs: rank {rank} passes {counts[0]} leaves, "
    if [n for n in theirs if n.startswith(LEAF)] != [n for n in ours if n.startswith(LEAF)]:
        only = [f"{name} only on rank {rank}" for name in theirs if name not in ours and name.startswith(LEAF)]
        only += [f"{name} only on rank {usual}" for name in ours if name not in theirs and name.startswith(LEAF)]
        what = head + f"rank {usual} passes {counts[1]} ({', '.join(only) or 'in another order'})"
    else:
        name = next(name for name in ours if ours[name] != theirs[name])
        there = f"{theirs[name]} on rank {rank} but {ours[name]} on rank {usual}"
        what = f"the ranks call the module differently: {name} is {there}"
        if not any(name.removeprefix("hash of the values of ").startswith(leaf) for leaf in (*LEAF, "structure")):
            return f"{what}\n  try: the same code, settings and seeds on every rank"
    return f"{what}\n  try: the same global batch on every rank, or autopar.Local(part) where each rank reads its own"
