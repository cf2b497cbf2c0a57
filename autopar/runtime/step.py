"""One program on one rank: forward and backward inside one autograd function.

In: a bound program, where its arguments come from.  Out: `Step`, called with a frame of tensors.  Next: `module.py`.

The forward program gets plain local tensors and gives plain local tensors; only here do they become DTensors, losses
with a `grad_fn`, and gradients that autograd adds to `.grad`. What backward needs is kept in a list that backward
empties, so that a saved value dies after its last use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch import (
    backward_keeps_graph,
    below_autograd,
    local_of,
    plain_ops,
    spec_of,
    version_of,
    with_spec,
)
from autopar.errors import UnsupportedError
from autopar.graph import Input, Output
from autopar.layout import Layout, Mesh
from autopar.passes import Bound, BoundStage
from autopar.placements import distribute, placeable, placements, together
from autopar.program import Program
from autopar.runtime.owned import Owned, storage
from autopar.tree import unflatten


@dataclass(frozen=True)
class Place:
    """This rank's position: the mesh of names, the same as torch knows it, and the coordinate on it."""

    mesh: Mesh
    device_mesh: DeviceMesh
    coordinate: Mapping[str, int]
    device: torch.device

    def hand_out(self, local: Tensor, layout: Layout) -> DTensor:
        """A piece as the user gets it: a DTensor; whole where DTensor has no placements for the layout."""
        if placeable(layout, self.mesh):
            return distribute(local, layout, self.mesh, self.device_mesh)
        return distribute(together(local, layout, self.mesh), Layout.whole(layout.factors), self.mesh, self.device_mesh)

    def take_in(self, gradient: Any, layout: Layout, dtype: torch.dtype) -> Tensor:
        """The piece of a gradient that comes in (a DTensor in any layout, a whole tensor, or None for zero)."""
        if gradient is None:
            shape = layout.local_shape(self.mesh, dict(self.coordinate))
            return torch.zeros(shape, dtype=dtype, device=self.device)
        if isinstance(gradient, DTensor):
            gradient = local_of(gradient.redistribute(placements=placements(layout, self.mesh)))
        return gradient.to(dtype)  # type: ignore[no-any-return]


@dataclass
class Frame:
    """The tensors of one call.

    values          arguments of the forward program; emptied by it
    gradients_for   which result of the backward program belongs to each differentiable tensor
    agree           raises, on all ranks, if they do not make the same call; None where that is known
    """

    values: list[Tensor]
    gradients_for: tuple[int, ...] = ()
    agree: Callable[[], object] | None = None


@dataclass
class Step:
    """A program ready to run on this rank."""

    program: Program
    bound: Bound | BoundStage
    place: Place
    specs: dict[int, Any] = field(default_factory=dict)  # of gradients, by their numbers, once the first came

    @cached_property
    def inputs(self) -> tuple[Input, ...]:
        """What each argument of the forward program is, in order."""
        known = {entry.node: entry for entry in self.program.graph.inputs}
        return tuple(known[node] for node in self.program.forward_inputs)

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """What every argument is computed with."""
        nodes = self.program.graph.nodes
        return {entry.node: nodes[entry.node].meta["val"].dtype for entry in self.program.graph.inputs}

    @cached_property
    def results(self) -> tuple[Output, ...]:
        """What the forward program gives before the saved values."""
        return tuple(o for o in self.program.graph.outputs if o.kind in ("loss", "output", "buffer"))

    @cached_property
    def heads(self) -> tuple[Output, ...]:
        """The results that the user gets."""
        return tuple(o for o in self.results if o.kind != "buffer")

    @cached_property
    def gradients(self) -> tuple[tuple[Output, Layout | None], ...]:
        """What the backward program gives, with the layouts."""
        pairs = zip(self.program.graph.outputs, self.program.output_layouts, strict=True)
        return tuple((o, layout) for o, layout in pairs if o.kind in ("gradient", "input_gradient"))

    @cached_property
    def layouts(self) -> dict[tuple[str, str], Layout | None]:
        """(kind, name) of a result -> its layout."""
        pairs = zip(self.program.graph.outputs, self.program.output_layouts, strict=True)
        return {(o.kind, o.name): layout for o, layout in pairs}

    @cached_property
    def tangents(self) -> tuple[Input, ...]:
        """What backward takes after the saved values."""
        known = {entry.node: entry for entry in self.program.graph.inputs}
        return tuple(known[node] for node in self.program.tangents)

    @cached_property
    def plain(self) -> bool:
        """Whether every op is torch's own or ours; opaque modules and other libraries' ops may use autograd inside."""
        return plain_ops(*self.bound.graphs)

    @cached_property
    def wanted(self) -> dict[tuple[str, str], int]:
        """(kind, name) of a gradient -> its position among the results of backward; not of what is always zero."""
        return {(o.kind, o.name): i for i, (o, _) in enumerate(self.gradients) if o.node is not None}

    def run(self, frame: Frame, differentiable: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
        """(what the user gets for each of `heads`, new value of each buffer by name)."""
        buffers: dict[str, Tensor] = {}
        with torch.autocast(self.place.device.type, enabled=False):
            if differentiable and torch.is_grad_enabled():
                heads = _Run.apply(self, frame, buffers, *differentiable)  # type: ignore[no-untyped-call]
            else:
                with torch.no_grad():
                    heads, _ = self.forward(frame, buffers, differentiate=False)
        return heads, buffers

    def forward(
        self, frame: Frame, buffers: dict[str, Tensor], differentiate: bool
    ) -> tuple[tuple[Any, ...], list[Any]]:
        """Run the forward program: (what the user gets, what backward needs)."""
        assert isinstance(self.bound, Bound)
        self.bound.gate.pending = frame.agree
        with below_autograd(self.plain):
            out = list(self.bound.forward(frame.values))
        self.bound.gate.passing()
        return self.handed_out(out[: len(self.results)], buffers), out[len(self.results) :]

    def handed_out(self, results: Sequence[Tensor | None], buffers: dict[str, Tensor]) -> tuple[Any, ...]:
        """What the user gets; new values of buffers are put beside."""
        heads: list[Any] = []
        for output, value in zip(self.results, results, strict=True):
            layout = self.layouts[output.kind, output.name]
            if output.kind == "buffer":
                assert value is not None
                buffers[output.name] = value
            elif value is None or output.kind == "loss":
                heads.append(None if value is None else value.detach())
            else:
                value = value.detach()
                # a number is the same on every rank, and needs no DTensor to say so
                heads.append(value if layout is None or not value.dim() else self.place.hand_out(value, layout))
        return tuple(heads)

    def backward(self, saved: list[Any], incoming: Sequence[Any], owned: Owned) -> list[Any]:
        """Gradients in the order of `gradients`, as DTensors; `saved` is emptied.

        owned   memory that others hold; no gradient may lie in it
        """
        assert isinstance(self.bound, Bound)
        self.refuse_foreign(incoming)
        names = [head.name for head in self.heads]
        nodes = self.program.graph.nodes
        for entry in self.tangents:
            layout = self.program.input_layouts[entry.node]
            given = incoming[names.index(entry.name)]
            saved.append(self.place.take_in(given, layout, nodes[entry.node].meta["val"].dtype))
            owned.hold(saved[-1])
        with torch.autocast(self.place.device.type, enabled=False), below_autograd(self.plain):
            results = list(self.bound.backward(saved))
        return [self.gradient(i, value, owned) for i, value in enumerate(results)]

    def refuse_foreign(self, incoming: Sequence[Any]) -> None:
        """Only what backward starts from may get a gradient."""
        kinds = {entry.name for entry in self.tangents}
        for head, gradient in zip(self.heads, incoming, strict=True):
            if gradient is not None and head.name not in kinds:
                raise UnsupportedError(
                    f"a gradient reached {head.name}, which the program returns without one; only the loss has one\n"
                    "  try: put what you compute from it into the model's forward or into loss_fn"
                )

    def gradient(self, index: int, value: Tensor | None, owned: Owned) -> Tensor | None:
        """One result as autograd takes it: in storage of its own, since autograd adds to it in place."""
        output, layout = self.gradients[index]
        if value is None:
            return None
        value = owned.own(value.contiguous())
        assert layout is not None, f"gradient of {output.name} has no layout"
        if output.kind != "gradient":
            return together(value, layout, self.place.mesh)
        if index in self.specs:
            return with_spec(value, self.specs[index])
        made = self.place.hand_out(value, layout)
        self.specs[index] = spec_of(made)
        return made

    def outputs(self, heads: Sequence[Any]) -> Any:
        """The user's structure, with these results in it."""
        graph = self.program.graph
        by_output = dict(zip([(h.kind, h.name) for h in self.heads], heads, strict=True))
        leaves = []
        for kind, value in graph.out_leaves:
            if kind == "output":
                found = graph.outputs[value]
                leaves.append(by_output[found.kind, found.name])
            else:
                leaves.append(value)
        if not any(kind == "output" and graph.outputs[v].kind == "loss" for kind, v in graph.out_leaves):
            loss = next((h for h, head in zip(heads, self.heads, strict=True) if head.kind == "loss"), None)
            if loss is not None:
                return loss
        return unflatten(graph.out_tree, leaves)


class _Run(torch.autograd.Function):
    """The forward program now, the backward program when a gradient comes in."""

    @staticmethod
    def forward(ctx: Any, step: Step, frame: Frame, buffers: dict[str, Tensor], *_: Tensor) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)
        ctx.held = {storage(value) for value in frame.values}
        heads, saved = step.forward(frame, buffers, differentiate=True)
        ctx.step, ctx.wanted = step, frame.gradients_for
        ctx.saved = saved
        ctx.versions = [_version(tensor) for tensor in saved]
        fixed = [h for h in heads if isinstance(h, Tensor) and not (h.is_floating_point() or h.is_complex())]
        ctx.mark_non_differentiable(*fixed)
        return heads

    @staticmethod
    def backward(ctx: Any, *incoming: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError("backward with create_graph=True: gradients of gradients are not in the program")
        if ctx.saved is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: the saved values have been freed\n"
                "  try: loss.backward(retain_graph=True) the first time"
            )
        check_unchanged(ctx.saved, ctx.versions)
        keep = backward_keeps_graph()
        saved = list(ctx.saved)
        if not keep:
            ctx.saved = None
        owned = Owned(saved if keep else ())
        owned.held |= ctx.held
        gradients = ctx.step.backward(saved, incoming, owned)
        return (None, None, None, *(gradients[index] for index in ctx.wanted))


def check_unchanged(saved: Sequence[Any], versions: Sequence[int]) -> None:
    """Refuse what was written to since forward; a function of its own, so that no name of it holds a saved value."""
    for tensor, version in zip(saved, versions, strict=True):
        if _version(tensor) != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs has been changed by an in-place "
                f"operation: it is at version {_version(tensor)}, expected {version}"
            )


def _version(value: Any) -> int:
    return version_of(value) if isinstance(value, Tensor) else 0
