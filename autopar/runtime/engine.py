"""What a `ParallelModule` does behind its `forward`: pick or make a program, hand it its arguments, run it.

In: the call's arguments.  Out: what the model would have returned.  Next: `step.py`.

Nothing here is about how things look to a user; that is `module.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar._torch import local_of
from autopar.errors import PlanError, UnsupportedError
from autopar.graph import Graph, Input
from autopar.passes import bind, bind_stage
from autopar.placements import piece
from autopar.plan import Plan
from autopar.runtime.attributes import Watched
from autopar.runtime.compiler import Compiler
from autopar.runtime.copies import Copies
from autopar.runtime.guards import Asked, Call, Key, TensorLeaf, ask, key_of_graph, mode
from autopar.runtime.parameters import Slots
from autopar.runtime.pipeline import PipelineStep
from autopar.runtime.spread import layout_of, spread
from autopar.runtime.step import Frame, Place, Step
from autopar.runtime.world import World, device_mesh, group_names
from autopar.tree import unflatten

log = logging.getLogger("autopar")

VALUE_CHECKS = 3  # forwards whose input values are compared across ranks


@dataclass(eq=False)
class Engine:
    """The state of one delivered module.

    plan, place    None until the first call is planned
    programs       one for every kind of call
    copies         compute copies, by the names of the parameters they are of
    rng_step       training forwards so far
    check_inputs   compare values of inputs: None in the first calls, else always or never
    watched        the Python side of the model
    """

    world: World
    compiler: Compiler
    parameters: tuple[Slots, ...]
    buffers: tuple[Slots, ...]
    plan: Plan | None = None
    place: Place | None = None
    programs: dict[Key, Step] = field(default_factory=dict)
    copies: dict[tuple[str, ...], Copies] = field(default_factory=dict)
    rng_step: int = 0
    calls: int = 0
    check_inputs: bool | None = None
    watched: Watched = field(init=False)

    def watch(self, model: nn.Module) -> None:
        """From now on the model's modules and parameters are these."""
        self.watched = Watched(model)

    # ---- running ----

    def forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """One call of the module."""
        call = Call.of(args, kwargs)
        step, agree = self.programs_for(model, call)
        frame, differentiable = self.frame(step, call)
        frame.agree = agree
        heads, buffers = step.run(frame, differentiable)
        with torch.no_grad():
            for slot in self.buffers:
                if slot.name in buffers:
                    slot.get().copy_(buffers[slot.name])
        if model.training:
            self.rng_step += 1
        self.watched.write(step.program.graph.writes)
        return step.outputs(heads)

    def programs_for(self, model: nn.Module, call: Call) -> tuple[Step, Callable[[], object] | None]:
        """The program for a call that all ranks make alike; its copies are marked stale if any rank found a change.

        Where a rank has a program for what it was asked and nothing else to learn from the others, it can begin: second
        comes what must be called before its first collective.
        """
        changed = [copies.differ(self.stored(names)) for names, copies in self.copies.items()]
        check = self.calls < VALUE_CHECKS if self.check_inputs is None else self.check_inputs
        asked = self.ask(call, check, (int(any(changed)),))
        self.calls += 1
        begin = None if check or changed or asked.expected is None else self.known(asked.expected)
        if begin is not None and begin.program.pipeline is None and not asked.call.problem:
            return begin, asked.agreed
        key, flags = asked.agreed()
        if any(row[0] for row in flags):
            self.parameters_changed()
        return self.known(key) or self.compile(model, key, call), None

    def ask(self, call: Call, values: bool, flags: tuple[int, ...] = ()) -> Asked:
        """Compare a call with the other ranks'; the `state` of its key is still open."""
        watched = self.watched
        problem = watched.other_modules()
        holding = () if problem else watched.holding()
        now = mode(watched.modules.values(), self.parameters, self.world.device.type)
        told: dict[str, Any] = {"the model": problem or "as it was", "attributes are those of programs": holding}
        told |= {"seed": self.compiler.seed, "rng_step": self.rng_step}
        held = {f"buffer {slot.name}": slot.get() for slot in self.buffers} | watched.tensors() if values else {}
        call = replace(call, problem=call.problem or problem)
        return ask(call, now, self.world, values=values, flags=flags, told=told, held=held)

    def known(self, key: Key) -> Step | None:
        """The program for a key in one of the states that the attributes are in."""
        for state in self.watched.held:
            here = replace(key, state=state)
            if found := self.programs.get(here) or self.programs.get(replace(here, gradients=True)):
                return found
        return None

    def frame(self, step: Step, call: Call) -> tuple[Frame, list[Tensor]]:
        """The arguments of a program, and the tensors that get gradients from it."""
        names = step.program.refreshed
        held = dict(zip(names, self.fresh_copies(names), strict=True))
        parameters = {slot.name: slot.get() for slot in self.parameters}
        buffers = {slot.name: slot.get() for slot in self.buffers}
        inputs = {e.name: t for e, t in zip(input_ends(step.program.graph), call.tensors, strict=True)}
        device = self.settled().device
        values: list[Tensor] = []
        for entry in step.inputs:
            if entry.kind == "parameter":
                value = held[entry.name] if entry.name in held else local(parameters[entry.name])
                values.append(value.to(step.dtypes[entry.node]))
            elif entry.kind == "buffer":
                written = ("buffer", entry.name) in step.layouts and entry.node in step.program.saved
                values.append(buffers[entry.name].clone() if written else buffers[entry.name])
            elif entry.kind == "rng":
                values.append(torch.tensor([self.compiler.seed, self.rng_step], device=device))
            else:
                values.append(inputs[entry.name].detach().to(device))
        differentiable, wanted = [], []
        for kind, tensors in (("gradient", parameters), ("input_gradient", inputs)):
            for name, tensor in tensors.items():
                index = step.wanted.get((kind, name)) if tensor.requires_grad else None
                if index is not None:
                    differentiable.append(tensor)
                    wanted.append(index)
        return Frame(values, tuple(wanted)), differentiable

    def fresh_copies(self, names: tuple[str, ...]) -> tuple[Tensor, ...]:
        """The compute copies of these parameters, gathered again if they are stale."""
        copies = self.copies.get(names)
        if copies is None:
            return ()
        if copies.stale:
            copies.renew(self.stored(names))
        return copies.values

    def stored(self, names: tuple[str, ...]) -> list[Tensor]:
        """This rank's shards."""
        known = {slot.name: slot for slot in self.parameters}
        return [local(known[name].get()) for name in names]

    def parameters_changed(self) -> None:
        """Let all copies be gathered again before they are used."""
        for copies in self.copies.values():
            copies.stale = True

    # ---- compiling ----

    def prepare(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Make the program for a call like this one."""
        call = Call.of(args, kwargs)
        key, _ = self.ask(call, self.check_inputs is not False).agreed()
        if self.known(key) is None:
            self.compile(model, key, call)

    def compile(self, model: nn.Module, key: Key, call: Call) -> Step:
        """A program for a call of a new kind; the first one decides how parameters are stored.

        Also where it is first called in inference mode, parameters are made to be trained.
        """
        with torch.inference_mode(False):
            with self.world.agreeing("capturing"):
                graph = self.compiler.graph(plain(model), *whole_arguments(key, call))
                tensors = [leaf for leaf in key.leaves if isinstance(leaf, TensorLeaf)]
                pairs = zip(input_ends(graph), tensors, strict=True)
                parts = frozenset(entry.node for entry, leaf in pairs if leaf.local)
            plan = self.compiler.plan(graph, self.world, parts, self.plan)
            if self.plan is None:
                self.settle(model, plan)
            return self.add(key, graph, plan)

    def adopt(self, model: nn.Module, graph: Graph, plan: Plan) -> None:
        """Take a graph and a plan that were made elsewhere."""
        self.settle(model, plan)
        now = mode(model.modules(), self.parameters, self.world.device.type)
        self.add(key_of_graph(graph, now, frozenset(plan.inputs)), graph, plan)

    def settle(self, model: nn.Module, plan: Plan) -> None:
        """Make the first plan's mesh and spread parameters as it stores them."""
        mesh, size = plan.mesh.space, self.world.size
        if mesh.devices != size:
            raise PlanError(
                f"the plan is for {mesh}, which is {mesh.devices} devices; {size} processes are running"
                f"\n  try: torchrun --nproc-per-node {mesh.devices}, or a plan made for {size} devices"
            )
        made = device_mesh(mesh, self.world.device.type)
        self.place = Place(mesh, made, mesh.coordinate(self.world.rank), self.world.device)
        self.plan = plan
        with self.world.agreeing("spreading the parameters"):
            spread(model, self.parameters, self.buffers, plan, self.place, self.compiler.seed)
        self.watch(model)

    def add(self, key: Key, graph: Graph, plan: Plan) -> Step:
        """Emit a plan's program and bind it to this rank."""
        place = self.settled()
        with self.world.agreeing("emitting the program"):
            program = self.compiler.emit(graph, plan)
            groups, where = group_names(place.device_mesh), dict(place.coordinate)
            if program.pipeline is None:
                step = Step(program, bind(program, where, groups, place.device), place)
            else:
                step = PipelineStep(program, bind_stage(program, where, groups, place.device), place)
        again = [known for known in self.programs if replace(known, state=0) == replace(key, state=0)]
        if again and graph.reads:
            log.info("another program for this call: %s", self.watched.differences() or "other attributes")
        self.programs[replace(key, state=self.watched.add(graph.reads))] = step
        names = program.refreshed
        if names and names not in self.copies:
            kept = tuple(plan.parameters[name] for name in names)
            nodes = {entry.name: entry.node for entry in graph.inputs if entry.kind == "parameter"}
            dtypes = tuple(step.dtypes[nodes[name]] for name in names)
            self.copies[names] = Copies(kept, dtypes, step.bound.refresh, place.mesh, place.coordinate)
        return step

    def settled(self) -> Place:
        """This rank's place, once something is planned."""
        if self.place is None:
            raise UnsupportedError("nothing is planned yet\n  try: call the module, or parallelize(example_inputs=...)")
        return self.place

    def piece_for(self, name: str, whole: Tensor) -> Tensor:
        """This rank's piece of a whole tensor for the parameter of this name."""
        if self.plan is None or self.place is None:
            return whole
        slot = next(slot for slot in self.parameters if name in slot.names)
        return piece(whole, layout_of(slot, self.plan), self.place.mesh, dict(self.place.coordinate))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def input_ends(graph: Graph) -> tuple[Input, ...]:
    """The ends of the graph that are tensors of the call, in its order."""
    return tuple(entry for entry in graph.inputs if entry.kind == "input")


def plain(model: nn.Module) -> nn.Module:
    """The user's own module: the same attributes and submodules, the forward it was written with, no hooks on it."""
    own: nn.Module = object.__new__(type(model)._autopar_original)  # type: ignore[attr-defined]
    hooks = {key: type(value)() for key, value in vars(model).items() if key.startswith("_forward_")}
    object.__setattr__(own, "__dict__", {**vars(model), **hooks})
    return own


def whole_arguments(key: Key, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a single device would get; parts that others hold are empty memory of the right shape."""
    tensors = iter(call.tensors)
    leaves: list[Any] = []
    for leaf in key.leaves:
        if not isinstance(leaf, TensorLeaf):
            leaves.append(leaf[1])
            continue
        tensor = next(tensors)
        if leaf.local:
            tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device=tensor.device, requires_grad=leaf.requires_grad)
        leaves.append(tensor)
    args, kwargs = unflatten(key.tree, leaves)
    return args, kwargs
