"""Plans as JSON: written, read with every field checked, and kept in a cache.

In: a `Plan` or a path.  Out: the other.  Next: `text.py`, which prints plans for people.

A layout is written as it prints, `[64@data, (3*4@model*16)]{sum:model}`, so that a plan can be edited by hand. Nothing
is ever unpickled: a file that is no JSON text is refused unopened.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from autopar.errors import PlanError, UnsafeFileError
from autopar.fingerprint import digest, source_digest
from autopar.layout import Layout, Mesh
from autopar.plan import ParameterPlan, Plan

VERSION = 1
AGAIN = "\n  try: mend that place, or write the plan again with `autopar plan ... --out FILE`"
log = logging.getLogger("autopar")

# --- layouts as text --------------------------------------------------------------------------------------------------

FACTOR = re.compile(r"(\d+)((?:@\w+)*)")
LAYOUT = re.compile(r"\[(?P<dims>.*)\](?:\{(?P<pending>[^}]*)\})?")


def write_layout(layout: Layout) -> str:
    """The layout as it prints; `read_layout` is the way back."""
    return str(layout)


def read_layout(text: Any) -> Layout:
    """The layout that prints as `text`."""
    if isinstance(text, Layout):
        return text
    match = LAYOUT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is no layout; write one like [64@data, 16]{{sum:model}}")
    dims = [d for d in match["dims"].split(", ") if d]
    read = [list(read_factors(dim)) for dim in dims]
    terms = [term.split(":") for term in (match["pending"] or "").split(", ") if term]
    if any(len(term) != 2 or term[0] not in ("sum", "max", "min") for term in terms):
        raise ValueError(f"{text!r} has a pending term that is not sum:, max: or min: and a mesh axis")
    return Layout(
        tuple(tuple(size for size, _ in dim) for dim in read),
        tuple(tuple(cut for _, cut in dim) for dim in read),
        tuple(sorted((axis, kind) for kind, axis in terms)),
    )


def read_factors(dim: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Size and cuts of every factor of one dim; a dim of size 1 has none."""
    parts = dim.removeprefix("(").removesuffix(")").split("*")
    for part in parts if dim != "1" else ():
        match = FACTOR.fullmatch(part)
        if match is None:
            raise ValueError(f"{dim!r} is no dim of a layout; write one like 64@data or (3*4@model*16)")
        yield int(match[1]), tuple(match[2].split("@")[1:])


LayoutField = Annotated[Layout, BeforeValidator(read_layout), PlainSerializer(write_layout)]

# --- the schema -------------------------------------------------------------------------------------------------------


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)


class ParameterFile(Strict):
    level: Annotated[int, Field(ge=0, le=3)]
    home: LayoutField
    stored: LayoutField
    keep: bool = False


class PlanFile(Strict):
    """What stands in a plan file."""

    autopar_plan: Literal[1]
    mesh: dict[Annotated[str, Field(pattern=r"^\w+$")], Annotated[int, Field(ge=1)]]
    ops: dict[str, list[str]]
    stages: dict[str, Annotated[int, Field(ge=0)]] = {}
    parameters: dict[str, ParameterFile]
    inputs: dict[str, LayoutField] = {}
    costs: dict[str, float] = {}
    certificate: dict[str, Any] = {}
    fingerprint: dict[str, str] = {}
    bucket_bytes: Annotated[int, Field(ge=0)] = 0
    copied_bytes: Annotated[int, Field(ge=0)] = 0
    notes: dict[str, str] = {}

    def plan(self) -> Plan:
        """The plan, after checks that concern more than one field."""
        mesh = Mesh(tuple(self.mesh), tuple(self.mesh.values()))
        for node, roles in self.ops.items():
            if len(roles) != len(mesh.names):
                raise ValueError(f"ops.{node}: {len(roles)} roles for the {len(mesh.names)} axes of {mesh}")
        layouts = {f"inputs.{name}": layout for name, layout in self.inputs.items()}
        for name, parameter in self.parameters.items():
            layouts |= {f"parameters.{name}.home": parameter.home, f"parameters.{name}.stored": parameter.stored}
        for path, layout in layouts.items():
            if foreign := layout.axes - set(mesh.names):
                raise ValueError(f"{path}: {mesh} has no axis {', '.join(sorted(foreign))}")
            used = [axis for _, _, cut in layout.places() for axis in cut] + [axis for axis, _ in layout.pending]
            if len(set(used)) < len(used):
                raise ValueError(f"{path}: {layout} uses the mesh axis {max(used, key=used.count)} twice")
        return Plan(
            mesh,
            {node: tuple(roles) for node, roles in self.ops.items()},
            {n: ParameterPlan(p.level, p.home, p.stored, p.keep) for n, p in self.parameters.items()},
            dict(self.inputs),
            dict(self.costs),
            dict(self.certificate),
            dict(self.fingerprint),
            self.bucket_bytes,
            self.copied_bytes,
            dict(self.notes),
            dict(self.stages),
        )


def dumps(plan: Plan) -> str:
    """The plan as JSON text, one op or parameter a line."""
    stored = {
        name: {
            "level": p.level,
            "home": write_layout(p.home),
            "stored": write_layout(p.stored),
            **({"keep": True} if p.keep else {}),
        }
        for name, p in plan.parameters.items()
    }
    document = {
        "autopar_plan": VERSION,
        "mesh": dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)),
        "bucket_bytes": plan.bucket_bytes,
        "copied_bytes": plan.copied_bytes,
        "fingerprint": dict(plan.fingerprint),
        "costs": dict(plan.costs),
        "certificate": dict(plan.certificate),
        "inputs": {name: write_layout(layout) for name, layout in plan.inputs.items()},
        "parameters": stored,
        "ops": {node: list(roles) for node, roles in plan.ops.items()},
        **({"stages": dict(plan.stages)} if plan.stages else {}),
        "notes": dict(plan.notes),
    }
    sections = []
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            rows = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v, default=plain)}" for k, v in value.items())
            sections.append(f"  {json.dumps(key)}: {{\n{rows}\n  }}")
        else:
            sections.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def plain(value: Any) -> Any:
    """Read-only mappings and the like as JSON."""
    return dict(value) if isinstance(value, Mapping) else str(value)


def number(constant: str) -> float:
    """Infinity as a number; NaN is never a cost."""
    if constant == "NaN":
        raise ValueError("NaN stands where a number should")
    return float(constant)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names all differ."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} stands twice in one object")
    return found


def loads(text: str, where: str = "plan") -> Plan:
    """The plan in JSON text; every mistake is a `PlanError` that holds its path in the file."""
    try:
        data = json.loads(text, parse_constant=number, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise PlanError(f"{where}:{error.lineno}: no JSON: {error.msg}{AGAIN}") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where}: {error}{AGAIN}") from None
    version = data.get("autopar_plan") if isinstance(data, dict) else None
    if version is None:
        raise PlanError(f"{where}: no plan: the field autopar_plan is missing{AGAIN}")
    if version != VERSION:
        raise PlanError(f"{where}: autopar_plan is {version!r}, this version of autopar reads {VERSION}{AGAIN}")
    try:
        return PlanFile.model_validate(data).plan()
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise PlanError(f"{where}: {path}: {message}{AGAIN}") from None
    except ValueError as error:
        raise PlanError(f"{where}: {error}{AGAIN}") from None


# --- files ------------------------------------------------------------------------------------------------------------


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the plan; readers see the old file or the whole new one."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(dumps(plan), encoding="utf-8")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file. What it was made for is checked by `fingerprint.check`."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}{AGAIN}") from None
    if not raw.lstrip().startswith(b"{"):
        raise UnsafeFileError(f"{path} is no JSON text and was not opened; plans are JSON files")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnsafeFileError(f"{path} is no JSON text and was not opened: {error}") from error
    return loads(text, str(path))


def cache_folder() -> Path | None:
    """Where plans are kept: $AUTOPAR_CACHE, or ~/.cache/autopar; nowhere if it is "off"."""
    named = os.environ.get("AUTOPAR_CACHE", "")
    return None if named == "off" else Path(named) if named else Path.home() / ".cache" / "autopar"


def cached(fingerprint: Mapping[str, str], make: Callable[[], Plan], folder: Path | None = None) -> Plan:
    """The plan kept under this fingerprint, or the one that `make` makes, which is then kept.

    A file that cannot be read is passed over with a log line and written anew.
    """
    folder = folder or cache_folder()
    if folder is None:
        return make()
    path = folder / f"{digest({**fingerprint, 'source': source_digest()})}.json"
    if path.exists():
        try:
            plan = load(path)
        except (PlanError, UnsafeFileError, OSError) as error:
            log.warning("passing over a cached plan: %s", error)
        else:
            if dict(plan.fingerprint) == dict(fingerprint):
                return plan
            log.warning("passing over a cached plan: %s holds another fingerprint", path)
    plan = make()
    try:
        save(plan, path)
    except OSError as error:
        log.warning("the plan is not cached: %s", error)
    return plan
