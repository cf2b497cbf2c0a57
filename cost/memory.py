"""Bytes on one device: what stays, and what is alive at every point of a step.

In: an emitted `Program`, the optimizer's state.  Out: `Memory`, with the tensors alive at the peak.  Next: `price.py`.

Sizes are those of the first device, which holds the largest piece of everything. A value lives from the node that makes
it to the last node that reads it or a view of it; forward's results and gradients live to the end of the step.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.cost.compute import owns
from autopar.cost.staging import copies_slice, staging_elements
from autopar.errors import PlanError
from autopar.layout import Layout, Mesh
from autopar.passes.markers import slice as slice_marker
from autopar.program import Program

STATE_COPIES: Mapping[str, float] = {
    "AdamW": 2, "Adam": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "SGD": 1, "Adagrad": 1, "RMSprop": 1, "ASGD": 2,
    "Adadelta": 2, "Rprop": 2,
}  # fmt: skip
"""Tensors of the parameter's size and dtype in the state of an optimizer (SGD: with momentum)."""


def state_copies(optimizer: Any) -> float:
    """Parameter-sized tensors in the state of an optimizer: a class, or the number itself."""
    if isinstance(optimizer, (int, float)):
        return float(optimizer)
    name = getattr(optimizer, "__name__", str(optimizer))
    if name not in STATE_COPIES:
        raise PlanError(
            f"the state of the optimizer {name} is not known; give optimizer=N, the number of tensors of the "
            f"parameter's size in its state (AdamW: 2, SGD with momentum: 1)"
        )
    return STATE_COPIES[name]


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
    timeline    bytes alive beside those, node by node
    alive       what is alive at the peak, largest first
    """

    persistent: Mapping[str, int]
    timeline: tuple[Point, ...]
    alive: tuple[Alive, ...]

    @property
    def peak(self) -> int:
        return sum(self.persistent.values()) + max((p.bytes for p in self.timeline), default=0)

    @property
    def worst(self) -> Point | None:
        return max(self.timeline, key=lambda p: p.bytes, default=None)


def size_of(layout: Layout, dtype: torch.dtype, mesh: Mesh) -> int:
    """Bytes of the largest piece."""
    return layout.local_numel(mesh) * dtype.itemsize


def memory(program: Program, optimizer: Any) -> Memory:
    """Everything one device holds in a step of `program`."""
    lives = _Lives(program)
    return Memory(persistent_bytes(program, state_copies(optimizer)), lives.timeline(), lives.at_peak())


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
                out["copies"] += size_of(kept.home, val.dtype, mesh)
            elif dtype.itemsize != val.dtype.itemsize:
                out["copies"] += size_of(kept.stored, val.dtype, mesh)
        else:
            kind = "buffers" if entry.kind == "buffer" else "inputs"
            out[kind] += size_of(program.input_layouts[entry.node], val.dtype, mesh)
    out["constants"] = sum(t.numel() * t.dtype.itemsize for t in graph.attributes.values())
    return out


Storage = tuple[str, str, int]  # phase, node, result


class _Lives:
    """Life of every storage over the two graphs, nodes counted through."""

    def __init__(self, program: Program) -> None:
        self.mesh = program.plan.mesh
        self.bytes: dict[Storage, int] = {}
        self.source: dict[Storage, str] = {}
        self.first: dict[Storage, int] = {}
        self.last: dict[Storage, int] = {}
        self.names: list[tuple[str, str]] = []
        self.held: dict[str, list[Storage]] = {}
        count = len(program.graph.outputs)
        ends = sum("gradient" not in o.kind for o in program.graph.outputs)
        self.forever: list[Storage] = []
        results = self.run(program.forward, "forward", {})
        assert count >= ends
        self.forever += [s for r in results[:ends] for s in r]
        saved = dict(zip(program.saved, results[ends:], strict=True))
        self.forever += [s for r in self.run(program.backward, "backward", saved) for s in r]
        for storage in self.forever:
            self.last[storage] = len(self.names)

    def run(self, graph: fx.Graph, phase: str, given: Mapping[str, list[Storage]]) -> list[list[Storage]]:
        """Walk one graph; the storages of its results."""
        mine: dict[fx.Node, list[Storage]] = {}
        for node in graph.nodes:
            now = len(self.names)
            if node.op == "placeholder":
                mine[node] = given.get(node.name, [])
                continue
            if node.op == "output":
                return [mine[r] if r is not None else [] for r in node.args[0]]
            for operand in node.all_input_nodes:
                for storage in mine[operand]:
                    self.last[storage] = max(self.last[storage], now)
            mine[node] = self.made(node, phase, now, mine)
            self.names.append((node.name, phase))
        return []

    def made(self, node: fx.Node, phase: str, now: int, mine: dict[fx.Node, list[Storage]]) -> list[Storage]:
        if node.op == "get_attr":
            return []
        if node.target is operator.getitem:
            found = mine[node.args[0]]  # type: ignore[index]
            return [s for s in found if s[2] == node.args[1]] or found[:0]
        if (node.target is slice_marker and not copies_slice(node.meta["step"], self.mesh)) or (
            "step" not in node.meta and not owns(node)
        ):
            return mine[node.args[0]] if isinstance(node.args[0], fx.Node) else []
        val = node.meta.get("val")
        tensors = list(val) if isinstance(val, (list, tuple)) else [val]
        out = []
        for i, (tensor, layout) in enumerate(zip(tensors, node.meta.get("layouts", ()), strict=False)):
            if isinstance(tensor, torch.Tensor):
                storage = (phase, node.name, i)
                self.bytes[storage] = size_of(layout, tensor.dtype, self.mesh)
                self.source[storage] = node.meta.get("source", "")
                self.first[storage] = self.last[storage] = now
                out.append(storage)
        self.stage(node, phase, now)
        return out

    def stage(self, node: fx.Node, phase: str, now: int) -> None:
        """The buffers of a collective, alive while it runs."""
        if "step" not in node.meta:
            return
        elements = staging_elements(node.meta["step"], self.mesh)
        storage = (phase, f"{node.name} in flight", 0)
        self.bytes[storage] = elements * node.meta["val"].dtype.itemsize
        self.source[storage] = node.meta.get("source", "")
        self.first[storage] = self.last[storage] = now

    def timeline(self) -> tuple[Point, ...]:
        change = [0] * (len(self.names) + 2)
        for storage, size in self.bytes.items():
            change[self.first[storage]] += size
            change[self.last[storage] + 1] -= size
        points, live = [], 0
        for i, (name, phase) in enumerate(self.names):
            live += change[i]
            points.append(Point(name, phase, live))
        return tuple(points)

    def at_peak(self) -> tuple[Alive, ...]:
        points = self.timeline()
        at = max(range(len(points)), key=lambda i: points[i].bytes, default=0)
        alive = [s for s in self.bytes if self.first[s] <= at <= self.last[s]]
        listed = [Alive(s[1], self.bytes[s], self.source[s]) for s in alive]
        return tuple(sorted(listed, key=lambda a: (-a.bytes, a.name)))
