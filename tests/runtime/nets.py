"""Small modules with everything that a runtime can get wrong, and the delivered module under some plan."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from autopar.axes import analyse
from autopar.capture import capture
from autopar.cluster import ClusterSpec
from autopar.layout import Layout, Mesh
from autopar.passes import copy_views
from autopar.plan import ParameterPlan, Plan
from autopar.planner import plan as planned
from autopar.planner import random_plan
from autopar.planner.options import shard
from autopar.runtime.module import ParallelModule
from autopar.strategies import pipeline


@dataclass
class Out:
    """A result type of the user's own."""

    loss: Tensor | None
    logits: Tensor
    extra: Any = None


class Net(nn.Module):
    """Tied weights, a frozen layer, an unused one, a buffer that counts, one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"name": "net"}
        self.emb = nn.Embedding(12, 8)
        self.mid = nn.Linear(8, 10)
        self.frozen = nn.Linear(10, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.emb.weight
        cache = torch.arange(8.0)
        self.register_buffer("cache", cache)
        self.register_buffer("cache2", cache, persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def greet(self) -> str:
        return "hello"

    def forward(self, ids: Tensor, *, labels: Tensor | None = None, flags: dict[str, Any] | None = None) -> Out:
        if self.training:
            self.calls.add_(1)
        h = self.frozen(F.gelu(self.mid(self.emb(ids) + self.cache)))
        if flags and flags.get("double"):
            h = h * 2
        logits = self.head(h)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Out(loss, logits, {"none": None, "ids": ids, "three": 3})


def net() -> tuple[Net, Tensor, Tensor]:
    """(model in float64, ids, labels)."""
    torch.manual_seed(0)
    model = Net().double()
    model.cache2 = model.cache  # `double` unties buffers
    return model, torch.randint(0, 12, (6, 5)), torch.randint(0, 12, (6, 5))


def meshes() -> list[Mesh]:
    """The meshes of this world."""
    n = dist.get_world_size()
    return [Mesh(("data",), (n,)), *([Mesh(("data", "model"), (2, n // 2))] if n == 4 else [])]


def zero(graph: Any, level: int) -> Plan:
    """Everything whole, parameters cut at a ZeRO level, those that can be."""
    axes, mesh = analyse(graph), meshes()[0]
    ops = {name: ("",) * len(mesh.names) for name in axes.instances}
    kept = {}
    for entry in graph.inputs:
        if entry.kind == "parameter":
            home = Layout.whole(axes.factors[entry.node, 0])
            cut = shard(home, mesh.names[0], mesh) or home
            at = level if cut != home else 0
            kept[entry.name] = ParameterPlan(at, cut if level == 3 else home, cut if level else home)
    return Plan(mesh, ops, kept)


def deliver(model: nn.Module, args: Any, kwargs: Any, how: str) -> tuple[ParallelModule, nn.Module]:
    """The module under a plan ("zero2", "random7", "pipeline"), and the single device's copy of the model."""
    single = copy.deepcopy(model)
    graph = copy_views(capture(model, args, kwargs))
    if how == "pipeline":
        world = dist.get_world_size()
        plan = planned(graph, ClusterSpec.preset("cpu-gloo", devices=world), strategy=pipeline(microbatches=3))
    elif how.startswith("zero"):
        plan = zero(graph, int(how[-1]))
    else:
        plan = random_plan(graph, None, meshes(), int(how[6:]))
    return ParallelModule(model, graph, plan), single


def whole(tensor: Any) -> Tensor:
    """The whole plain tensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def gap(ours: Any, theirs: Any) -> float:
    """Largest difference."""
    if theirs is None or ours is None:
        assert ours is None and theirs is None, f"{ours} against {theirs}"
        return 0.0
    return float((whole(ours) - whole(theirs)).abs().max())


def gradients_gap(ours: nn.Module, theirs: nn.Module) -> float:
    """Largest difference of two modules' gradients."""
    pairs = zip(ours.named_parameters(), theirs.named_parameters(), strict=True)
    return max(gap(a.grad, b.grad) for (_, a), (_, b) in pairs)


def parameters_gap(ours: nn.Module, theirs: nn.Module) -> float:
    """Largest difference of two modules' parameters and buffers."""
    pairs = [*zip(ours.parameters(), theirs.parameters(), strict=True)]
    pairs += [*zip(ours.buffers(), theirs.buffers(), strict=True)]
    return max(gap(a, b) for a, b in pairs)
