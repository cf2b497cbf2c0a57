"""What differs between two plans, in the words in which plans print.

In: two `Plan`s.  Out: rows, or text.  Next: `text.py`.

    mesh        mesh(data=4)  ->  mesh(data=2, model=2)
    step        6.03 ms  ->  5.10 ms
    ops         38 of 122 differ
      blocks.0-2.attn.qkv mm, add  x 6   batch@data  ->  batch@data heads@model
    parameters  4 of 28 differ
      blocks.0-2.up.weight  x 3          replicated [60, 36]  ->  ZeRO 3 [60@data, 36]

Equal changes in one module, and those of repeated blocks, stand once. Ops are told by their module, their names in the
plan without numbers, and what each mesh axis cuts there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.fingerprint import differences
from autopar.plan import ParameterPlan, Plan
from autopar.text import kept_text, ms, size

ABSENT = "not there"
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")  # of a block, in the path of a module
MOST_KINDS = 3


@dataclass(frozen=True)
class Row:
    """One change; `count` ops or parameters share it."""

    section: str
    name: str
    before: str
    after: str
    count: int = 1


def difference(a: Plan, b: Plan) -> str:
    """The rows as text; empty where there are none."""
    found = list(rows(a, b))
    totals = {"op": len({*a.ops, *b.ops}), "parameter": len({*a.parameters, *b.parameters})}
    labels = [row.name + (f"  x {row.count}" if row.count > 1 else "") for row in found]
    wide = max((len(label) for label in labels), default=0)
    lines, last = [], ""
    for row, label in zip(found, labels, strict=True):
        if row.section in totals and row.section != last:
            count = sum(one.count for one in found if one.section == row.section)
            lines.append(f"{row.section}s: {count} of {totals[row.section]} differ")
        last = row.section
        lines.append(f"{'  ' if row.section in totals else ''}{label.ljust(wide)}  {row.before}  ->  {row.after}")
    return "\n".join(lines)


def rows(a: Plan, b: Plan) -> Iterator[Row]:
    """Everything that differs: what was asked for, the mesh, costs and memory, ops, parameters."""
    for field in sorted({*a.fingerprint, *b.fingerprint}):
        here, there = (plan.fingerprint.get(field, "") or "none" for plan in (a, b))
        if field == "cluster":
            yield from (Row("made for", f"made for: {path}", x, y) for path, x, y in differences(here, there))
        elif here != there:
            yield Row("made for", f"made for: {field}", here, there)
    if a.mesh != b.mesh:
        yield Row("mesh", "mesh", str(a.mesh), str(b.mesh))
    yield from costs(a.costs, b.costs)
    for name in ("inputs", "bucket_bytes", "copied_bytes"):
        here, there = (told(getattr(plan, name)) for plan in (a, b))
        if here != there:
            yield Row(name, name.replace("_", " "), here, there)
    yield from grouped("op", op_words(a), op_words(b), lambda name: place_of(name, a, b))
    here_stages, there_stages = ({n: str(stage) for n, stage in plan.stages.items()} for plan in (a, b))
    yield from grouped("stage", here_stages, there_stages, lambda name: place_of(name, a, b))
    here_kept, there_kept = ({n: kept_words(way) for n, way in plan.parameters.items()} for plan in (a, b))
    yield from grouped("parameter", here_kept, there_kept, lambda name: (name, ""))


def costs(a: Mapping[str, float], b: Mapping[str, float]) -> Iterator[Row]:
    """Seconds and bytes that print differently."""
    for key in [*a, *(key for key in b if key not in a)]:
        show: Callable[[float], str] = size if key.endswith("_bytes") else lambda s: f"{ms(s)} ms"
        here, there = (show(costs[key]) if key in costs else ABSENT for costs in (a, b))
        if here != there:
            what = key.rpartition("_")[0].replace("_", " ")
            yield Row("costs", f"memory: {what}" if key.endswith("_bytes") else what, here, there)


def told(value: object) -> str:
    """A field of a plan in short."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {layout}" for name, layout in sorted(value.items())) or "whole"
    return str(value)


def op_words(plan: Plan) -> dict[str, str]:
    """Op -> `batch@data heads@model`, mesh axes in alphabetical order, so that their order alone changes no op."""
    out = {}
    for node, roles in plan.ops.items():
        names = dict(pair.split("=") for pair in plan.notes.get(node, "").partition(": ")[2].split())
        parts = {axis: names.get(role, role) for axis, role in zip(plan.mesh.names, roles, strict=True) if role}
        out[node] = " ".join(f"{what}@{axis}" for axis, what in sorted(parts.items())) or "whole"
    return out


def place_of(node: str, a: Plan, b: Plan) -> tuple[str, str]:
    """("blocks.0.attn.qkv", "mm")."""
    module = (a.notes.get(node) or b.notes.get(node, "")).partition(":")[0]
    return module, re.sub(r"_[0-9]+$", "", node)


def kept_words(kept: ParameterPlan) -> str:
    """`ZeRO 2 [60@data, 36] computed with as [60, 36]`."""
    copy = f" computed with as {kept.home}" if kept.home != kept.stored and kept.home.axes else ""
    return f"{kept_text(kept)} {kept.stored}{copy}"


def grouped(
    section: str, a: Mapping[str, str], b: Mapping[str, str], place: Callable[[str], tuple[str, str]]
) -> Iterator[Row]:
    """A row for equal changes in one place, or in places that are called the same but for the numbers of blocks."""
    found: dict[tuple[str, str, str], list[tuple[str, str]]] = defaultdict(list)
    for name in [*a, *(name for name in b if name not in a)]:
        here, there = a.get(name, ABSENT), b.get(name, ABSENT)
        if here != there:
            module, kind = place(name)
            found[NUMBER.sub("*", module), here, there].append((module, kind))
    for (_, here, there), members in found.items():
        kinds = list(dict.fromkeys(kind for _, kind in members))
        what = ", ".join(kinds[:MOST_KINDS]) + (", ..." if len(kinds) > MOST_KINDS else "")
        yield Row(section, f"{ranged([module for module, _ in members])} {what}".strip(), here, there, len(members))


def ranged(names: Sequence[str]) -> str:
    """`blocks.0-2.up` for blocks.0.up, blocks.1.up, blocks.2.up; the numbers are the first in each name."""
    numbers = sorted({int(n) for name in names for n in NUMBER.findall(name)[:1]})
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return NUMBER.sub(text, names[0], count=1)
