"""Python values and submodules of the model as they are now, beside those that programs were traced with.

In: a model, the names that a trace read.  Out: which of the programs' states hold now.  Next: `engine.py`.

Looked at before every call, so what has not changed costs one identity check: only where something is another object,
or where an object can change inside (a list, a configuration), are values compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from torch import Tensor, nn

from autopar._torch import wrapper_storage
from autopar.attributes import EMPTY, MISSING, PLAIN, Name, Snapshot, snapshot, value_of

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
State = Mapping[Name, Snapshot]


@dataclass
class Watched:
    """What the programs of one model depend on besides arguments and tensors.

    states    one for every program, without repetition: attributes and what they were when it was traced
    latest    the values at the last look: `own` of those that modules had themselves, `inherited` of their classes
    held      which states held then
    """

    model: nn.Module
    states: list[State] = field(default_factory=list)
    latest: dict[Name, Any] = field(default_factory=dict)
    own: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    inherited: list[Name] = field(default_factory=list)
    inside: dict[int, tuple[Any, Snapshot]] = field(default_factory=dict)
    held: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())
        self.tree = [(path, m, dict(m._modules)) for path, m in self.modules.items()]
        self.parameters = [(path, m, dict(m._parameters)) for path, m in self.modules.items()]
        self.shells = [(name, p, wrapper_storage(p)) for name, p in self.model.named_parameters()]

    def other_modules(self) -> str:
        """What of the tree of submodules and parameters is no longer what was made parallel, or nothing."""
        for kind, places in (("_modules", self.tree), ("_parameters", self.parameters)):
            for path, module, entries in places:
                now = vars(module)[kind]
                same = now.keys() == entries.keys()
                if same and all(map(is_, now.values(), entries.values())):
                    continue
                if not same or any(now[name] is not value for name, value in entries.items()):
                    names = [n for n, v in entries.items() if now.get(n) is not v]
                    names += [n for n in now if n not in entries]
                    what = "submodule" if kind == "_modules" else "parameter"
                    return (
                        f"{what} {f'{path}.' if path else ''}{names[0]} was added, replaced or removed after the model "
                        "was made parallel\n  try: change the model first and parallelize it then; to change numbers "
                        "alone, copy them into the parameter"
                    )
        for name, parameter, shell in self.shells:
            if wrapper_storage(parameter) != shell:
                return (
                    f"parameter {name} was assigned to through .data, which a DTensor does not take over\n"
                    "  try: parameter.data.copy_(...), or parameter.copy_(...) under torch.no_grad()"
                )
        return ""

    def add(self, names: Iterable[Name]) -> int:
        """The number of the state in which these attributes are what they are now."""
        hooks = [(path, kind) for path in self.modules if path for kind in HOOKS]
        state = {name: snapshot(self.value(name)) for name in (*names, *hooks)}
        for number, known in enumerate(self.states):
            if known.keys() == state.keys() and all(known[name].same(state[name]) for name in state):
                return number
        self.states.append(state)
        self.look()
        return len(self.states) - 1

    def value(self, name: Name) -> Any:
        """What an attribute is now."""
        return value_of(self.modules[name[0]], name[1])

    def changed(self) -> bool:
        """Whether anything may be other than at the last look."""
        if any(vars(module).get(name, MISSING) is not value for module, name, value in self.own):
            return True
        if any(self.value(name) is not self.latest[name] for name in self.inherited):
            return True
        return any(value if then is EMPTY else not snapshot(value).same(then) for value, then in self.inside.values())

    def look(self) -> None:
        """Take in all values, and find which states they are."""
        self.latest = {name: self.value(name) for state in self.states for name in state}
        places = [(name, self.modules[name[0]]) for name in self.latest]
        self.own = [(m, name[1], self.latest[name]) for name, m in places if name[1] in vars(m)]
        self.inherited = [name for name, m in places if name[1] not in vars(m)]
        fixed = (*PLAIN, Tensor, nn.Module, type)
        loose = {id(v): v for v in self.latest.values() if not isinstance(v, fixed) and not callable(v)}
        self.inside = {key: (value, snapshot(value)) for key, value in loose.items()}
        now = {name: snapshot(value) for name, value in self.latest.items()}
        self.held = tuple(
            number
            for number, state in enumerate(self.states)
            if all(now[name].same(value) for name, value in state.items())
        )

    def holding(self) -> tuple[int, ...]:
        """Numbers of the states that the attributes are in now."""
        if self.changed():
            self.look()
        return self.held

    def differences(self) -> str:
        """In words, an attribute that is other than in the last state."""
        for (path, name), then in self.states[-1].items() if self.states else ():
            now = snapshot(self.value((path, name)))
            if not now.same(then):
                return f"attribute {f'{path}.' if path else ''}{name}: {now.text} instead of {then.text}"
        return ""

    def write(self, writes: Mapping[Name, Any]) -> None:
        """What forward would have left in attributes."""
        for (path, name), value in writes.items():
            module, (holder, _, field) = self.modules[path], name.partition(".")
            if field:
                setattr(vars(module)[holder], field, value)
            else:
                module.__dict__[holder] = value

    def tensors(self) -> dict[str, Tensor]:
        """The tensors among the attributes, by name."""
        found = {".".join(filter(None, name)): value for name, value in self.latest.items()}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}
