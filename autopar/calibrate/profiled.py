"""A program that is timed op by op while it runs.

In: a bound program.  Out: the same, which notes seconds by the captured op that its nodes come from.  Next: `probe.py`.

In a real step every op finds its operands as warm or cold, and the allocator in the state, that it has in training.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.passes import Bound


@dataclass
class Profiled:
    """One graph, run node by node; takes and empties a list of arguments, like what it stands for."""

    module: fx.GraphModule
    device: torch.device
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.graph = self.module.graph
        last: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            for operand in node.all_input_nodes:
                last[operand] = node
        self.dying: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for operand, node in last.items():
            self.dying[node].append(operand)

    def __call__(self, values: list[Any]) -> Any:
        env: dict[fx.Node, Any] = {}
        spent: dict[str, float] = defaultdict(float)
        given = list(values)
        values.clear()
        given.reverse()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                env[node] = given.pop()
            elif node.op == "output":
                out = fx.node.map_arg(node.args[0], env.__getitem__)
            elif node.op == "get_attr":
                env[node] = getattr(self.module, node.target)
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                started = time.perf_counter()
                env[node] = node.target(*args, **kwargs)
                self.wait()
                spent[node.meta.get("origin", node.name)] += time.perf_counter() - started
                del args, kwargs
            for operand in self.dying[node]:
                del env[operand]
        for origin, seconds in spent.items():
            self.seconds[origin].append(seconds)
        return out

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def profiled(bound: Bound, device: torch.device) -> tuple[Bound, dict[str, list[float]]]:
    """A program that notes its seconds, and what it notes: captured op -> seconds in every step."""
    seconds: dict[str, list[float]] = defaultdict(list)
    parts = {name: Profiled(getattr(bound, name), device, seconds) for name in ("forward", "backward")}
    return replace(bound, **parts), seconds  # type: ignore[arg-type]
