"""Make a program one device's own: sizes, positions, process groups, device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, ops

from autopar._torch import boxed
from autopar.device import SERIAL
from autopar.layout import MICRO, STAGE, Mesh
from autopar.passes.buckets import Bucket, buckets
from autopar.passes.fill_buckets import Filling
from autopar.passes.fuse_bias import fuse_bias
from autopar.passes.gate import Gate, insert_gate
from autopar.passes.in_place import alone
from autopar.passes.lower import Lowering
from autopar.passes.lower_rows import lower_rows
from autopar.passes.markers import SPANS, span_start
from autopar.passes.sink_waits import sink_waits
from autopar.program import Program
from autopar.rules.bind import Site, run_of, sizes_of
from autopar.rules.core import RULES, args_of, operands
from autopar.rules.pointwise import is_pointwise
from autopar.uncollected import uncollected

aten = ops.aten


@dataclass(frozen=True)
class Bound:
    """What one rank runs; see `Program` for the order of arguments and results, which each takes as one list.

    gate   what forward waits at before its first collective
    """

    refresh: fx.GraphModule
    forward: fx.GraphModule
    backward: fx.GraphModule
    gate: Gate = field(default_factory=Gate)

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        return self.forward.graph, self.backward.graph


@uncollected()
def bind(
    program: Program, coordinate: Mapping[str, int], groups: Mapping[str, str], device: torch.device | str = "cpu"
) -> Bound:
    """Make `program` the own program of the device at `coordinate`.

        %h : f32[b=7@data, f=20] = view(%x, [7, 20])
        %g : f32[b=7, f=20]      = all_gather(%h, data)
    becomes, on the second of two devices
        %h = reshape(%x, [3, 20])
        %p = constant_pad_nd(%h, [0, 0, 0, 1]);  %a = all_gather_into_tensor(%p, 2, "group of data")
        %w = wait_tensor(%a);  %g = slice(%w, 0, 0, 7)

    `groups` maps mesh axes to names of process groups, `device` is where factory ops put their results.
    """
    binder = _Binder(program, dict(coordinate), groups, torch.device(device))
    gate = Gate()
    return Bound(binder.run(program.refresh), binder.run(program.forward, gate), binder.run(program.backward), gate)


@uncollected()
def lowered(program: Program, coordinate: Mapping[str, int], groups: Mapping[str, str]) -> tuple[fx.Graph, fx.Graph]:
    """Forward and backward as `bind` makes them, on CPU, not yet compiled to Python."""
    binder = _Binder(program, dict(coordinate), groups, torch.device("cpu"))
    return binder.lowered(program.forward), binder.lowered(program.backward)


@dataclass(frozen=True)
class BoundStage:
    """What one rank of a pipeline runs: a body for every microbatch, an end for all of them."""

    refresh: fx.GraphModule
    forward: tuple[fx.GraphModule, ...]
    forward_end: fx.GraphModule
    backward: tuple[fx.GraphModule, ...]
    backward_end: fx.GraphModule

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        parts = (*self.forward, self.forward_end, *self.backward, self.backward_end)
        return tuple(part.graph for part in parts)


@uncollected()
def bind_stage(
    program: Program, coordinate: Mapping[str, int], groups: Mapping[str, str], device: torch.device | str = "cpu"
) -> BoundStage:
    """As `bind`, for one rank of a pipeline: microbatches are positions on an axis, and perhaps of different sizes."""
    assert program.pipeline is not None, "the program has no stages"
    stage = coordinate[STAGE]
    at = [
        _Binder(program, {**coordinate, MICRO: index}, groups, torch.device(device))
        for index in range(program.plan.mesh.size(MICRO))
    ]
    forward, backward = program.pipeline.forward, program.pipeline.backward
    return BoundStage(
        at[0].run(program.refresh),
        tuple(binder.run(forward.bodies[stage].graph) for binder in at),
        at[0].run(forward.ends[stage].graph),
        tuple(binder.run(backward.bodies[stage].graph) for binder in at),
        at[0].run(backward.ends[stage].graph),
    )


def is_vector(node: fx.Node) -> bool:
    return bool(node.meta["val"].dim() == 1)


def is_complex(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_complex())


def foreign(target: Any) -> bool:
    """Whether an op is a user's own, whose kernel may want its operands contiguous."""
    return target.namespace not in ("aten", "autopar")


def dense(x: fx.Node) -> fx.Node:
    """Contiguous, as any kernel takes it: what the model did to make it so went in capture."""
    return x.graph.call_function(aten.contiguous.default, (x,))


@dataclass(frozen=True)
class _Binder:
    program: Program
    coordinate: dict[str, int]
    groups: Mapping[str, str]
    device: torch.device

    @property
    def mesh(self) -> Mesh:
        return self.program.plan.mesh

    def run(self, graph: fx.Graph, gate: Gate | None = None) -> fx.GraphModule:
        fresh = self.lowered(graph)
        if gate is not None:
            insert_gate(fresh, gate)
        return fx.GraphModule(self.attributes(fresh), boxed(fresh))

    def lowered(self, graph: fx.Graph) -> fx.Graph:
        fresh = fx.Graph()
        lowering = Lowering(fresh, self.mesh, self.coordinate, self.groups, self.device.type == SERIAL)
        env: dict[fx.Node, Any] = {}
        groups = buckets(graph, self.program.plan)
        filling = Filling(lowering, self.device, [group for group in groups if group.in_place])
        copied = [group for group in groups if not group.in_place]
        grouped = {node for group in copied for node in group.nodes}
        for node in graph.nodes:
            if node in grouped:
                self.run_buckets(copied, node, lowering, env)
            elif node in filling.owners:
                filling.put(node, env[args_of(node)[0]])
                if filling.owners[node].place is node:
                    env.update(filling.reduced(filling.owners[node]))
            elif "step" in node.meta:
                env[node] = self.step(node, lowering, env)
            elif node.target in SPANS:
                layout, dim = node.meta["span"]
                start, length = run_of(layout, dim, self.mesh, self.coordinate)
                env[node] = start if node.target is span_start else length
            elif node.op == "call_function":
                env[node] = filling.write(node, self.call(fresh, node, env))
            else:
                env[node] = fresh.node_copy(node, env.__getitem__)
        for old, new in env.items():
            if isinstance(new, fx.Node) and "origin" not in new.meta:
                new.meta["origin"] = old.name
        fresh.eliminate_dead_code()
        fuse_bias(fresh)
        if self.device.type != SERIAL:
            sink_waits(fresh, in_flight=1 if self.program.plan.bucket_bytes else 0)
        return fresh

    def step(self, node: fx.Node, lowering: Lowering, env: dict[fx.Node, Any]) -> fx.Node:
        """A step of a conversion; rows of expert layers have a way of their own."""
        x, step = env[args_of(node)[0]], node.meta["step"]
        if step.before.rows is not None:
            index = node.kwargs.get("index")
            return lower_rows(lowering, x, step, env[index] if isinstance(index, fx.Node) else None)
        return lowering.step(x, step, is_complex(node), alone(args_of(node)[0]))

    def run_buckets(self, groups: list[Bucket], node: fx.Node, lowering: Lowering, env: dict[fx.Node, Any]) -> None:
        """At a bucket's place, run it, and after an early one the next early one, so that it arrives in time."""
        here = next((i for i, group in enumerate(groups) if group.place is node), None)
        if here is None:
            return
        ahead = next((g for g in groups[here + 1 :] if g.early), None) if groups[here].early else None
        for group in (groups[here], ahead):
            if group is not None and group.nodes[0] not in env:
                xs = [env[args_of(n)[0]] for n in group.nodes]
                steps = [n.meta["step"] for n in group.nodes]
                env.update(zip(group.nodes, lowering.steps(xs, steps, is_complex(group.nodes[0])), strict=True))

    def attributes(self, graph: fx.Graph) -> dict[str, Any]:
        """The constants that a graph reads, on the device."""
        names = [n.target for n in graph.nodes if n.op == "get_attr"]
        return {name: self.program.graph.attributes[name].to(self.device) for name in names}

    def call(self, fresh: fx.Graph, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        target: Any = node.target
        kwargs = dict(kwargs)
        entry = RULES.get(target)
        if entry is not None and entry.bind is not None:
            target, args, kwargs = entry.bind(self.site(node, args))
        elif entry is not None and entry.shape is not None:
            shape = sizes_of(node.meta["layouts"][0], self.mesh, self.coordinate)
            args = (*args[: entry.shape], shape, *args[entry.shape + 1 :])
        if "device" in kwargs:
            kwargs["device"] = self.device
        if hasattr(target, "_schema") and (foreign(target) or (entry is None and not is_pointwise(node))):
            args, kwargs = fx.node.map_arg((args, kwargs), dense)
        new = fresh.call_function(target, tuple(args), kwargs)
        new.meta = {k: node.meta[k] for k in ("phase", "module", "source", "origin") if k in node.meta}
        new.meta["vector"] = target is aten.add.Tensor and len(operands(node)) == 2 and is_vector(operands(node)[1])
        return new

    def site(self, node: fx.Node, args: Any) -> Site:
        choice = node.meta.get("choice")
        reads = choice.inputs if choice else tuple(o.meta["layouts"][0] for o in operands(node))
        return Site(node, tuple(args), reads, node.meta["layouts"], self.mesh, self.coordinate)
