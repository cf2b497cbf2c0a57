"""A model on meta, filled by its own initialisation, each rank keeping only its shards.

In: a module tree on meta, a layout for every parameter, a seed.  Out: this rank's pieces, and whole buffers.
Next: `deferred.py`, where even the numbers of the constructor are kept.

Every rank runs the whole initialisation, so all random numbers are those of a single device. But the tensors that it
fills are `Virtual`: when an op touches one, memory for the whole of it is made; when an op touches another, only this
rank's shard stays. If a shard is touched again, and not overwritten as a whole, the ranks put it together again.

What a model's own initialisation is: `init_weights()` of the root if it has one, else `reset_parameters()` of every
module, children before parents, which is the order in which constructors run. A tied tensor is filled once, in the
first of its places; what the others draw for it is dropped, as when a constructor ties what it has drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._torch import local_of, storage_key, without_torch_function, wrapper, written
from autopar.errors import UnsupportedError
from autopar.layout import Layout, Mesh
from autopar.placements import contiguous_stride, piece
from autopar.runtime.deferred import Deferred, evaluate
from autopar.runtime.parameters import Slots, handle, slots
from autopar.tree import flatten, unflatten

aten = torch.ops.aten
FILLS = frozenset({aten.normal_, aten.uniform_, aten.zero_, aten.fill_, aten.copy_, aten.bernoulli_, aten.exponential_})


@dataclass(eq=False)
class Base:
    """The memory behind one virtual tensor: all of it for a while, then this rank's shard.

    kept   False for what nobody reads: the other places of a tied tensor, and tensors that have their numbers already
    """

    slot: Slots
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    whole: Tensor | None = None
    shard: Tensor | None = None
    touched: bool = False
    kept: bool = True

    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(eq=False)
class Store:
    """At most the tensors of one op are whole at a time.

    mesh, coordinate   for cutting; None and {} where everything stays whole
    """

    mesh: Mesh | None = None
    coordinate: Mapping[str, int] = field(default_factory=dict)
    open: list[Base] = field(default_factory=list)

    def need(self, bases: Sequence[Base], overwritten: Base | None) -> None:
        """Make these whole; what else was whole becomes a shard."""
        for base in [b for b in self.open if b not in bases]:
            self.close(base)
        for base in bases:
            if base.whole is None:
                if base.shard is None or base is overwritten:
                    base.shard = None
                    base.whole = torch.empty(base.shape, dtype=base.dtype)
                else:
                    base.whole = self.again(base)
                self.open.append(base)

    def close(self, base: Base) -> None:
        """Keep only this rank's shard."""
        self.open.remove(base)
        whole, base.whole = base.whole, None
        assert whole is not None
        if not base.kept:
            return
        if self.mesh is None:
            base.shard = whole
        else:
            cut = piece(whole, base.layout, self.mesh, dict(self.coordinate))
            base.shard = cut.clone(memory_format=torch.contiguous_format) if cut.numel() < whole.numel() else cut

    def again(self, base: Base) -> Tensor:
        """The whole of a tensor of which every rank kept a shard."""
        assert base.shard is not None
        if self.mesh is None or base.shard.numel() == base.numel():
            return base.shard
        whole = torch.empty(base.shape, dtype=base.dtype)
        here = next(r for r in range(self.mesh.devices) if self.mesh.coordinate(r) == dict(self.coordinate))
        for rank in range(self.mesh.devices):
            view = whole.view([size for dim in base.layout.factors for size in dim])
            for index, (place, _, cut) in enumerate(base.layout.places()):
                if cut:
                    view = view.narrow(index, *base.layout.span(place, self.mesh, self.mesh.coordinate(rank)))
            part = base.shard if rank == here else torch.empty(view.numel(), dtype=base.dtype)
            dist.broadcast(part, rank)
            view.copy_(part.view(view.shape))
        return whole


@without_torch_function
class Virtual(Tensor):
    """A tensor, or a view of it, whose memory comes and goes."""

    base: Base
    store: Store

    @staticmethod
    def over(base: Base, store: Store, like: Tensor | None = None) -> Virtual:
        """The whole of `base`, or the view of it that `like` is."""
        shape, stride, offset = base.shape, contiguous_stride(base.shape), 0
        if like is not None:
            shape, stride, offset = tuple(like.shape), tuple(like.stride()), int(like.storage_offset())
        out: Virtual = wrapper(Virtual, shape, stride, offset, base.dtype)
        out.base, out.store = base, store
        return out

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Virtual({self.base.slot.name})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves, tree = flatten((tuple(args), dict(kwargs)))
        virtual = [leaf for leaf in leaves if isinstance(leaf, Virtual)]
        store = virtual[0].store
        bases = list(dict.fromkeys(v.base for v in virtual))
        first = args[0] if args else None
        fills = func.overloadpacket in FILLS and isinstance(first, Virtual) and first.numel() == first.base.numel()
        alone = fills and sum(v.base is first.base for v in virtual) == 1  # type: ignore[union-attr]
        store.need(bases, first.base if alone else None)  # type: ignore[union-attr]
        real = [_real(leaf) if isinstance(leaf, Virtual) else leaf for leaf in leaves]
        real_args, real_kwargs = unflatten(tree, real)
        for value in written(func, tuple(args), kwargs):
            if isinstance(value, Virtual):
                value.base.touched = True
        out, out_tree = flatten(func(*real_args, **real_kwargs))
        owners = {storage_key(base.whole): base for base in bases if base.whole is not None}
        return unflatten(out_tree, [_wrapped(leaf, owners, store) for leaf in out])


def _real(value: Virtual) -> Tensor:
    assert value.base.whole is not None
    return value.base.whole.as_strided(value.shape, value.stride(), value.storage_offset())


def _wrapped(value: Any, owners: Mapping[int, Base], store: Store) -> Any:
    if isinstance(value, Tensor) and (base := owners.get(storage_key(value))) is not None:
        return Virtual.over(base, store, value)
    return value


def own_initialisation(model: nn.Module) -> None:
    """Fill every parameter and buffer the way the model itself does."""
    whole_model: Callable[[], Any] | None = getattr(model, "init_weights", None)
    with torch.no_grad():
        if whole_model is not None:
            whole_model()
            return
        for module in _children_first(model):
            for name in ("reset_parameters", "_reset_parameters"):
                own = getattr(module, name, None)
                if own is not None:
                    own()
                    break


def _children_first(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


@contextmanager
def seeded_with(seed: int) -> Iterator[None]:
    """Inside, the CPU's generator starts from `seed`; afterwards it is as before."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


def filled(
    model: nn.Module, all_slots: Sequence[Slots], layouts: Mapping[str, Layout], store: Store, seed: int
) -> dict[tuple[str, str], Tensor]:
    """(kind, name) -> this rank's piece of every tensor of `all_slots` that has no numbers."""
    out: dict[tuple[str, str], Tensor] = {}
    for slot in all_slots:
        value = plain(slot.get())
        if isinstance(value, Deferred):
            base = _base(slot, layouts)
            base.whole = evaluate(value)
            store.open.append(base)
            store.close(base)
            assert base.shard is not None
            out[slot.kind, slot.name] = base.shard
    wanted = [slot for slot in all_slots if plain(slot.get()).device.type == "meta"]
    if not wanted:
        return out
    before = [slot.get() for slot in all_slots]
    bases = [_base(slot, layouts) for slot in all_slots]
    try:
        for slot, base in zip(all_slots, bases, strict=True):
            base.kept = slot in wanted
            first, *others = slot.places
            old = slot.get()
            _put(slot, first, _virtual(slot.kind, old, base, store))
            for place in others:
                _put(slot, place, _virtual(slot.kind, old, replace(base, kept=False), store))
        with seeded_with(seed):
            own_initialisation(model)
        for slot, base in zip(all_slots, bases, strict=True):
            _adopt(slot, base, store)
        for base in list(store.open):
            store.close(base)
    finally:
        for slot, old in zip(all_slots, before, strict=True):
            slot.put(old)
    pairs = [(slot, base) for slot, base in zip(all_slots, bases, strict=True) if slot in wanted]
    _refuse_untouched([slot for slot, base in pairs if not base.touched])
    for slot, base in pairs:
        assert base.shard is not None
        out[slot.kind, slot.name] = base.shard
    return out


def _virtual(kind: str, old: Tensor, base: Base, store: Store) -> Tensor:
    virtual: Tensor = Virtual.over(base, store)
    return nn.Parameter(virtual, old.requires_grad) if kind == "_parameters" else virtual


def _put(slot: Slots, place: tuple[nn.Module, str], tensor: Tensor) -> None:
    getattr(place[0], slot.kind)[place[1]] = tensor


def _adopt(slot: Slots, base: Base, store: Store) -> None:
    """If the initialisation put another tensor in the place, take that one's numbers."""
    now = slot.get()
    if isinstance(now, Virtual):
        return
    store.need([], None)
    base.whole, base.touched = now.detach().to(base.dtype), now.device.type != "meta"
    store.open.append(base)
    store.close(base)


def _base(slot: Slots, layouts: Mapping[str, Layout]) -> Base:
    tensor = slot.get()
    shape = tuple(tensor.shape)
    whole = Layout.whole(tuple((size,) if size != 1 else () for size in shape))
    return Base(slot, shape, tensor.dtype, layouts.get(slot.name, whole) if slot.kind == "_parameters" else whole)


def _refuse_untouched(left: Sequence[Slots]) -> None:
    if not left:
        return
    what = "parameter" if left[0].kind == "_parameters" else "buffer"
    module, _ = left[0].places[0]
    more = f" (and {len(left) - 1} more: {', '.join(s.name for s in left[1:4])})" if len(left) > 1 else ""
    raise UnsupportedError(
        f"{what} {left[0].name}{more} is on meta and its numbers cannot be recomputed: {type(module).__name__} has no "
        "reset_parameters() that fills it, nor has the model an init_weights() that does\n"
        "  try: build the model inside `with autopar.deferred():` instead of `torch.device('meta')`, or write "
        "reset_parameters()"
    )


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, or what a DTensor handle holds."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def empty(tensor: Tensor) -> bool:
    """Whether a parameter or buffer has no numbers yet."""
    value = plain(tensor)
    return value.device.type == "meta" or isinstance(value, Deferred)


def materialise(
    model: nn.Module,
    parameters: Sequence[Slots],
    buffers: Sequence[Slots],
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    coordinate: Mapping[str, int],
    seed: int,
) -> dict[str, Tensor]:
    """This rank's pieces of the parameters that are on meta, by first name; buffers are put in place, whole."""
    out = filled(model, (*parameters, *buffers), layouts, Store(mesh, coordinate), seed)
    for slot in buffers:
        if ("_buffers", slot.name) in out:
            slot.put(out.pop(("_buffers", slot.name)))
    return {name: value for (_, name), value in out.items()}


def initialise(model: nn.Module, seed: int = 0, device: torch.device | str = "cpu") -> nn.Module:
    """Fill a model on meta on one device, with the numbers that `parallelize(seed=)` gives it on many."""
    everything = (*slots(model), *slots(model, "_buffers"))
    out = filled(model, everything, {}, Store(), seed)
    for slot in everything:
        value = out.get((slot.kind, slot.name))
        if value is not None:
            value = value.to(device)
            slot.put(handle(slot.get(), value) if slot.kind == "_parameters" else value)
    return model
