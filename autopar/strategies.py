"""Strategies written by hand, as constraints on what the planner may choose.

In: sizes.  Out: `Strategy`: a mesh, which choices of an op and which ways to keep a parameter it allows, and whether a
plan shows it.  Next: `planner/search.py`.

    ddp()                     the batch cut, parameters whole, gradients summed
    zero(1), zero(2), zero(3) the same, with optimizer state, gradients, parameters stored in pieces
    fsdp(reshard=False)       zero(3) that keeps gathered parameters until their backward
    hsdp(2)                   fsdp inside groups, 2 copies of every group
    tensor(4)                 every product of matrices cut along its weight
    megatron(4, sp=True)      heads, hidden width and vocabulary cut; with `sp` the sequence in between
    expert(4)                 the batch cut, and inside expert layers the experts instead
    pipeline(2)               the model cut into stages, through which microbatches go one after another
    ddp(2) * megatron(4)      a product: one mesh axis (or two) for each

Every strategy rules one mesh axis, and speaks of factors by the names that rules give them: batch, sequence, model (the
width of the residual stream), heads, head, vocab.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

from torch import fx, ops

from autopar.axes import Axes, letter_names
from autopar.choices import fills, roles
from autopar.cost.compute import owns
from autopar.errors import InputError, PlanError, UnsupportedError
from autopar.graph import Graph, Input
from autopar.layout import MICRO, STAGE, Layout, Mesh
from autopar.plan import ParameterPlan, Plan
from autopar.planner.options import shard
from autopar.planner.stages import without_parameters
from autopar.planner.units import Restriction

OUTER = frozenset({"batch", "sequence"})
KEPT = frozenset({"batch", "sequence", "model", "head"})  # what megatron does not cut


@dataclass(frozen=True)
class Part:
    """What one mesh axis does.

    kind    "data" | "tensor" | "megatron" | "expert" | "stage" | "micro"
    level   data, stage: ZeRO level of the parameters along this axis; `keep`: level 3 gathers once a module
    sp      megatron: the sequence is cut between the products
    """

    kind: str
    axis: str
    size: int | None = None
    level: int = 0
    keep: bool | None = None
    sp: bool = False


@dataclass(frozen=True)
class Strategy:
    """A product of parts; `text` is how it was written."""

    parts: tuple[Part, ...]
    text: str

    def __post_init__(self) -> None:
        for part in self.parts:
            if part.size is not None and (type(part.size) is not int or part.size < 1):
                raise InputError(
                    f"{self.text}: {part.size!r} is no number of devices; give a whole number of at least 1, or "
                    "none for all that are left"
                )

    def __mul__(self, other: Strategy) -> Strategy:
        names = [p.axis for p in (*self.parts, *other.parts)]
        if len(set(names)) < len(names):
            raise PlanError(f"{self} * {other}: both rule the mesh axis {max(names, key=names.count)!r}")
        if STAGE in names and any(p.kind == "data" and p.level for p in (*self.parts, *other.parts)):
            raise PlanError(
                f"{self} * {other}: the stages of a pipeline store parameters in pieces already, and there is no ZeRO "
                "beside it yet\n  try: ddp, tensor or megatron in its place"
            )
        return Strategy(self.parts + other.parts, f"{self.text} * {other.text}")

    def __str__(self) -> str:
        return self.text

    def mesh(self, devices: int) -> Mesh:
        """One mesh axis a part; a part without a size takes the devices that are left."""
        given = math.prod(p.size for p in self.parts if p.size is not None and p.axis != MICRO)
        blank = [p for p in self.parts if p.size is None]
        left, rest = divmod(devices, given)
        if rest or (not blank and left != 1):
            raise PlanError(f"{self}: {given} devices do not make up the {devices} of the cluster")
        sizes = [p.size if p.size is not None else left if p is blank[0] else 1 for p in self.parts]
        return Mesh(tuple(p.axis for p in self.parts), tuple(sizes))

    def fits(self, mesh: Mesh) -> bool:
        """Whether a mesh has one axis for every part, of its size where that is told."""
        sizes = {part.axis: part.size for part in self.parts}
        return set(sizes) == set(mesh.names) and all(n in (None, mesh.size(axis)) for axis, n in sizes.items())

    def restriction(self, graph: Graph, axes: Axes, mesh: Mesh) -> Restriction:
        """What the planner may choose; refuses by name what the model cannot do."""
        self.check(graph, axes, mesh)
        rules = {part.axis: _op_rule(part, graph, axes, mesh) for part in self.parts}
        levels = {p.level for p in self.parts} | {0}
        return Restriction(
            ops=lambda node, axis, role: axis not in rules or rules[axis](node, role),
            parameters=lambda entry, way: self._keeps(entry, way, axes, mesh),
            levels=tuple(sorted(levels)),
            what=str(self),
        )

    def check(self, graph: Graph, axes: Axes, mesh: Mesh) -> None:
        """Refuse a batch or heads that leave a device without a piece."""
        for part in self.parts:
            size = mesh.size(part.axis)
            if part.kind in ("data", "stage", "micro", "expert"):
                continue
            for node in graph.fx.nodes:
                if node.target is not None and str(node.target).startswith("autopar.attention") and size > 1:
                    heads = node.args[1].meta["val"].shape[1]
                    if not fills(heads, size):
                        raise UnsupportedError(
                            f"{self}: {heads} KV heads cannot be cut over {size} devices, some would have none; "
                            f"use at most {max(n for n in range(1, size) if fills(heads, n))}" + _from(node)
                        )
        cutting = [p for p in self.parts if p.kind in ("data", "expert", "micro")]
        data = [mesh.size(p.axis) for p in cutting]
        for entry in graph.inputs:
            if entry.kind == "input" and axes.labels[entry.node, 0] and "batch" in axes.labels[entry.node, 0][0]:
                batch = axes.factors[entry.node, 0][0][axes.labels[entry.node, 0][0].index("batch")]
                rows = batch
                for size in data:
                    if not fills(rows, size):
                        over = "microbatches" if cutting[-1].kind == "micro" else "devices"
                        raise UnsupportedError(
                            f"{self}: a batch of {batch} ({entry.name}) cannot be cut over "
                            f"{' x '.join(map(str, data))} {over}, some would have none"
                        )
                    rows //= size

    def _keeps(self, entry: Input, way: ParameterPlan, axes: Axes, mesh: Mesh) -> bool:
        data = [p for p in self.parts if p.kind in ("data", "stage", "micro")]
        level = max((p.level for p in data), default=0)
        if not entry.trainable and level in (1, 2):
            level = 0
        names = [p.axis for p in data if p.level]
        base = _without(way.stored, names)
        if base is None or any(a in base.axes for a in (p.axis for p in data)):
            return False
        if not _inner(self.parts, base, axes.labels[entry.node, 0]):
            return False
        cut: Layout | None = base
        for name in names:
            cut = shard(cut, name, mesh) if cut is not None else None
        if cut is None or level == 0:
            return way.level == 0 and way.stored == base
        keep = next((p.keep for p in data if p.keep is not None), None)
        return way.level == level and way.stored == cut and (level < 3 or keep is None or way.keep == keep)

    def shows(self, plan: Plan) -> bool:
        """Whether a plan has a cut of every part's kind."""
        return all(_shows(part, plan) for part in self.parts if plan.mesh.size(part.axis) > 1)


# --- parts ------------------------------------------------------------------------------------------------------------


def ddp(n: int | None = None) -> Strategy:
    """Data parallel: the batch is cut, every device holds every parameter, gradients are summed."""
    return Strategy((Part("data", "data", n),), f"ddp({'' if n is None else n})")


def zero(level: int, n: int | None = None) -> Strategy:
    """Data parallel with optimizer state (1), gradients too (2), parameters too (3) stored in pieces."""
    if type(level) is not int or level not in (1, 2, 3):
        raise PlanError(f"zero({level}): the level is 1, 2 or 3")
    keep = False if level == 3 else None
    return Strategy((Part("data", "data", n, level, keep),), f"zero({level}{'' if n is None else f', {n}'})")


def fsdp(n: int | None = None, *, reshard: bool = True) -> Strategy:
    """ZeRO 3; without `reshard` a parameter gathered in forward is kept until its backward."""
    text = ", ".join(([] if n is None else [str(n)]) + ([] if reshard else ["reshard=False"]))
    return Strategy((Part("data", "data", n, 3, not reshard),), f"fsdp({text})")


def hsdp(replicate: int = 2, shard: int | None = None, *, reshard: bool = True) -> Strategy:
    """ZeRO 3 over groups of `shard` devices, with `replicate` copies of the whole."""
    text = ", ".join(
        [str(replicate)] + ([] if shard is None else [str(shard)]) + ([] if reshard else ["reshard=False"])
    )
    parts = (Part("data", "replicate", replicate), Part("data", "shard", shard, 3, not reshard))
    return Strategy(parts, f"hsdp({text})")


def tensor(n: int | None = None) -> Strategy:
    """Every product of matrices cut along a letter of its weight; nothing cut along batch or sequence."""
    return Strategy((Part("tensor", "model", n),), f"tensor({'' if n is None else n})")


def megatron(tp: int | None = None, *, sp: bool = False) -> Strategy:
    """Heads, hidden width and vocabulary cut; with `sp` the sequence where the residual stream is worked on."""
    text = ", ".join(([] if tp is None else [str(tp)]) + (["sp=True"] if sp else []))
    return Strategy((Part("megatron", "model", tp, sp=sp),), f"megatron({text})")


def expert(n: int | None = None) -> Strategy:
    """Expert parallel: the batch is cut, and inside expert layers the experts, to which the tokens travel."""
    return Strategy((Part("expert", "expert", n),), f"expert({'' if n is None else n})")


def pipeline(stages: int | None = None, *, microbatches: int = 2) -> Strategy:
    """Pipeline parallel (GPipe: Huang et al. 2019): forward of all microbatches through the stages, then backward."""
    if type(microbatches) is not int or microbatches < 1:
        raise InputError(f"pipeline: microbatches={microbatches!r} is no whole number of at least 1")
    parts = (Part("stage", STAGE, stages, level=1), Part("micro", MICRO, microbatches))
    return Strategy(parts, f"pipeline({'' if stages is None else f'{stages}, '}microbatches={microbatches})")


def staged(mesh: Mesh) -> Strategy | None:
    """What holds on a mesh whatever else is free: an axis of stages runs stages, one of microbatches microbatches."""
    if STAGE not in mesh.names:
        return None
    return pipeline(mesh.size(STAGE), microbatches=mesh.size(MICRO))


def microbatched(mesh: Mesh, graph: Graph, axes: Axes) -> Mesh:
    """The mesh for another call of a module: as many microbatches, at most those of the first, as the batch gives."""
    if MICRO not in mesh.names:
        return mesh
    for count in range(mesh.size(MICRO), 0, -1):
        fewer = Mesh(mesh.names, tuple(count if n == MICRO else s for n, s in zip(mesh.names, mesh.sizes, strict=True)))
        try:
            pipeline(mesh.size(STAGE), microbatches=count).check(graph, axes, fewer)
        except UnsupportedError:
            continue
        return fewer
    return mesh


# --- what a part allows -----------------------------------------------------------------------------------------------

OpRule = Callable[[fx.Node, str], bool]
Allows = Callable[[Part, list[str], dict[str, str], Axes, fx.Node], list[str]]


def _op_rule(part: Part, graph: Graph, axes: Axes, mesh: Mesh) -> OpRule:
    """Whether a role of an op is allowed along one axis."""
    size = mesh.size(part.axis)
    known: dict[str, frozenset[str]] = {}
    once = without_parameters(graph) if part.kind in ("data", "micro") else frozenset[str]()
    kinds: dict[str, Allows] = {"tensor": _tensor, "megatron": _megatron, "expert": _expert, "stage": _stage}
    kinds |= {"data": partial(_data_or_whole, once), "micro": partial(_micro, once)}
    allows = kinds[part.kind]

    def allowed(node: fx.Node, role: str) -> bool:
        if node.meta.get("stored"):  # the last cast of a gradient, of a piece or of the whole
            return True
        if node.name not in known:
            free = list(roles(axes.rule(node), size, node))
            known[node.name] = frozenset(allows(part, free, letter_names(axes, node), axes, node))
        return role in known[node.name]

    return allowed


def _passing(free: list[str]) -> list[str]:
    return [r for r in free if not r or r.startswith("+")]


def _named(free: list[str], names: dict[str, str], wanted: Callable[[str], bool]) -> list[str]:
    return [r for r in free if r and not r.startswith("+") and wanted(names.get(r, ""))]


def _data(part: Part, free: list[str], names: dict[str, str], axes: Axes, node: fx.Node) -> list[str]:
    return _named(free, names, lambda n: n == "batch") or _passing(free)


def _data_or_whole(
    once: frozenset[str], part: Part, free: list[str], names: dict[str, str], axes: Axes, node: fx.Node
) -> list[str]:
    """The batch; what no parameter goes into may run whole too: a number of labels is counted sooner than added up."""
    cut = _data(part, free, names, axes, node)
    spare = node.name in once and axes.rule(node).flops is None
    return [*cut, ""] if spare and "" in free else cut


def _stage(part: Part, free: list[str], names: dict[str, str], axes: Axes, node: fx.Node) -> list[str]:
    """An op runs whole, in its stage."""
    return [""]


def _micro(
    once: frozenset[str], part: Part, free: list[str], names: dict[str, str], axes: Axes, node: fx.Node
) -> list[str]:
    """The batch, except of what no parameter goes into: the number of valid labels is that of the whole batch."""
    return [""] if node.name in once else _data(part, free, names, axes, node)


def _expert(part: Part, free: list[str], names: dict[str, str], axes: Axes, node: fx.Node) -> list[str]:
    """Rows are made and taken back where their tokens are."""
    at_tokens = node.target in (ops.autopar.to_experts.default, ops.autopar.to_tokens.default)
    inner = [] if at_tokens else _named(free, names, lambda n: n == "experts")
    return inner or _data(part, free, names, axes, node)


def _tensor(part: Part, free: list[str], names: dict[str, str], axes: Axes, node: fx.Node) -> list[str]:
    inner = _named(free, names, lambda n: n not in OUTER)
    if axes.rule(node).flops is not None:
        return inner or _passing(free)
    return inner + _passing(free)


def _megatron(part: Part, free: list[str], names: dict[str, str], axes: Axes, node: fx.Node) -> list[str]:
    inner = _named(free, names, lambda n: n not in KEPT)
    sequence = _named(free, names, lambda n: n == "sequence") if part.sp else []
    if axes.rule(node).flops is not None:
        return inner or _passing(free)
    here = set(names.values())
    kept = owns(node) or node.meta["phase"] == "forward"  # what backward reads again is kept cut, as Megatron does
    if {"model", "sequence"} <= here and not inner and kept and sequence:
        return [*sequence, *(role for role in free if role.count("+") > 1)]  # terms may be added up before they move
    return inner + _passing(free) + sequence


# --- parameters -------------------------------------------------------------------------------------------------------


def _without(layout: Layout, names: list[str]) -> Layout | None:
    """The layout before it was cut further by some axes; None where another cut came after theirs."""
    for place, _, cut in layout.places():
        kept = tuple(a for a in cut if a not in names)
        if cut[: len(kept)] != kept:
            return None
        layout = layout.with_cut(place, kept)
    return layout


def _inner(parts: tuple[Part, ...], base: Layout, labels: tuple[tuple[str, ...], ...]) -> bool:
    """Whether the axes of tensor parts cut only what those parts cut."""
    kept = {p.axis: KEPT if p.kind == "megatron" else OUTER for p in parts if p.kind in ("megatron", "tensor")}
    experts = {p.axis for p in parts if p.kind == "expert"}
    for (dim, factor), _, cut in base.places():
        if any(labels[dim][factor] in kept.get(a, frozenset()) for a in cut):
            return False
        if experts & set(cut) and labels[dim][factor] != "experts":
            return False
    return True


def _shows(part: Part, plan: Plan) -> bool:
    position = plan.mesh.names.index(part.axis)
    if part.kind == "stage":
        return len(set(plan.stages.values())) == plan.mesh.size(part.axis)
    cuts = any(roles[position] and not roles[position].startswith("+") for roles in plan.ops.values())
    ways = plan.parameters.values()
    if part.kind in ("data", "micro"):
        stored = any(w.level == part.level and part.axis in w.stored.axes for w in ways)
        return stored if part.level else cuts
    return cuts and any(part.axis in w.stored.axes for w in ways)


def _from(node: fx.Node) -> str:
    return f"\n  from {node.meta['source']}" if node.meta.get("source") else ""


def product(*parts: Strategy) -> Strategy:
    """The product of several strategies."""
    return reduce(lambda a, b: a * b, parts)


__all__ = ["Strategy", "ddp", "expert", "fsdp", "hsdp", "megatron", "pipeline", "product", "tensor", "zero"]
