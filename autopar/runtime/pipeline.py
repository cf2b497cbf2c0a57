"""One pipelined program on one rank: a schedule of microbatches, run by a small interpreter.

In: a program cut into stages, bound to this rank.  Out: `PipelineStep`, which stands where a `Step` does.
Next: `engine.py`.

A forward that will be differentiated runs the whole schedule, backward of every microbatch too; `loss.backward()` then
hands over the gradients times the gradient that comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar._torch import below_autograd
from autopar.errors import UnsupportedError
from autopar.layout import MICRO, STAGE, Layout, Mesh
from autopar.layout import Step as Conversion
from autopar.passes import BoundStage
from autopar.placements import piece
from autopar.program import Cell, Phase, Pipeline, Result, Send, Settled
from autopar.runtime.owned import Owned
from autopar.runtime.step import Frame, Step

TOGETHER: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True)
class Action:
    """What a stage does next: "forward" or "backward" of one microbatch, or "end": what all of them became."""

    kind: str
    phase: str
    micro: int = 0


def gpipe(microbatches: int, differentiate: bool) -> Iterator[Action]:
    """Forward of all microbatches, then backward of all (Huang et al. 2019); the same for every stage."""
    for phase in ("forward", "backward") if differentiate else ("forward",):
        for micro in range(microbatches):
            yield Action("body", phase, micro)
        yield Action("end", phase)


@dataclass
class PipelineStep(Step):
    """A pipelined program ready to run on this rank."""

    @cached_property
    def pipeline(self) -> Pipeline:
        assert self.program.pipeline is not None
        return self.program.pipeline

    @cached_property
    def names_of_tangents(self) -> frozenset[str]:
        return frozenset(entry.name for entry in self.tangents)

    def forward(
        self, frame: Frame, buffers: dict[str, Tensor], differentiate: bool
    ) -> tuple[tuple[Any, ...], list[Any]]:
        """Run the schedule: (what the user gets, the gradients of the loss)."""
        if differentiate and any(head.kind != "loss" and head.name in self.names_of_tangents for head in self.heads):
            raise UnsupportedError(
                "a pipeline runs backward by itself, but the model returns no loss here\n"
                "  try: loss_fn=, torch.no_grad() for evaluation, or a strategy without a pipeline"
            )
        values = dict(zip(self.program.forward_inputs, frame.values, strict=True))
        frame.values.clear()
        for loss in self.tangents:
            val = self.program.graph.nodes[loss.node].meta["val"]
            values[loss.node] = torch.ones(val.shape, dtype=val.dtype, device=self.place.device)
        run = _Run(self, values, last="backward" if differentiate else "forward")
        for action in gpipe(self.program.plan.mesh.size(MICRO), differentiate):
            run.act(action)
        run.finish()
        return self.handed_out(run.results["forward"], buffers), list(run.results.get("backward", ()))

    def backward(self, saved: list[Any], incoming: Sequence[Any], owned: Owned) -> list[Any]:
        """The gradients, times the one that comes in for the loss."""
        self.refuse_foreign(incoming)
        names = [head.name for head in self.heads]
        given = incoming[names.index(self.tangents[0].name)]
        if given is None:
            return [None] * len(saved)
        return [self.gradient(i, None if v is None else v * given, owned) for i, v in enumerate(saved)]


@dataclass
class _Run:
    """One pass through the schedule.

    given     what the call brought, by the names of the program's inputs
    last      the phase after which a microbatch is forgotten
    values    what is known of each microbatch
    settled   what is known of all of them together
    """

    step: PipelineStep
    given: Mapping[str, Tensor]
    last: str
    values: list[dict[str, Tensor]] = field(default_factory=list)
    settled: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    results: dict[str, list[Tensor | None]] = field(default_factory=dict)
    going: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.values = [{} for _ in range(self.mesh.size(MICRO))]
        self.stage = self.step.place.coordinate[STAGE]
        self.group = self.step.place.device_mesh.get_group(STAGE)

    @property
    def mesh(self) -> Mesh:
        return self.step.program.plan.mesh

    def act(self, action: Action) -> None:
        phase: Phase = getattr(self.step.pipeline, action.phase)
        bound = self.step.bound
        assert isinstance(bound, BoundStage)
        if action.kind == "body":
            graphs = bound.forward if action.phase == "forward" else bound.backward
            self.body(phase, graphs[action.micro], action.micro)
            if action.phase == self.last and action.micro + 1 < len(self.values):  # the end may read of the last one
                self.values[action.micro].clear()
        else:
            self.end(phase, bound.forward_end if action.phase == "forward" else bound.backward_end)
            self.results[action.phase] = [None if r is None else self.result(r) for r in phase.results]

    def body(self, phase: Phase, graph: fx.GraphModule, micro: int) -> None:
        """One microbatch through this stage."""
        for send in phase.sends:
            if send.target == self.stage:
                self.values[micro][send.name] = self.receive(send, micro)
        self.run(phase.bodies[self.stage], graph, micro)
        for send in phase.sends:
            if send.source == self.stage:
                self.send(self.values[micro][send.name], send.target)
        for entry in phase.settled[self.stage]:
            self.collect(entry, self.values[micro][entry.of])

    def end(self, phase: Phase, graph: fx.GraphModule) -> None:
        """What this stage makes of all microbatches."""
        for entry in phase.settled[self.stage]:
            parts = self.parts.pop(entry.name)
            gathered = entry.step.kind == "all_gather"
            here = self.step.place.coordinate
            self.settled[entry.name] = side_by_side(parts, entry.step, self.mesh, here) if gathered else parts[0]
        self.run(phase.ends[self.stage], graph, None)

    def run(self, cell: Cell, graph: fx.GraphModule, micro: int | None) -> None:
        taken = [self.find(name, micro) for name in cell.takes]
        with below_autograd(self.step.plain):
            given = graph(taken)
        (self.settled if micro is None else self.values[micro]).update(zip(cell.gives, given, strict=True))

    def find(self, name: str, micro: int | None) -> Tensor:
        """A value by name: of a microbatch, or of all together (where that is the same in all, of the last)."""
        if name in self.given:
            return self.given[name]
        if micro is None:
            return self.settled[name] if name in self.settled else self.values[-1][name]
        return self.values[micro][name]

    def collect(self, entry: Settled, value: Tensor) -> None:
        """Take in one microbatch's term or piece."""
        parts = self.parts.setdefault(entry.name, [])
        if entry.step.kind == "all_gather" or not parts:
            parts.append(value)
        else:
            parts[0] = TOGETHER[dict(entry.step.before.pending)[MICRO]](parts[0], value)

    # --- between stages ---

    def rank(self, stage: int) -> int:
        return dist.get_global_rank(self.group, stage)

    def send(self, value: Tensor, stage: int) -> None:
        sent = wire(value.contiguous())
        work = dist.isend(sent, self.rank(stage), group=self.group)
        assert work is not None
        self.going = [(w, tensor) for w, tensor in self.going if not w.is_completed()] + [(work, sent)]

    def receive(self, send: Send, micro: int) -> Tensor:
        pipeline = self.step.pipeline
        shape = pipeline.layouts[send.name].local_shape(self.mesh, {**self.step.place.coordinate, MICRO: micro})
        return self.received(shape, pipeline.dtypes[send.name], send.source)

    def received(self, shape: tuple[int, ...], dtype: torch.dtype, stage: int) -> Tensor:
        value = torch.empty(shape, dtype=dtype, device=self.step.place.device)
        dist.recv(wire(value), self.rank(stage), group=self.group)
        return value

    def result(self, result: Result) -> Tensor:
        """A result on every stage: whole, or this stage's piece."""
        pipeline, coordinate = self.step.pipeline, dict(self.step.place.coordinate)
        layout, dtype = pipeline.layouts[result.name], pipeline.dtypes[result.name]
        mine = result.stage == self.stage
        value = self.find(result.name, None) if mine else None
        if result.step is None:
            shape = layout.local_shape(self.mesh, {**coordinate, MICRO: 0})
            device = self.step.place.device
            whole = torch.empty(shape, dtype=dtype, device=device) if value is None else value.contiguous()
            dist.broadcast(wire(whole), self.rank(result.stage), group=self.group)
            return whole
        part = along_stages(result.step, self.mesh, {**coordinate, MICRO: 0})
        if value is None:
            return self.received(part.local_shape(self.mesh, {STAGE: self.stage}), dtype, result.stage)
        pieces = [piece(value, part, self.mesh, {STAGE: stage}) for stage in range(self.mesh.size(STAGE))]
        for stage, sent in enumerate(pieces):
            if stage != self.stage:
                self.send(sent, stage)
        return pieces[self.stage]

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for work, _ in self.going:
            work.wait()


def wire(value: Tensor) -> Tensor:
    """The same memory in a dtype that every backend sends."""
    if value.is_complex():
        return torch.view_as_real(value)
    return value.view(torch.uint8) if value.dtype == torch.bool else value


def along_stages(step: Conversion, mesh: Mesh, coordinate: dict[str, int]) -> Layout:
    """How what a stage holds is cut into the pieces that the stages store."""
    place = step.after.where(STAGE)
    assert isinstance(place, tuple)
    return Layout.whole(step.before.local_factors(mesh, coordinate)).with_cut(place, (STAGE,))


def side_by_side(parts: Sequence[Tensor], step: Conversion, mesh: Mesh, coordinate: Mapping[str, int]) -> Tensor:
    """The whole of what the microbatches hold pieces of."""
    place = step.before.where(MICRO)
    assert isinstance(place, tuple)
    dim, factor = place
    views = []
    for micro, part in enumerate(parts):
        sizes = step.before.local_factors(mesh, {**coordinate, MICRO: micro})[dim]
        views.append(part.reshape([*part.shape[:dim], *sizes, *part.shape[dim + 1 :]]))
    return torch.cat(views, dim + factor).flatten(dim, dim + len(step.before.factors[dim]) - 1)
