"""What a user fixes in a plan before it is made: pins on modules, parameters and the mesh.

In: a mapping, or a YAML file of the same form.  Out: `Pins`.  Next: `planner/pinned.py`, what they mean on a graph.

    mesh: {data: 2, model: 2}
    modules:
      blocks.3.attn: batch@data heads@model     # as a plan prints it: what each mesh axis cuts
      blocks.*.up: model                        # the mesh axis `model` cuts something, whatever it is
      head: whole
    parameters:
      tokens.weight: whole                      # on every device
      head.weight: "[48@model, 36]"             # as a plan prints it
      blocks.*.up.weight: "@data"               # stored cut by that mesh axis, wherever
      norm.weight: {level: 3, keep: true}

A name holds for what lies below it; `*` is one part of any name. Where several pins name one thing, the one with the
most parts counts, then the one with the fewest stars, then the last.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autopar.errors import InputError
from autopar.files import read_layout
from autopar.layout import MICRO, STAGE, Layout, Mesh

WORD = re.compile(r"(?:([\w.~]+)@)?(\w+)")
ANYTHING = "*"
WHOLE = "whole"
Cut = Layout | frozenset[str]  # a layout, or the mesh axes that cut the tensor somewhere

# --- the schema -------------------------------------------------------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ParameterFile(_Strict):
    level: Annotated[int, Field(ge=0, le=3)] | None = None
    stored: str | None = None
    home: str | None = None
    keep: bool | None = None


class PinsFile(_Strict):
    mesh: dict[Annotated[str, Field(pattern=r"^\w+$")], Annotated[int, Field(ge=1)]] = {}
    modules: dict[str, str] = {}
    parameters: dict[str, str | ParameterFile] = {}


# --- the values -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pin:
    """One line: what it names (`modules.blocks.3.attn`), and what was written there."""

    section: str
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.section}.{self.name}: {self.text}"

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.name.split("."))

    def names(self, path: str) -> bool:
        """Whether it holds for a path, which it names or which lies below."""
        parts = path.split(".")
        return len(parts) >= len(self.parts) and alike(self.parts, parts)

    def weight(self) -> tuple[int, int]:
        """How much it counts beside others."""
        return len(self.parts), -self.parts.count("*")


@dataclass(frozen=True)
class ModulePin(Pin):
    """`cuts`: (mesh axis, the name or letter that it cuts), "*" for any, "" for none; other mesh axes are free.

    `whole`: no mesh axis cuts anything.
    """

    cuts: tuple[tuple[str, str], ...] = ()
    whole: bool = False

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(axis for axis, _ in self.cuts)


@dataclass(frozen=True)
class ParameterPin(Pin):
    """How a parameter is kept, as far as it is fixed; see `ParameterPlan`."""

    level: int | None = None
    stored: Cut | None = None
    home: Cut | None = None
    keep: bool | None = None

    @property
    def axes(self) -> frozenset[str]:
        cuts = (cut.axes if isinstance(cut, Layout) else cut or frozenset() for cut in (self.stored, self.home))
        return frozenset().union(*cuts)


@dataclass(frozen=True)
class Pins:
    """Everything that is fixed; `where` is the file it came from."""

    mesh: tuple[tuple[str, int], ...] = ()
    modules: tuple[ModulePin, ...] = ()
    parameters: tuple[ParameterPin, ...] = ()
    where: str = "pins"

    def __bool__(self) -> bool:
        return bool(self.mesh or self.modules or self.parameters)

    def __str__(self) -> str:
        """The pins in one line, the same wherever they came from."""
        given = {"mesh": dict(self.mesh), **{s: {p.name: p.text for p in getattr(self, s)} for s in SECTIONS}}
        return json.dumps({section: found for section, found in given.items() if found})

    @property
    def all(self) -> tuple[ModulePin | ParameterPin, ...]:
        return (*self.modules, *self.parameters)

    def without(self, pin: Pin) -> Pins:
        """All the others."""
        modules = tuple(p for p in self.modules if p != pin)
        return Pins(self.mesh, modules, tuple(p for p in self.parameters if p != pin), self.where)

    def module(self, path: str) -> ModulePin | None:
        """The pin that counts for a module."""
        return strongest(p for p in self.modules if p.names(path))

    def parameter(self, names: Iterable[str]) -> ParameterPin | None:
        """The pin that counts for a parameter, under any of its names."""
        return strongest(p for p in self.parameters if any(p.names(name) for name in names))

    def on(self, block: tuple[str, ...]) -> str:
        """What is pinned inside one of several equal blocks, as text: equal texts, equal pins."""
        inside = (p for p in self.all if len(p.parts) >= len(block) and alike(p.parts, block))
        return ", ".join(str(p) for p in inside)

    def meshes(self, devices: int, candidates: Iterable[Mesh]) -> list[Mesh]:
        """The meshes on which the pins can be followed: those with their axes, or the pinned one."""
        found = [self.pinned_mesh(devices)] if self.mesh else list(candidates)
        for pin in self.all:
            if taken := pin.axes & {STAGE, MICRO}:
                raise InputError(
                    f"{self.where}: {pin}: the axis {min(taken)} is that of a pipeline, which the strategy rules\n"
                    "  try: leave it out; the stages of ops can be edited in a plan file"
                )
            able = [mesh for mesh in found if pin.axes <= set(mesh.names)]
            if not able:
                missing = ", ".join(sorted(pin.axes - set(found[-1].names)))
                raise InputError(
                    f"{self.where}: {pin}: {' or '.join(map(str, found))} has no axis {missing}\n"
                    f"  try: another axis, or pin the mesh too, like mesh: {{{missing.split(',')[0]}: {devices}}}"
                )
            found = able
        return found

    def pinned_mesh(self, devices: int) -> Mesh:
        """The mesh as pinned; devices that are left make up one more axis, `data` or `model`."""
        sizes, count = dict(self.mesh), 1
        if taken := sizes.keys() & {STAGE, MICRO}:
            raise InputError(
                f"{self.where}: mesh: the axis {min(taken)} is that of a pipeline\n"
                "  try: strategy=autopar.strategies.pipeline(...), and another name here"
            )
        for size in sizes.values():
            count *= size
        free = [name for name in ("data", "model") if name not in sizes]
        if devices % count or (count != devices and not free):
            text = ", ".join(f"{axis}={size}" for axis, size in self.mesh)
            sizes_there = ", ".join(str(size) for size in range(1, devices + 1) if devices % size == 0)
            raise InputError(
                f"{self.where}: mesh: the sizes of {text} multiply to {count}, and the cluster has {devices} devices\n"
                f"  try: sizes that multiply to {devices}, each one of {sizes_there}"
            )
        if count != devices:
            rest = {free[0]: devices // count}
            sizes = rest | sizes if free[0] == "data" else sizes | rest
        return Mesh(tuple(sizes), tuple(sizes.values()))


SECTIONS = ("modules", "parameters")
NONE = Pins()
P = TypeVar("P", bound=Pin)


def alike(pattern: Iterable[str], parts: Iterable[str]) -> bool:
    """Whether parts of a name follow a pattern, as far as the shorter one goes."""
    return all(star in (part, "*") for star, part in zip(pattern, parts))


def strongest(pins: Iterable[P]) -> P | None:
    """The pin that counts."""
    best: P | None = None
    for pin in pins:
        best = pin if best is None or pin.weight() >= best.weight() else best
    return best


# --- reading ----------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str]) -> Pins:
    """The pins in a YAML file; every mistake is an `InputError` with its path in the file."""
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InputError(f"{path}: {place}{error.problem}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: {str(error).splitlines()[0]}") from None
    if not isinstance(data, Mapping):
        raise InputError(f"{path}: pins are a mapping with mesh, modules and parameters, not {type(data).__name__}")
    return parse(data, str(path))


def parse(data: Mapping[str, Any], where: str = "pins") -> Pins:
    """The pins in plain data."""
    try:
        file = PinsFile.model_validate(dict(data))
    except ValidationError as error:
        first = max(error.errors(), key=lambda e: len(e["loc"]))
        path = ".".join(str(part) for part in first["loc"] if part not in ("str", "ParameterFile"))
        if first["type"] == "extra_forbidden":
            known = (PinsFile if len(first["loc"]) == 1 else ParameterFile).model_fields
            raise InputError(f"{where}: {path}: there is no such key; there are {', '.join(known)}") from None
        raise InputError(f"{where}: {path}: {first['msg']} (found {first.get('input')!r})") from None
    modules = tuple(module_pin(name, text, where) for name, text in file.modules.items())
    parameters = tuple(parameter_pin(name, given, where) for name, given in file.parameters.items())
    return Pins(tuple(file.mesh.items()), modules, parameters, where)


def module_pin(name: str, text: str, where: str) -> ModulePin:
    """`batch@data heads@model`, `model` or `whole`."""
    if text.strip() == WHOLE:
        return ModulePin("modules", name, text, whole=True)
    words = [WORD.fullmatch(word) for word in text.split()]
    if not words or None in words:
        raise InputError(
            f"{where}: modules.{name}: {text!r} is no pin; write what mesh axes cut, like batch@data heads@model, a "
            "mesh axis alone, like data, or whole"
        )
    cuts = [(word[2], "" if word[1] == WHOLE else word[1] or ANYTHING) for word in words if word is not None]
    if len({axis for axis, _ in cuts}) < len(cuts):
        raise InputError(f"{where}: modules.{name}: {text!r} tells twice what one mesh axis does")
    return ModulePin("modules", name, text, tuple(cuts))


def parameter_pin(name: str, given: str | ParameterFile, where: str) -> ParameterPin:
    """`whole`, `[48@model, 36]`, `@model`, or fields of their own."""
    if isinstance(given, str):
        level = 0 if given.strip() == WHOLE else None
        return ParameterPin("parameters", name, given, level, cut(given, f"{where}: parameters.{name}"))
    fields = given.model_dump(exclude_none=True)
    place = f"{where}: parameters.{name}"
    stored = None if given.stored is None else cut(given.stored, f"{place}.stored")
    home = None if given.home is None else cut(given.home, f"{place}.home")
    if not fields:
        raise InputError(f"{place}: nothing is pinned; write whole, a layout, or level, stored, home, keep")
    if given.keep is not None and given.level != 3:
        raise InputError(f"{place}.keep: it is for level 3, whose gathered copy may live until backward")
    return ParameterPin("parameters", name, json.dumps(fields), given.level, stored, home, given.keep)


def cut(text: str, place: str) -> Cut:
    """How a tensor is cut: by nothing, by mesh axes wherever, or exactly so."""
    text = text.strip()
    if text == WHOLE:
        return frozenset()
    if re.fullmatch(r"(@\w+)+", text):
        return frozenset(text.split("@")[1:])
    try:
        return read_layout(text)
    except ValueError as error:
        raise InputError(f"{place}: {error}, @model for a cut by that mesh axis, or whole") from None
