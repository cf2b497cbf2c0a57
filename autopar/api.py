"""The compiler on one screen.

In: a model and a cluster.  Out: a `ParallelModule`, or a `Plan` alone.  Next: `layout.py`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autopar import asked, files, fingerprint
from autopar.axes import Axes, analyse
from autopar.capture import capture
from autopar.cluster import ClusterSpec
from autopar.cost.bill import bill
from autopar.cost.memory import memory
from autopar.cost.optimizer import optimizer_text
from autopar.errors import InputError, PlanError
from autopar.graph import Graph
from autopar.legality import check_covers, check_legal
from autopar.passes import copy_views, emit
from autopar.pins import NONE
from autopar.plan import Plan
from autopar.precision import Precision, low_loss
from autopar.program import Program
from autopar.runtime.keep import kept_in
from autopar.runtime.module import ParallelModule
from autopar.runtime.world import World, join
from autopar.strategies import microbatched, staged
from autopar.text import listed

log = logging.getLogger("autopar")


def parallelize(
    model: nn.Module,
    cluster: ClusterSpec,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = torch.optim.AdamW,
    memory_bytes: float | str | None = None,
    precision: Precision | str | None = None,
    strategy: Any = None,
    pins: Any = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    reuse: str | None = None,
    time_limit: float = 60,
    seed: int = 0,
) -> ParallelModule:
    """A module that trains `model` on `cluster`, to be called on every rank like the model itself.

    example_inputs  a tuple of arguments, a dict of keyword arguments, or (tuple, dict); without them the plan is made
                    at the first call
    loss_fn         for models that return no scalar, a function or a module: `loss_fn(output)` or, if it needs more
                    than one argument, `loss_fn(output, *args, **kwargs)` with those of the model's call; the module
                    then returns the loss
    optimizer       what will be used, for the memory of its state: the class, `functools.partial` of it with its
                    options, an optimizer, or the number of parameter-sized tensors that it keeps
    memory_bytes    budget of one device, a number or "8GiB"; by default the cluster's
    precision       a `Precision`: dtypes of computing, of reducing gradients, of results; "bf16" and "fp16" compute and
                    gather so and reduce in float32. None: the model's own dtypes. "float64": float32 is replaced by it
                    everywhere, for comparisons
    strategy        from `autopar.strategies`, or as it is written there, "zero(3)": constraints on the plan
    pins            what is fixed of modules, parameters and the mesh, {"modules": {"blocks.3.attn": "heads@model"}}, or
                    a YAML file of it; stronger than the strategy where they speak: see docs/pins.md
    plan            one that was made before for such a call, or the file it was saved in
    reuse           "placements": of `plan`, made for other inputs, keep the mesh and where parameters are; all else
                    is planned and priced anew
    seed            of random ops while training, and of the initialisation of a model on meta
    """
    budget = asked.memory_bytes(memory_bytes)
    compiler = Compiler(cluster, loss_fn, optimizer, budget, precision, strategy, plan, time_limit, seed, reuse, pins)
    module = ParallelModule(asked.model(model), compiler=compiler)
    if example_inputs is not None:
        args, kwargs = arguments(example_inputs)
        module.prepare(*args, **kwargs)
    return module


def plan(
    model: nn.Module,
    cluster: ClusterSpec,
    *,
    example_inputs: Any,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = torch.optim.AdamW,
    memory_bytes: float | str | None = None,
    precision: Precision | str | None = None,
    strategy: Any = None,
    pins: Any = None,
    time_limit: float = 60,
    seed: int = 0,
) -> Plan:
    """The plan that `parallelize` would make; needs no process group and no devices."""
    budget = asked.memory_bytes(memory_bytes)
    compiler = Compiler(cluster, loss_fn, optimizer, budget, precision, strategy, None, time_limit, seed, pins=pins)
    args, kwargs = arguments(example_inputs)
    return compiler.made(compiler.graph(asked.model(model), args, kwargs), frozenset(), None)


@dataclass
class Compiler:
    """From a call to a program: capture, analyse, plan, emit. Everything that was asked for stands in its fields."""

    cluster: ClusterSpec
    loss_fn: Callable[..., Any] | None = None
    optimizer: Any = torch.optim.AdamW
    memory_bytes: float | None = None
    precision: Precision | str | None = None
    strategy: Any = None
    given: Plan | str | os.PathLike[str] | None = None
    time_limit: float = 60
    seed: int = 0
    reuse: str | None = None
    pins: Any = None
    _axes: dict[int, tuple[Graph, Axes]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.cluster = asked.cluster(self.cluster)
        self.loss_fn = asked.loss_fn(self.loss_fn)
        self.strategy, self.pins = asked.strategy(self.strategy), asked.pins(self.pins)
        self.given = asked.plan(self.given)
        self.time_limit, self.seed = asked.time_limit(self.time_limit), asked.seed(self.seed)
        self.precision = asked.precision(self.precision)
        if self.reuse not in (None, "placements"):
            raise PlanError(f'reuse={self.reuse!r}: there is None (the plan as it is) and "placements"')
        if self.pins and self.given is not None:
            raise InputError("pins= are for planning, and plan= gives a plan: leave one out, or edit the plan")
        if self.reuse is not None and self.given is None:
            raise PlanError('reuse="placements" reuses those of a plan; give one: plan="plan.json"')

    def world(self) -> World:
        """The process group, checked against the cluster."""
        return join(self.cluster.device.type, self.cluster.devices)

    def graph(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
        """The training step of one call."""
        low = self.precision if isinstance(self.precision, Precision) else None
        double = self.precision == "float64"
        graph = capture(model, args, kwargs, loss_fn=self.loss_fn, double=double, precision=low)
        return copy_views(graph)

    def axes(self, graph: Graph) -> Axes:
        """Factors of every dim, analysed once per graph."""
        if id(graph) not in self._axes:
            self._axes[id(graph)] = (graph, analyse(graph))
        return self._axes[id(graph)][1]

    def plan(self, graph: Graph, world: World, local: frozenset[str], stored: Plan | None) -> Plan:
        """Rank 0's plan on every rank, once all ranks are found to hold the same graph."""
        expected = self.fingerprint(graph)
        told = world.gather_text(fingerprint.digest(expected))
        if len(set(told)) > 1:
            odd = next(r for r, text in enumerate(told) if text != told[0])
            raise PlanError(
                f"rank {odd} captured another graph than rank 0: they run different models, attributes, options of "
                "parallelize (strategy, memory_bytes, optimizer), unseeded Python random numbers, or versions, or "
                "they walk through a set of strings\n  try: PYTHONHASHSEED=0 in the environment, for the same order of "
                "sets in all processes (`autopar run` and `autopar verify` see to it)"
            )
        text = ""
        with world.agreeing("planning"):
            if world.rank == 0:
                text = files.dumps(self.made(graph, local, stored))
        return files.loads(world.broadcast_text(text))

    def made(self, graph: Graph, local: frozenset[str], stored: Plan | None) -> Plan:
        """The plan given by the user, checked, or a new one."""
        expected = self.fingerprint(graph)
        for line in self.axes(graph).without_rule(graph):
            log.warning(line)
        if isinstance(self.precision, Precision) and (dtype := low_loss(graph)):
            log.warning(
                "the loss is computed in %s; for float32, as under autocast: logits.float() in the model", dtype
            )
        if self.given is not None and stored is None:
            where = "plan" if isinstance(self.given, Plan) else os.fspath(self.given)
            given = self.given if isinstance(self.given, Plan) else files.load(self.given)
            fields = ("parameters",) if self.reuse else tuple(f for f in fingerprint.FIELDS if f != "options")
            fingerprint.check(given, expected, fields)
            if given.mesh.devices != self.cluster.devices:
                raise PlanError(
                    f"{where}: mesh: {given.mesh} is not of the {self.cluster.devices} devices of the cluster"
                )
            if self.reuse is None:
                check_legal(given, graph, self.axes(graph), local, where)
                return self.billed(graph, given)
            check_covers(given, graph)
            stored = given
        from autopar.planner import plan as search

        kept = None if stored is None else kept_in(self.axes(graph), graph, stored)
        mesh = None if stored is None else microbatched(stored.mesh, graph, self.axes(graph))

        def solve() -> Plan:
            found = search(
                graph,
                self.cluster,
                mesh=mesh,
                strategy=self.strategy if mesh is None else staged(mesh),
                pins=self.pins if stored is None else NONE,
                memory_bytes=self.memory_bytes,
                optimizer=self.optimizer,
                time_limit=self.time_limit,
                seed=self.seed,
                axes=self.axes(graph),
                local=local,
                stored=kept,
            )
            found = replace(found, fingerprint=MappingProxyType(expected))
            return listed(self.emit(graph, found), graph, self.axes(graph), self.cluster)

        return files.cached(expected, solve) if stored is None and not local else solve()

    def billed(self, graph: Graph, given: Plan) -> Plan:
        """A given plan with what it costs here: its own figures, or new ones and no certificate if it was edited."""
        program = self.emit(graph, given)
        budget = self.cluster.memory_bytes if self.memory_bytes is None else self.memory_bytes
        held = memory(program, self.optimizer)
        axes, optimizer = self.axes(graph), self.optimizer
        costs = bill(program, held, graph, axes, self.cluster, optimizer=optimizer, budget_bytes=budget)
        if held.peak > budget:
            log.warning("the plan needs %d bytes of a device, above the budget of %d", held.peak, budget)
        if all(math.isclose(costs[key], given.costs.get(key, -1.0)) for key in ("step_s", "peak_bytes")):
            return given
        plain = replace(given, costs=MappingProxyType(costs), certificate=MappingProxyType({}))
        return listed(replace(program, plan=plain), graph, self.axes(graph), self.cluster)

    def fingerprint(self, graph: Graph) -> dict[str, str]:
        """What a plan for this graph depends on."""
        options = {
            "strategy": self.strategy,
            "memory_bytes": self.memory_bytes,
            "optimizer": optimizer_text(self.optimizer),
        }
        options |= {"precision": self.precision, "pins": self.pins or None}
        return fingerprint.fingerprint(graph, self.cluster, options)

    def emit(self, graph: Graph, plan: Plan) -> Program:
        """The program of a plan."""
        return emit(graph, self.axes(graph), plan)


def arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) from what a user gives as example inputs."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        if len(example_inputs) == 2 and isinstance(example_inputs[0], tuple) and isinstance(example_inputs[1], Mapping):
            return tuple(example_inputs[0]), dict(example_inputs[1])
        return tuple(example_inputs), {}
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    kind = type(example_inputs).__name__
    raise InputError(f"example_inputs is a {kind}; give a tuple of arguments or a dict of keywords")
