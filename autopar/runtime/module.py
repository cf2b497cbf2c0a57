"""The module that `parallelize` returns: the user's own, with parameters spread and programs inside.

In: a model; a graph and a plan, or what makes them.  Out: `ParallelModule`.  Next: `step.py`.

It is an instance of the model's class too and shares its attributes and submodules, so `isinstance`, `model.config`,
methods and names go on working; only `forward` is another. One forward is: take the arguments apart, find that all
ranks make the same call, pick or make the program for it, gather what is stale, run.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_post_hook

from autopar._torch import local_of, settle_pending_items
from autopar.errors import InputError, PlanError, UnsupportedError
from autopar.graph import Graph
from autopar.passes import bind
from autopar.plan import Plan
from autopar.program import Program
from autopar.runtime import checkpoint, norms
from autopar.runtime.copies import Copies
from autopar.runtime.guards import Call, Key, TensorLeaf, agreed, key_of_graph, mode
from autopar.runtime.parameters import Slots, check_equal, slots
from autopar.runtime.placements import piece
from autopar.runtime.spread import layout_of, spread, spread_provisionally
from autopar.runtime.step import Frame, Place, Step
from autopar.runtime.world import World, device_mesh, group_names, here, join

VALUE_CHECKS = 3  # forwards whose input values are compared across ranks


class Compiler(Protocol):
    """What makes programs: `api.Compiler`, or a test's stand-in."""

    seed: int

    def world(self) -> World:
        """The process group, checked against the cluster."""

    def graph(self, model: nn.Module, args: Any, kwargs: Any) -> Graph:
        """Capture one call."""

    def plan(self, graph: Graph, world: World, local: frozenset[str], stored: Plan | None) -> Plan:
        """Plan it, the same on all ranks; with `stored`, parameters stay as that plan keeps them."""

    def emit(self, graph: Graph, plan: Plan) -> Program:
        """The program for all ranks."""


@dataclass(eq=False)
class State:
    """What a `ParallelModule` knows beyond its model."""

    world: World
    compiler: Compiler
    parameters: tuple[Slots, ...]
    buffers: tuple[Slots, ...]
    seed: int
    plan: Plan | None = None
    place: Place | None = None
    programs: dict[Key, Step] = field(default_factory=dict)
    copies: dict[Any, Copies] = field(default_factory=dict)
    rng_step: int = 0
    calls: int = 0
    check_inputs: bool | None = None

    def stale(self) -> None:
        """Parameters have changed."""
        for copies in self.copies.values():
            copies.stale = True


class ParallelModule(nn.Module):
    """A model that trains on the cluster it was planned for. Made by `autopar.parallelize`.

    plan           what was decided (None until the first call, if there were no example inputs)
    check_inputs   compare the values of inputs across ranks: None in the first forwards, True always, False never
    rng_step       training forwards so far; with the seed it determines every random number
    """

    _classes: ClassVar[dict[type, type]] = {}

    def __new__(cls, model: nn.Module, *_: Any, **__: Any) -> ParallelModule:
        if isinstance(model, ParallelModule):
            raise UnsupportedError("this module is a ParallelModule already")
        return object.__new__(_class_for(cls, type(model)))

    def __init__(
        self,
        model: nn.Module,
        graph: Graph | None = None,
        plan: Plan | None = None,
        *,
        compiler: Compiler | None = None,
        seed: int = 0,
    ) -> None:
        object.__setattr__(self, "__dict__", model.__dict__)
        settle_pending_items()
        compiler = compiler or Fixed(seed=seed)
        world = compiler.world()
        state = State(world, compiler, slots(model), slots(model, "_buffers"), compiler.seed)
        object.__setattr__(self, "_autopar", state)
        with world.agreeing("comparing the parameters of all ranks"):
            check_equal((*state.parameters, *state.buffers), world)
        _watch_optimizers(state)
        if graph is not None:
            assert plan is not None, "a graph comes with its plan"
            self._settle(plan)
            now = mode(self, state.parameters, self._device_type)
            self._add(key_of_graph(graph, now, frozenset(plan.inputs)), graph, plan)
        else:
            spread_provisionally(state.parameters, state.buffers, world)

    # ---- what a user reads ----

    @property
    def plan(self) -> Plan | None:
        """What was decided, or None before the first call."""
        return self._autopar.plan

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that every parameter is placed on."""
        return self._placed().device_mesh

    @property
    def rng_step(self) -> int:
        return self._autopar.rng_step

    @rng_step.setter
    def rng_step(self, step: int) -> None:
        self._autopar.rng_step = step

    @property
    def check_inputs(self) -> bool | None:
        return self._autopar.check_inputs

    @check_inputs.setter
    def check_inputs(self, value: bool | None) -> None:
        self._autopar.check_inputs = value

    def program_text(self) -> str:
        """Every program of this module as text."""
        parts = []
        for number, step in enumerate(self._autopar.programs.values()):
            for name in ("refresh", "forward", "backward"):
                parts.append(f"# program {number}, {name}\n{getattr(step.program, name)}")
        return "\n\n".join(parts)

    # ---- running ----

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def prepare(self, *args: Any, **kwargs: Any) -> ParallelModule:
        """Plan and emit the program for a call like this one, without running it."""
        call = Call.of(args, kwargs)
        key, _ = agreed(call, mode(self, self._autopar.parameters, self._device_type), self._autopar.world, values=True)
        if key not in self._autopar.programs:
            self._compile(key, call, args, kwargs)
        return self

    @property
    def _device_type(self) -> str:
        return self._autopar.world.device.type

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._autopar
        call = Call.of(args, kwargs)
        pending = next(iter(state.copies.values()), None)
        changed = pending is not None and pending.differ(self._stored(pending))
        check = state.calls < VALUE_CHECKS if state.check_inputs is None else state.check_inputs
        key, flags = agreed(
            call, mode(self, state.parameters, self._device_type), state.world, values=check, flags=(int(changed),)
        )
        state.calls += 1
        if any(row[0] for row in flags):
            state.stale()
        step = state.programs.get(key) or state.programs.get(replace(key, gradients=True))
        if step is None:
            step = self._compile(key, call, args, kwargs)
        return self._run(step, call)

    def _run(self, step: Step, call: Call) -> Any:
        state = self._autopar
        frame, differentiable = self._frame(step, call)
        heads, buffers = step.run(frame, differentiable)
        with torch.no_grad():
            for slot in state.buffers:
                if slot.name in buffers:
                    slot.get().copy_(buffers[slot.name])
        if self.training:
            state.rng_step += 1
        return step.outputs(heads)

    def _frame(self, step: Step, call: Call) -> tuple[Frame, list[Tensor]]:
        """The arguments of a program, and the tensors that get gradients from it."""
        state, place = self._autopar, self._placed()
        copies = self._copies(step)
        held = dict(zip(step.program.refreshed, copies.values, strict=True)) if copies else {}
        parameters = {slot.name: slot.get() for slot in state.parameters}
        buffers = {slot.name: slot.get() for slot in state.buffers}
        inputs = iter(call.tensors)
        named = {entry.name: tensor for entry, tensor in zip(_inputs(step.program.graph), inputs, strict=True)}
        values: list[Tensor] = []
        for entry in step.inputs:
            if entry.kind == "parameter":
                values.append(held[entry.name] if entry.name in held else local_of(parameters[entry.name]))
            elif entry.kind == "buffer":
                changing = (("buffer", entry.name) in step.layouts) and entry.node in step.program.saved
                values.append(buffers[entry.name].clone() if changing else buffers[entry.name])
            elif entry.kind == "rng":
                values.append(torch.tensor([state.seed, state.rng_step], device=place.device))
            else:
                values.append(named[entry.name].detach().to(place.device))
        differentiable, wanted = [], []
        for kind, tensors in (("gradient", parameters), ("input_gradient", named)):
            for name, tensor in tensors.items():
                index = step.wants(kind, name) if tensor.requires_grad else None
                if index is not None:
                    differentiable.append(tensor)
                    wanted.append(index)
        return Frame(values, tuple(wanted)), differentiable

    # ---- compiling ----

    def _compile(self, key: Key, call: Call, args: Any, kwargs: Any) -> Step:
        """A program for a call of a new kind; the first one decides how parameters are stored."""
        state = self._autopar
        whole_args, whole_kwargs = whole_arguments(key, call)
        with state.world.agreeing("capturing"):
            graph = state.compiler.graph(self._plain(), whole_args, whole_kwargs)
            local = frozenset(
                entry.node
                for entry, leaf in zip(_inputs(graph), (x for x in key.leaves if isinstance(x, TensorLeaf)), strict=True)
                if leaf.local
            )
        plan = state.compiler.plan(graph, state.world, local, state.plan)
        if state.plan is None:
            self._settle(plan)
        return self._add(key, graph, plan)

    def _plain(self) -> nn.Module:
        """The user's own module: the same attributes and submodules with the forward it was written with."""
        original = type(self)._original  # type: ignore[attr-defined]
        plain = object.__new__(original)
        hooks = {key: type(value)() for key, value in self.__dict__.items() if key.startswith("_forward_")}
        object.__setattr__(plain, "__dict__", {**self.__dict__, **hooks})
        return plain  # type: ignore[no-any-return]

    def _settle(self, plan: Plan) -> None:
        """Adopt the first plan: make the mesh and spread parameters as it stores them."""
        state = self._autopar
        mesh = plan.mesh
        if mesh.devices != state.world.size:
            raise PlanError(f"the plan is for {mesh} = {mesh.devices} devices, {state.world.size} processes are running")
        torch_mesh = device_mesh(mesh, state.world.device.type)
        state.place = Place(mesh, torch_mesh, mesh.coordinate(state.world.rank), state.world.device)
        state.plan = plan
        with state.world.agreeing("spreading the parameters"):
            spread(self, state.parameters, state.buffers, plan, state.place, state.seed)

    def _add(self, key: Key, graph: Graph, plan: Plan) -> Step:
        state, place = self._autopar, self._placed()
        with state.world.agreeing("emitting the program"):
            program = state.compiler.emit(graph, plan)
            bound = bind(program, dict(place.coordinate), group_names(place.device_mesh), place.device)
        step = Step(program, bound, place)
        state.programs[key] = step
        names = program.refreshed
        if names and names not in state.copies:
            plans = tuple(plan.parameters[name] for name in names)
            state.copies[names] = Copies(plans, step.bound.refresh, place.mesh, place.coordinate)
        return step

    def _placed(self) -> Place:
        place = self._autopar.place
        if place is None:
            raise UnsupportedError("nothing is planned yet: call the module once, or give example_inputs to parallelize")
        return place

    def _copies(self, step: Step) -> Copies | None:
        """The compute copies that a program wants, up to date."""
        copies = self._autopar.copies.get(step.program.refreshed)
        if copies is not None and copies.stale:
            copies.renew(self._stored(copies))
        return copies

    def _stored(self, copies: Copies) -> list[Tensor]:
        names = next(names for names, found in self._autopar.copies.items() if found is copies)
        known = {slot.name: slot for slot in self._autopar.parameters}
        return [local_of(known[name].get()) for name in names]  # type: ignore[arg-type]

    # ---- norms and checkpoints ----

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Scale all gradients so that their joint norm is at most `max_norm`; the norm before, the same on all ranks."""
        return norms.clip(list(self.parameters()), max_norm, norm_type, error_if_nonfinite)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As `nn.Module` does, from whole tensors or DTensors of any layout."""
        if assign:
            raise UnsupportedError("load_state_dict(assign=True) would replace the parameters that the programs use")
        self._autopar.stale()
        placed = checkpoint.in_layouts(self.state_dict(), state_dict, self._whole_to_piece)
        return super().load_state_dict(placed, strict=strict)

    def _whole_to_piece(self, name: str, whole: Tensor) -> Tensor:
        """This rank's piece of a whole tensor for the parameter of this name."""
        state = self._autopar
        if state.plan is None or state.place is None:
            return whole
        slot = next(slot for slot in state.parameters if name in slot.names)
        return piece(whole, layout_of(slot, state.plan), state.place.mesh, dict(state.place.coordinate))

    def full_state_dict(self) -> dict[str, Tensor]:
        """`state_dict()` with whole plain tensors, for a file that the single-device model loads; on every rank."""
        return {name: checkpoint.full(value) for name, value in self.state_dict().items()}

    def __deepcopy__(self, memo: Any) -> Any:
        raise UnsupportedError("a ParallelModule cannot be copied; load its full_state_dict() into another model")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError("a ParallelModule cannot be pickled; save its state_dict() or full_state_dict()")


@dataclass
class Fixed:
    """The compiler of a module made from one graph and one plan: it makes that program and no other."""

    seed: int = 0

    def world(self) -> World:
        return here("cpu") if dist.is_initialized() else join("cpu", int(os.environ.get("WORLD_SIZE", "1")))

    def graph(self, model: nn.Module, args: Any, kwargs: Any) -> Graph:
        raise InputError("this module was made for one program, and the call is of another kind")

    def plan(self, graph: Graph, world: World, local: frozenset[str], stored: Plan | None) -> Plan:
        raise AssertionError("a fixed program is planned already")

    def emit(self, graph: Graph, plan: Plan) -> Program:
        from autopar.axes import analyse
        from autopar.passes import emit

        return emit(graph, analyse(graph), plan)


def _inputs(graph: Graph) -> tuple[Any, ...]:
    return tuple(entry for entry in graph.inputs if entry.kind == "input")


def whole_arguments(key: Key, call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that a single device would get; parts that others hold are empty memory of the right shape."""
    from autopar.tree import unflatten

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


def _class_for(base: type, original: type) -> type:
    """The class that is both: what `ParallelModule` does, over what the user's class is."""
    key = original
    if key not in ParallelModule._classes:

        @wraps(original.forward)  # type: ignore[attr-defined]
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return ParallelModule._forward(self, *args, **kwargs)

        body = {"forward": forward, "_original": original, "__module__": original.__module__, "__doc__": original.__doc__}
        ParallelModule._classes[key] = type(f"Parallel{original.__name__}", (base, original), body)
    return ParallelModule._classes[key]


_HOOKS: list[Any] = []  # the one hook that torch knows of, once there is a module
_WATCHED: weakref.WeakSet[State] = weakref.WeakSet()  # registry: whose copies an optimizer's step makes stale


def _watch_optimizers(state: State) -> None:
    """Mark the copies stale whenever an optimizer that holds one of the parameters has stepped."""
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_post_hook(_stepped))
    _WATCHED.add(state)


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for state in list(_WATCHED):
        if state.copies:
            ours = {id(slot.get()) for slot in state.parameters}
            if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
                state.stale()
