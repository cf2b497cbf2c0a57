"""What the runtime asks of the compiler, so that it need not know planner and capture.

In: a model and a call.  Out: a graph, a plan, a program.  Next: `engine.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import nn

from autopar.errors import UnsupportedError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.program import Program
from autopar.runtime.world import World, here, join

if TYPE_CHECKING:
    from autopar.axes import Axes


class Compiler(Protocol):
    """What makes programs: `api.Compiler`, or `Fixed`."""

    seed: int

    def world(self) -> World:
        """The process group, checked against the cluster."""

    def graph(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
        """Capture one call."""

    def plan(self, graph: Graph, world: World, local: frozenset[str], stored: Plan | None) -> Plan:
        """Plan it, the same on all ranks; with `stored`, parameters stay as that plan keeps them."""

    def emit(self, graph: Graph, plan: Plan) -> Program:
        """The program for all ranks."""


@dataclass
class Fixed:
    """The compiler of a module made from one graph and one plan: it makes that program and no other.

    `axes` are the graph's, where they are known already.
    """

    seed: int = 0
    device_type: str = "cpu"
    axes: Axes | None = None

    def world(self) -> World:
        """The group that stands, or the one that the environment tells of."""
        if dist.is_initialized():
            return here(self.device_type)
        return join(self.device_type, int(os.environ.get("WORLD_SIZE", "1")))

    def graph(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
        """Refused."""
        raise UnsupportedError(
            "this module was made from one graph and one plan, and the call is of another kind\n"
            "  try: autopar.parallelize(model, cluster), which makes a program for every kind of call"
        )

    def plan(self, graph: Graph, world: World, local: frozenset[str], stored: Plan | None) -> Plan:
        """Never asked."""
        raise AssertionError("a fixed program is planned already")

    def emit(self, graph: Graph, plan: Plan) -> Program:
        """The one program."""
        from autopar.axes import analyse
        from autopar.passes import emit

        return emit(graph, analyse(graph) if self.axes is None else self.axes, plan)
