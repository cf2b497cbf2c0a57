"""A plan as people read it: at most a screen, repeated blocks once.

In: a `Plan`, and for the lines about ops its `Program`.  Out: text.  Next: `files.py`, the JSON.

    plan  mesh(data=2, model=4)  step 12.41 ms = compute 9.80 + exposed comm 2.61   peak 41.2 of 72.0 GiB   gap 0.00 %
    blocks.0-31  x 32
      up    %addmm_2 : f32[(batch=64@data*sequence=512), f=2048@model] = addmm   m~0@data n@model   0.31 ms

An op's line: where it is, its result, the letter of its rule that each mesh axis cuts, its time on one device, and the
collectives that its result goes through.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import fx

from autopar.axes import Axes, letter_names
from autopar.choices import choice_of
from autopar.cluster import ClusterSpec
from autopar.cost.comm import step_s
from autopar.cost.compute import node_s
from autopar.fingerprint import type_text
from autopar.graph import Graph
from autopar.layout import Layout, Mesh, Step
from autopar.moves import Moved, collectives, moves
from autopar.plan import ParameterPlan, Plan
from autopar.program import Program
from autopar.rules.core import results

GIB, MIB = 2.0**30, 2.0**20
MOST_OPS = 34  # lines about ops; with everything else a plan stays below 60
TERMS = (("compute", "compute_s"), ("exposed comm", "exposed_s"), ("optimizer", "optimizer_s"))


def text(plan: Plan) -> str:
    """The whole plan: headline, ops (where the plan carries them), parameters, memory, what else was tried."""
    return "\n".join(
        [
            headline(plan),
            *stage_lines(plan),
            *plan.certificate.get("program", ()),
            *parameter_lines(plan),
            *memory_lines(plan),
            *certificate_lines(plan),
        ]
    )


def listed(program: Program, graph: Graph, axes: Axes, cluster: ClusterSpec) -> Plan:
    """The program's plan with the lines about its ops, which are saved and printed with it; `graph` as captured."""
    plan = program.plan
    lines = program_lines(program, graph, axes, cluster)
    notes = {node.name: note(axes, node) for node in graph.fx.nodes if node.name in plan.ops}
    certificate = MappingProxyType({**plan.certificate, "program": lines})
    return replace(plan, certificate=certificate, notes=MappingProxyType(notes))


def note(axes: Axes, node: fx.Node) -> str:
    """`blocks.0.up: m~0=batch m~1=sequence`: where an op is, and what its letters are called."""
    names = {letter: name for letter, name in letter_names(axes, node).items() if not NAMELESS.fullmatch(f"{name}=")}
    return f"{node.meta.get('module', '')}: {' '.join(f'{letter}={name}' for letter, name in sorted(names.items()))}"


def headline(plan: Plan) -> str:
    """Mesh, seconds, bytes, gap."""
    cost = plan.costs
    parts = [f"plan  {plan.mesh}"]
    if "step_s" in cost:
        terms = [f"{word} {ms(cost[key])}" for word, key in TERMS if key in cost]
        parts.append(f"step {ms(cost['step_s'])} ms" + (f" = {' + '.join(terms)}" if terms else ""))
    if "peak_bytes" in cost:
        budget = f" of {size(cost['budget_bytes'])}" if "budget_bytes" in cost else ""
        parts.append(f"peak {size(cost['peak_bytes'])}{budget}")
    if "gap" in plan.certificate:
        parts.append(f"gap {100 * float(plan.certificate['gap']):.2f} %")
    return "   ".join(parts)


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def size(count: float) -> str:
    """Bytes as GiB, or as MiB where that would be little."""
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / MIB:.3g} MiB"


# --- ops --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One op of the forward program, in columns."""

    module: str
    node: str
    type: str
    op: str
    roles: str
    time: str
    then: str

    def key(self) -> tuple[str, ...]:
        """Everything but where it is and how its node is called."""
        return tail(self.module), self.type, self.op, self.roles, self.time, self.then


def block(module: str) -> tuple[str, int] | None:
    """("blocks", 3) for "blocks.3.attn.qkv"; None outside numbered blocks."""
    match = re.match(r"^(.*?)\.?(\d+)(?:\.|$)", module)
    return (match[1], int(match[2])) if match else None


def tail(module: str) -> str:
    """ "attn.qkv" for "blocks.3.attn.qkv"."""
    return re.sub(r"^.*?\.?\d+(?:\.|$)", "", module, count=1) if block(module) else module


def program_lines(program: Program, graph: Graph, axes: Axes, cluster: ClusterSpec) -> list[str]:
    """The forward ops that compute or communicate, blocks folded, then every phase's collectives in total."""
    lines = list(op_lines(program, graph, axes, cluster))
    groups = list(fold(lines))
    rows = [row for heading, members in groups for row in columns(heading, members)]
    widths = [max((len(row[i]) for row in rows if len(row) > 1), default=0) for i in range(5)]
    out = []
    for row in rows:
        if len(row) == 1:
            out.append(row[0])
            continue
        place, node, kind, op, roles = (text.ljust(width) for text, width in zip(row, widths))
        out.append(f"{place} {node} : {kind} = {op}  {roles}  {row[5]}")
    if len(out) > MOST_OPS:
        out = [*out[: MOST_OPS - 1], f"  ... and {len(out) - MOST_OPS + 1} lines more"]
    return [*out, *total_lines(program)]


NAMELESS = re.compile(r"\bf\d+=")  # a factor that no rule has a name for


def columns(heading: str, members: Sequence[Line]) -> Iterator[tuple[str, ...]]:
    """A heading as a row of its own, and the columns of every line below it."""
    if heading:
        yield (heading,)
    for x in members:
        yield ("  " + tail(x.module) if heading else x.module), x.node, x.type, x.op, x.roles, f"{x.time} ms{x.then}"


def op_lines(program: Program, graph: Graph, axes: Axes, cluster: ClusterSpec) -> Iterator[Line]:
    """Lines of the forward ops that have flops or whose result is communicated."""
    mesh, after = program.plan.mesh, collectives_after(program.forward)
    nodes, seen = graph.nodes, set[str]()
    for node in program.forward.nodes:
        origin = node.meta.get("origin")
        instance = axes.instances.get(origin)
        if instance is None or origin in seen or "step" in node.meta:
            continue
        seen.add(origin)
        if instance.flops is None and origin not in after:
            continue
        captured = nodes[origin]
        choice = choice_of(axes, captured, program.plan.ops[origin], mesh)
        assert choice is not None, origin
        first = results(captured)[0]
        assert first is not None, origin
        layout, labels = choice.outputs[0], axes.labels.get((origin, 0))
        ends = [*((layout, first.dtype) for layout in choice.inputs), (layout, first.dtype)]
        seconds = node_s(captured, instance, choice.roles, ends, mesh, cluster)
        then = [
            f"{s.kind}({s.axis}) {ms(step_s(s, first.dtype.itemsize, mesh, cluster))} ms" for s in after.get(origin, ())
        ]
        yield Line(
            captured.meta.get("module", ""),
            f"%{origin}",
            type_text(first).split("[")[0] + NAMELESS.sub("", layout.text(labels)),
            getattr(captured.target, "__name__", str(captured.target)).split(".")[0],
            roles_text(axes, captured, choice.roles, mesh),
            ms(seconds),
            f"   then {', '.join(then)}" if then else "",
        )


def roles_text(axes: Axes, node: fx.Node, roles: Sequence[str], mesh: Mesh) -> str:
    """`batch@data heads@model`; an axis along which the op runs whole is left out, a nameless letter stays one."""
    names = {letter: name for letter, name in letter_names(axes, node).items() if not NAMELESS.fullmatch(f"{name}=")}
    parts = [f"{names.get(role, role)}@{axis}" for role, axis in zip(roles, mesh.names, strict=True) if role]
    return " ".join(parts) or "whole"


def collectives_after(graph: fx.Graph) -> dict[str, list[Step]]:
    """The collectives of a graph, by the captured op whose result, or part of whose own subgraph, they carry."""
    out: dict[str, list[Step]] = defaultdict(list)
    for node, step in collectives(graph):
        root = node
        while root.op == "call_function" and "origin" not in root.meta:
            root = root.args[0]  # type: ignore[assignment]
        if root.op == "call_function":
            out[root.meta["origin"]].append(step)
    return dict(out)


def fold(lines: Iterable[Line]) -> Iterator[tuple[str, list[Line]]]:
    """Lines in runs: ("", lines outside blocks), or ("blocks.0-31  x 32", the lines of the first of them)."""
    runs: list[tuple[tuple[str, int] | None, list[Line]]] = []
    for line in lines:
        here = block(line.module)
        if not runs or runs[-1][0] != here:
            runs.append((here, []))
        runs[-1][1].append(line)
    i = 0
    while i < len(runs):
        here, members = runs[i]
        last = i
        if here is not None:
            signature = [x.key() for x in members]
            while last + 1 < len(runs) and follows(runs[last + 1], here, last + 1 - i, signature):
                last += 1
        yield title(here, last - i + 1), members
        i = last + 1


def follows(
    run: tuple[tuple[str, int] | None, list[Line]],
    first: tuple[str, int],
    distance: int,
    signature: list[tuple[str, ...]],
) -> bool:
    return run[0] == (first[0], first[1] + distance) and [x.key() for x in run[1]] == signature


def title(here: tuple[str, int] | None, count: int) -> str:
    if here is None:
        return ""
    stem, index = here
    return f"{stem}.{index}-{index + count - 1}  x {count}" if count > 1 else f"{stem}.{index}"


# --- totals -----------------------------------------------------------------------------------------------------------


def total_lines(program: Program) -> Iterator[str]:
    """One line a phase."""
    found = moves(program)
    for phase in ("forward", "backward"):
        parts = [moved_text(kind, axis, moved) for (kind, axis, when), moved in found.items() if when == phase]
        yield f"{phase} moves {', '.join(parts) or 'nothing'}"


def moved_text(kind: str, axis: str, moved: Moved) -> str:
    """`34 all_reduce(data) in 2 calls 2.27 MiB`."""
    calls = f" in {moved.calls} call{'s' if moved.calls > 1 else ''}" if moved.calls < moved.tensors else ""
    return f"{moved.tensors} {kind}({axis}){calls} {size(moved.bytes)}"


def stage_lines(plan: Plan) -> Iterator[str]:
    """The modules of every stage, blocks by their numbers."""
    places: dict[int, dict[str, None]] = defaultdict(dict)
    for node, stage in plan.stages.items():
        module = plan.notes.get(node, "").partition(":")[0]
        named = block(module)
        places[stage][f"{named[0]}.{named[1]}" if named else module] = None
    for stage, names in sorted(places.items()):
        words = [name for name in names if name]
        yield f"stage {stage}: {', '.join(words if len(words) < 8 else [*words[:4], '...', *words[-3:]])}"


# --- parameters and memory --------------------------------------------------------------------------------------------


def parameter_lines(plan: Plan) -> Iterator[str]:
    """Parameters by how they are kept: how many, how large, one as an example."""
    kinds: dict[tuple[str, str], list[tuple[str, ParameterPlan]]] = defaultdict(list)
    for name, kept in plan.parameters.items():
        kinds[kept_text(kept), cut_text(kept.stored, plan.mesh)].append((name, kept))
    if kinds:
        yield "parameters"
    ordered = sorted(kinds.items(), key=lambda item: -sum(count(p.stored) for _, p in item[1]))
    for (level, where), members in ordered[:6]:
        numbers = sum(count(p.stored) for _, p in members)
        name, kept = max(members, key=lambda m: count(m[1].stored))
        yield f"  {level:18} {where:16} {len(members):4} tensors {numbers / 1e6:10.4g} M   {name} {kept.stored}"
    if len(ordered) > 6:
        yield f"  ... and {sum(len(members) for _, members in ordered[6:])} tensors more"


def kept_text(kept: ParameterPlan) -> str:
    if kept.level == 0:
        return "sharded" if kept.stored.axes else "replicated"
    return f"ZeRO {kept.level}" + (" kept" if kept.level == 3 and kept.keep else "")


def cut_text(layout: Layout, mesh: Mesh) -> str:
    return "@" + "@".join(axis for axis in mesh.names if axis in layout.axes) if layout.axes else "whole"


def count(layout: Layout) -> int:
    out = 1
    for size in layout.shape:
        out *= size
    return out


TOTALS = ("peak_bytes", "budget_bytes")


def memory_lines(plan: Plan) -> Iterator[str]:
    """Bytes that stay on one device, by what they are for, and what a step adds at its peak."""
    kept = {k: v for k, v in plan.costs.items() if k.endswith("_bytes") and k not in TOTALS and v}
    if not kept:
        return
    transient = plan.costs.get("peak_bytes", 0.0) - sum(kept.values())
    parts = [f"{key.removesuffix('_bytes').replace('_', ' ')} {size(count)}" for key, count in kept.items()]
    yield f"memory a device: {' + '.join(parts)} + gradients and activations at the peak {size(max(0.0, transient))}"


def certificate_lines(plan: Plan) -> Iterator[str]:
    """How sure the planner is, and by how much the runners-up lost."""
    certificate: Mapping[str, Any] = plan.certificate
    if "objective_s" in certificate:
        bound = f"objective {ms(certificate['objective_s'])} ms, bound {ms(certificate['bound_s'])} ms"
        count = f", {certificate['variables']} variables" if "variables" in certificate else ""
        yield f"certificate: {bound}{count}"
    if plan.stages:
        yield "certificate: none; the stages are cut into about equal seconds, by a rule outside the programme"
    best = plan.costs.get("step_s", 0.0)
    others = [t for t in certificate.get("tried", ()) if isinstance(t, Mapping) and t.get("mesh") != str(plan.mesh)]
    for entry in sorted(others, key=lambda t: t.get("step_s", float("inf")))[:5]:
        if "step_s" in entry:
            slower = f", {entry['step_s'] / best:.2f} x" if best else ""
            yield f"lost: {entry['mesh']}  step {ms(entry['step_s'])} ms{slower}"
        elif "needed_bytes" in entry:
            yield f"lost: {entry['mesh']}  does not fit: it needs {size(entry['needed_bytes'])}"
        else:
            yield f"lost: {entry['mesh']}  {entry.get('untried', 'does not fit')}"
