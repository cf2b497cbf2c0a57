"""What a model's forward reads and writes on its modules besides parameters, buffers and submodules.

In: a model that is traced.  Out: which attributes its forward read, what it left in attributes.  Next: `capture.py`;
`runtime/attributes.py` compares the ones that were read with what they are at a later call.

Python runs while tracing only. So a program is good for the attributes that the trace read, as they were; a plain value
that forward writes is written again after every run; tensors that it keeps to save work (tables of sines, masks) are
computed again in every run; any other tensor that it keeps is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import CaptureError, UnsupportedError
from autopar.swap import Named

Name = tuple[str, str]  # path of a module, attribute

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout)
PLUMBING = frozenset(vars(nn.Module())) | {"_autopar", "_flat_weights", "_flat_weight_refs"}
DEPTH, ITEMS = 4, 1000  # how far into nested values is looked
MISSING = "no such attribute"


@dataclass(frozen=True)
class Snapshot:
    """A value as it was: its plain part as text, the same on every rank, and the objects in it that are not plain."""

    text: str
    parts: tuple[Any, ...] = ()

    def same(self, other: Snapshot) -> bool:
        """Whether two values are equal, objects that are not plain by identity."""
        return (
            self.text == other.text and len(self.parts) == len(other.parts) and all(map(_is, self.parts, other.parts))
        )


EMPTY = Snapshot("empty dict")


def _is(left: Any, right: Any) -> bool:
    return left is right


def snapshot(value: Any) -> Snapshot:
    """The value as it is now, containers and configurations by what is in them."""
    if isinstance(value, dict) and not value:
        return EMPTY
    parts: list[Any] = []
    return Snapshot(_text(value, parts, DEPTH), tuple(parts))


def _text(value: Any, parts: list[Any], depth: int) -> str:
    if isinstance(value, PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, Tensor):
        parts.append(value)
        return f"tensor {tuple(value.shape)}"
    kind = type(value).__qualname__
    if depth and isinstance(value, (list, tuple, dict)) and len(value) <= ITEMS:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return f"{kind}({', '.join(f'{key}: {_text(entry, parts, depth - 1)}' for key, entry in entries)})"
    if isinstance(value, (set, frozenset)) and all(isinstance(entry, PLAIN) for entry in value):
        return f"{kind}({sorted(map(repr, value))})"
    parts.append(value)
    return f"{kind}({', '.join(f'{key}: {entry!r}' for key, entry in plain_fields(value).items())})"


def plain_fields(value: Any) -> dict[str, Any]:
    """What a configuration holds; nothing for modules, functions and values without fields."""
    fields = getattr(value, "__dict__", {})
    if isinstance(value, (*PLAIN, Tensor, type, nn.Module)) or callable(value) or len(fields) > ITEMS:
        return {}
    return {key: entry for key, entry in fields.items() if isinstance(entry, PLAIN)}


def value_of(module: nn.Module, name: str) -> Any:
    """What a module has under a name, on itself or its class."""
    own = vars(module)
    return own[name] if name in own else getattr(type(module), name, MISSING)


# --- reading ----------------------------------------------------------------------------------------------------------


@contextmanager
def reading(model: nn.Module) -> Iterator[set[Name]]:
    """Inside, notes the attributes that code reads on the model's modules, also those it asks for in vain.

    Not what it has set itself before: that does not depend on what was there.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    found: set[Name] = set()
    written: set[Name] = set()
    put = nn.Module.__setattr__

    def read(module: Any, name: str) -> Any:
        if name in PLUMBING or name.startswith("__") or id(module) not in paths:
            return object.__getattribute__(module, name)
        own = object.__getattribute__(module, "__dict__")
        registered = any(name in own.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))
        place = (paths[id(module)], name)
        if not registered and (name in own or isinstance(getattr(type(module), name, MISSING), PLAIN)):
            found.update({place} - written)
        return object.__getattribute__(module, name)

    def write(module: nn.Module, name: str, value: Any) -> None:
        if id(module) in paths:
            written.add((paths[id(module)], name))
        put(module, name, value)

    nn.Module.__getattribute__ = read  # type: ignore[method-assign]
    nn.Module.__setattr__ = write  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        del nn.Module.__getattribute__
        nn.Module.__setattr__ = put  # type: ignore[method-assign]


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass
class Left:
    """What one run of forward left on the modules.

    writes   plain values, to be written again after every run; `name.field` is a field of a configuration
    kept     tensors, each with the place that holds it and the tensors that it held before
    """

    writes: dict[Name, Any] = field(default_factory=dict)
    kept: list[tuple[Name, Tensor, tuple[Tensor, ...]]] = field(default_factory=list)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[Left]:
    """Inside, forward may run; afterwards all attributes are what they were before, and `Left` tells what it left.

    A forward that hangs hooks on modules at its first call (transformers does, to record outputs) does so again in each
    trace: they are taken off, and so is what it noted about it in attributes that were not there.
    """
    before = [Before(path, module) for path, module in model.named_modules()]
    left = Left()
    try:
        yield left
        for one in before:
            one.compare(left)
        if any(one.hung() for one in before):
            there = {one.path: one.fields for one in before}
            left.writes = {n: v for n, v in left.writes.items() if n[1].partition(".")[0] in there[n[0]]}
    finally:
        for one in before:
            one.put_back()
    holding = {path for (path, _), _, _ in left.kept}
    left.writes = {name: value for name, value in left.writes.items() if name[0] not in holding}


class Before:
    """One module as it was."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module = path, module
        self.fields = dict(vars(module))
        self.empty = [name for name, value in module._buffers.items() if value is None]
        self.values = {name: snapshot(value) for name, value in self.contents().items()}
        self.configurations = {n: held for n, v in self.contents().items() if (held := plain_fields(v))}
        self.hooks = {
            name: copy(value)
            for name, value in vars(module).items()
            if name.startswith("_forward_") and isinstance(value, dict)
        }
        self.copies = {n: copy(v) for n, v in self.contents().items() if isinstance(v, (list, dict, set))} | self.hooks

    def contents(self) -> dict[str, Any]:
        """What it holds that is neither plumbing nor registered, and what is in buffers that were None."""
        own = {name: value for name, value in vars(self.module).items() if name not in PLUMBING}
        return own | {name: self.module._buffers[name] for name in self.empty}

    def hung(self) -> bool:
        """Whether it has other hooks than before."""
        return any(vars(self.module)[name] != hooks for name, hooks in self.hooks.items())

    def compare(self, left: Left) -> None:
        """Note what is other than before."""
        for name, value in self.contents().items():
            now, old = snapshot(value), self.values.get(name, Snapshot(MISSING))
            if now.same(old):
                continue
            known = set(map(id, old.parts))
            fresh = [part for part in now.parts if id(part) not in known]
            if name in self.configurations and not fresh:
                fields, held = plain_fields(value), self.configurations[name]
                changed = {key: entry for key, entry in fields.items() if key not in held or held[key] != entry}
                left.writes |= {(self.path, f"{name}.{key}"): entry for key, entry in changed.items()}
            elif fresh and all(isinstance(part, Tensor) for part in fresh):
                before = tuple(part for part in old.parts if isinstance(part, Tensor))
                left.kept += [((self.path, name), part, before) for part in fresh]
            elif fresh or old.parts or isinstance(value, (list, dict, set)):
                raise CaptureError(
                    f"the forward of {self.path or 'the model'} changes its attribute {name}, of type "
                    f"{type(value).__qualname__}, which a program cannot do again at every call\n"
                    "  try: return what changes from forward, or change it outside of forward"
                )
            else:
                left.writes[self.path, name] = value

    def put_back(self) -> None:
        """Everything as it was, also what is in lists, dicts and sets."""
        own = vars(self.module)
        for name in own.keys() - self.fields.keys():
            del own[name]
        own.update(self.fields)
        self.module._buffers.update(dict.fromkeys(self.empty))
        for name, held in self.configurations.items():
            fields = vars(own[name])
            for key in plain_fields(own[name]).keys() - held.keys():
                del fields[key]
            fields.update(held)
        for name, content in self.copies.items():
            value = own[name]
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)


def settle_buffers(buffers: Sequence[Named], values: Sequence[Tensor]) -> None:
    """Buffers that forward bound to another tensor get its numbers, as if they had been changed in place."""
    for buffer, value in zip(buffers, values, strict=True):
        for slot, key in buffer.slots:
            new = slot[key]
            if new is value:
                continue
            if not isinstance(new, Tensor) or new.shape != value.shape or new.dtype != value.dtype:
                what = f"{new.dtype} of shape {tuple(new.shape)}" if isinstance(new, Tensor) else type(new).__name__
                raise UnsupportedError(
                    f"forward replaces buffer {buffer.names[0]}, {value.dtype} of shape {tuple(value.shape)}, by {what}"
                    "\n  try: keep shape and dtype, or replace it between steps"
                )
            with torch.no_grad():
                value.copy_(new.detach())
