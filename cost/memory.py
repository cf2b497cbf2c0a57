"""Bytes on one device: what stays, and what is alive at every point of a step.

In: an emitted `Program`, the optimizer's state.  Out: `Memory`, with the tensors alive at the peak.  Next: `price.py`.

Sizes are those of the first device, which holds the largest piece of everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.cost.lives import Life, Lives, size_of
from autopar.cost.optimizer import state_copies
from autopar.cost.staging import chain
from autopar.layout import conversion
from autopar.program import Program


@dataclass(frozen=True)
class Alive:
    """A tensor that is alive at the peak."""

    name: str
    bytes: int
    source: str = ""


@dataclass(frozen=True)
class Point:
    """Bytes alive while one node runs."""

    node: str
    phase: str
    bytes: int


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    persistent  by kind: parameters, copies, optimizer, buffers, inputs, constants
    timeline    bytes alive beside those, node by node; a collective has a point for every buffer on its way
    alive       what is alive at the peak, largest first
    saved       what forward keeps for backward, largest first
    casts       bytes of shards cast to the dtype that a step computes in, part of the timeline's: from forward to their
                last use
    gradients   bytes of the parameters' gradients at the end of the step, part of the timeline's too
    """

    persistent: Mapping[str, int]
    timeline: tuple[Point, ...]
    alive: tuple[Alive, ...]
    saved: tuple[Alive, ...] = ()
    casts: int = 0
    gradients: int = 0

    @property
    def peak(self) -> int:
        return sum(self.persistent.values()) + max((p.bytes for p in self.timeline), default=0)

    @property
    def worst(self) -> Point | None:
        return max(self.timeline, key=lambda p: p.bytes, default=None)


def memory(program: Program, optimizer: Any) -> Memory:
    """Everything one device holds in a step of `program`."""
    lives = Lives(program)
    bytes_ = lives.bytes_at()
    at = max(range(len(bytes_)), key=bytes_.__getitem__, default=0)
    return Memory(
        persistent=persistent_bytes(program, state_copies(optimizer)),
        timeline=tuple(Point(name, phase, size) for (name, phase), size in zip(lives.points, bytes_, strict=True)),
        alive=listed(x for x in lives.lives if x.first <= at <= x.last),
        saved=listed(lives.saved),
        casts=sum(x.bytes for x in lives.casts),
        gradients=sum(x.bytes for x in lives.gradients),
    )


def listed(lives: Iterable[Life]) -> tuple[Alive, ...]:
    """Storages by name, the largest first."""
    return tuple(sorted((Alive(x.name, x.bytes, x.source) for x in lives), key=lambda a: (-a.bytes, a.name)))


def persistent_bytes(program: Program, copies: float) -> dict[str, int]:
    """Bytes that stay from step to step, by kind, and the inputs that the caller holds."""
    graph, mesh = program.graph, program.plan.mesh
    out = dict.fromkeys(("parameters", "copies", "optimizer", "buffers", "inputs", "constants"), 0)
    for entry in graph.inputs:
        val = graph.node(entry.node).meta["val"]
        if entry.kind == "parameter":
            kept = program.plan.parameters[entry.name]
            dtype = graph.stored_dtype(entry)
            stored = size_of(kept.stored, dtype, mesh)
            out["parameters"] += stored
            out["optimizer"] += int(copies * stored) if entry.trainable else 0
            if kept.level in (1, 2):
                gathered = conversion(kept.stored, kept.home, mesh)
                assert gathered, f"{entry.name}: {kept.stored} is gathered to {kept.home}"
                out["copies"] += chain(gathered[-1], mesh)[-1] * val.dtype.itemsize
        else:
            kind = "buffers" if entry.kind == "buffer" else "inputs"
            out[kind] += size_of(program.input_layouts[entry.node], val.dtype, mesh)
    out["constants"] = sum(t.numel() * t.dtype.itemsize for t in graph.attributes.values())
    return out
