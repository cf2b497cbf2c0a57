"""Constructors run without keeping what they make, so that each tensor's exact numbers can be made again later.

In: a `with` block in which a model is built.  Out: a model whose large tensors have no memory, but remember how they
came about.  Next: `materialise.py`.

    torch.manual_seed(0)
    with autopar.deferred():
        model = GPT(config)          # draws the random numbers it always draws, keeps none of its large tensors

Every op on a large tensor is run and written down, with the state of the generator if it draws. The last few results
are kept in memory for the ops that follow; all others are dropped, and made again from the notes when they are needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar._torch import DispatchMode, seeded, storage_key, without_torch_function, wrapper, written
from autopar.errors import UnsupportedError
from autopar.runtime.bits import checksum, combined
from autopar.tree import flatten, unflatten

LARGE_BYTES = 1 << 16
ROOM = 4  # times the size of an op's largest tensor that may stay in memory while a constructor runs


@dataclass(eq=False)
class Record:
    """One large tensor: the ops that made it and wrote into it, and its numbers while they are at hand."""

    entries: list[Entry] = field(default_factory=list)
    whole: Tensor | None = None

    @property
    def bytes(self) -> int:
        """Memory it takes now."""
        return 0 if self.whole is None else self.whole.untyped_storage().nbytes()


@dataclass(eq=False)
class Entry:
    """One op that ran.

    order     entries of all records run in this order
    args      its arguments, records in them as `View`
    state     of the generator before it, if it draws
    creates   (which of its results, record)
    reads     records among its arguments, also those it writes to
    """

    order: int
    func: Any
    args: tuple[tuple[Any, ...], dict[str, Any]]
    state: Tensor | None
    creates: list[tuple[int, Record]]
    reads: list[Record]


class View:
    """A record, or part of one, as an argument. (No dataclass: it is a leaf of a nest.)"""

    def __init__(self, record: Record, like: Tensor) -> None:
        self.record = record
        self.shape, self.stride, self.offset = tuple(like.shape), tuple(like.stride()), int(like.storage_offset())

    def real(self) -> Tensor:
        """The numbers, which must be at hand."""
        assert self.record.whole is not None
        return self.record.whole.as_strided(self.shape, self.stride, self.offset)


@dataclass(eq=False)
class Tape:
    """What one `deferred()` block keeps in memory for the moment, oldest first."""

    open: list[Record] = field(default_factory=list)
    count: Iterator[int] = field(default_factory=itertools.count)

    def need(self, records: Sequence[Record]) -> None:
        """Bring these into memory and put out those that were used longest ago."""
        for record in records:
            if record.whole is None:
                record.whole = _again(record)
            if record in self.open:
                self.open.remove(record)
            self.open.append(record)
        self.shrink(records)

    def shrink(self, used: Sequence[Record]) -> None:
        room = ROOM * max((r.bytes for r in used), default=0)
        while len(self.open) > len(used) and sum(r.bytes for r in self.open) > room:
            self.open.pop(0).whole = None

    def close(self) -> None:
        """Keep nothing."""
        for record in self.open:
            record.whole = None
        self.open.clear()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on real numbers and write it down."""
        leaves, tree = flatten((args, kwargs))
        reads = list(dict.fromkeys(leaf.record for leaf in leaves if isinstance(leaf, Deferred)))
        self.need(reads)
        state = torch.default_generator.get_state() if seeded(func) else None
        views = [View(leaf.record, leaf) if isinstance(leaf, Deferred) else leaf for leaf in leaves]
        real_args, real_kwargs = unflatten(tree, [v.real() if isinstance(v, View) else v for v in views])
        kept = [v.detach().clone() if isinstance(v, Tensor) else v for v in views]
        out, out_tree = flatten(func(*real_args, **real_kwargs))
        entry = Entry(next(self.count), func, unflatten(tree, kept), state, [], reads)
        changed = [v.record for v in written(func, args, kwargs) if isinstance(v, Deferred)]
        for record in dict.fromkeys(changed):
            record.entries.append(entry)
        results = [self.result(leaf, index, entry) for index, leaf in enumerate(out)]
        return unflatten(out_tree, results)

    def result(self, leaf: Any, index: int, entry: Entry) -> Any:
        """A result as the constructor gets it: deferred if it is part of a record or large enough to become one."""
        if not isinstance(leaf, Tensor):
            return leaf
        key = storage_key(leaf)
        for record in self.open:
            if record.whole is not None and storage_key(record.whole) == key:
                return Deferred.of(record, leaf, self)
        if leaf.untyped_storage().nbytes() <= LARGE_BYTES or leaf.device.type != "cpu":
            return leaf
        record = Record([entry], leaf)
        entry.creates.append((index, record))
        self.open.append(record)
        self.shrink([record])
        return Deferred.of(record, leaf, self)


@without_torch_function
class Deferred(Tensor):
    """A tensor of the CPU, or a view of one, whose numbers are made when they are needed."""

    record: Record
    tape: Tape

    @staticmethod
    def of(record: Record, like: Tensor, tape: Tape) -> Deferred:
        """The part of a record that `like` is."""
        shape, stride = tuple(like.shape), tuple(like.stride())
        out: Deferred = wrapper(Deferred, shape, stride, int(like.storage_offset()), like.dtype)
        out.record, out.tape = record, tape
        return out

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Deferred({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        leaves, _ = flatten((tuple(args), dict(kwargs or {})))
        tape = next(leaf.tape for leaf in leaves if isinstance(leaf, Deferred))
        return tape.run(func, tuple(args), dict(kwargs or {}))


class _Recorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Lets large factory ops go by the tape; what follows from them does so by itself."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves, _ = flatten((tuple(args), kwargs))
        if not any(isinstance(leaf, Tensor) for leaf in leaves) and func.namespace == "aten":
            return self.tape.run(func, tuple(args), kwargs)
        return func(*args, **kwargs)


@contextmanager
def deferred() -> Iterator[None]:
    """Build models without memory for their large tensors; `parallelize` or `initialise` makes the numbers later."""
    tape = Tape()
    try:
        with _Recorder(tape):
            yield
    finally:
        tape.close()


def evaluate(tensor: Deferred) -> Tensor:
    """The numbers of a deferred tensor, in memory of their own."""
    view = View(tensor.record, tensor)
    at_hand = tensor.record.whole
    whole = _again(tensor.record) if at_hand is None else at_hand.clone()
    if whole.numel() != tensor.numel() and tensor.dtype != whole.dtype:
        raise UnsupportedError("a view of a deferred tensor was cast after the block; cast the model inside the block")
    if tensor.dtype != whole.dtype:
        return whole.to(tensor.dtype)
    return whole.as_strided(view.shape, view.stride, view.offset).contiguous()


def _again(record: Record) -> Tensor:
    """Run the ops that a record depends on once more, in order, forgetting each tensor after its last use."""
    entries: dict[int, Entry] = {}
    todo, seen = [record], {record}
    while todo:
        for entry in todo.pop().entries:
            if entry.order not in entries:
                entries[entry.order] = entry
                todo += [r for r in entry.reads if r not in seen]
                seen.update(entry.reads)
    ordered = [entries[order] for order in sorted(entries)]
    last = {r: entry.order for entry in ordered for r in (*entry.reads, *(made for _, made in entry.creates))}
    put_aside = {r: r.whole for r in seen}
    for r in seen:
        r.whole = None
    before = torch.default_generator.get_state()
    try:
        with torch.no_grad():
            for entry in ordered:
                _run_again(entry)
                for r in [r for r, order in last.items() if order == entry.order and r is not record]:
                    r.whole = None
        whole = record.whole
        assert whole is not None
        return whole
    finally:
        torch.default_generator.set_state(before)
        for r, value in put_aside.items():
            r.whole = value


def _run_again(entry: Entry) -> None:
    leaves, tree = flatten(entry.args)
    args, kwargs = unflatten(tree, [leaf.real() if isinstance(leaf, View) else leaf for leaf in leaves])
    if entry.state is not None:
        torch.default_generator.set_state(entry.state)
    out, _ = flatten(entry.func(*args, **kwargs))
    for index, record in entry.creates:
        record.whole = out[index]


def log_checksum(tensor: Deferred) -> int:
    """A number that differs where ranks would make other numbers of a tensor."""
    states = [0 if e.state is None else checksum(e.state) for e in tensor.record.entries]
    return combined([*states, len(tensor.record.entries)])
