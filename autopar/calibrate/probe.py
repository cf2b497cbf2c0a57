"""What the devices are timed with: one step of several small models, op by op.

In: a dtype.  Out: `Sample`s, what an op did and how long it took.  Next: `fit.py`.

Every op is met at several sizes, in a step like any other: the sizes here are no others' sizes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.api import Compiler
from autopar.calibrate.pace import Pace
from autopar.calibrate.profiled import profiled
from autopar.cluster import ClusterSpec
from autopar.cost.compute import Work, is_bias, owns
from autopar.cost.price import op_work
from autopar.models import encoder, gpt, llama, mlp, moe, resnet, vit
from autopar.passes import bind

WARM, STEPS = 3, 9


@dataclass(frozen=True)
class Sample:
    """One op of a step: its work, and the median of its seconds."""

    work: Work
    seconds: float


@dataclass(frozen=True)
class Probed:
    """One device's samples, and the seconds of a view."""

    samples: tuple[Sample, ...]
    view_s: float


class Probe(nn.Module):
    """Models side by side; the loss is the sum of theirs."""

    def __init__(self, models: list[nn.Module], counts: list[int]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.counts = counts

    def forward(self, *tensors: Tensor) -> Tensor:
        rest, losses = list(tensors), []
        for model, count in zip(self.models, self.counts, strict=True):
            given, rest = rest[:count], rest[count:]
            losses.append(model(*given))
        return torch.stack([loss.float() for loss in losses]).sum()


def probe(dtype: torch.dtype) -> tuple[Probe, tuple[Tensor, ...]]:
    """The models and their batches; floating-point numbers in `dtype`."""
    torch.manual_seed(0)
    built: list[tuple[nn.Module, Any]] = [
        gpt.build(b=2, s=48, v=700, d=96, heads=4, f=384, layers=1, dropout=0.0),
        gpt.build(b=3, s=96, v=1500, d=256, heads=8, f=1024, layers=1, dropout=0.1),
        gpt.build(b=4, s=192, v=2500, d=512, heads=8, f=2048, layers=1, dropout=0.0),
        llama.build(b=3, s=40, v=600, d=112, h=4, g=2, e=28, f=304, layers=1, dropout=0.0),
        llama.build(b=2, s=144, v=1800, d=288, h=6, g=3, e=48, f=752, layers=1, dropout=0.0),
        llama.build(b=2, s=288, v=2200, d=448, h=7, g=7, e=64, f=1200, layers=1, dropout=0.1),
        encoder.build(b=4, s=56, v=800, d=128, heads=4, f=512, layers=1, dropout=0.0),
        encoder.build(b=3, s=120, v=1300, d=320, heads=5, f=1280, layers=1, dropout=0.1),
        vit.build(b=3, c=3, side=48, patch=8, d=160, heads=5, f=640, layers=1, k=50, dropout=0.0),
        vit.build(b=6, c=3, side=64, patch=8, d=256, heads=4, f=1024, layers=1, k=90, dropout=0.1),
        moe.build(b=4, s=24, v=500, d=80, heads=4, f=160, e=4, k=2, layers=1, dropout=0.0),
        moe.build(b=4, s=72, v=900, d=192, heads=6, f=384, e=6, k=2, layers=1, dropout=0.1),
        resnet.build(b=4, c=3, side=20, widths=(12, 24), k=20),
        resnet.build(b=6, c=3, side=36, widths=(24, 48), k=40),
        mlp.build(b=24, d=48, f=160, g=96, o=20, dropout=0.1),
        mlp.build(b=160, d=200, f=700, g=420, o=60, dropout=0.1),
    ]
    batches = [tuple(b.values()) if isinstance(b, Mapping) else b for _, b in built]
    flat = tuple(t.to(dtype) if t.is_floating_point() else t for batch in batches for t in batch)
    return Probe([m for m, _ in built], [len(batch) for batch in batches]).to(dtype), flat


class Probing:
    """The probe as one device's program, which can be timed again and again."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.model, batch = probe(dtype)
        self.model.to(device)
        compiler = Compiler(ClusterSpec.preset("cpu-gloo", devices=1))
        self.graph = compiler.graph(self.model, batch, {})
        self.axes = compiler.axes(self.graph)
        self.plan = compiler.made(self.graph, frozenset(), None)
        self.program = compiler.emit(self.graph, self.plan)
        bound = bind(self.program, dict.fromkeys(self.plan.mesh.names, 0), {}, device)
        self.bound, self.seconds = profiled(bound, device)
        self.values = self.given(batch, device)
        self.paces: list[float] = []

    def given(self, batch: tuple[Tensor, ...], device: torch.device) -> dict[str, Tensor]:
        """What every input of the graph is: the model's own tensors, the batch, a seed, a gradient of one."""
        named = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        inputs = iter(batch)
        kinds = {"rng": lambda: torch.tensor([0, 0]), "tangent": lambda: torch.ones(()), "input": lambda: next(inputs)}
        return {
            e.node: (named[e.name].detach() if e.name in named else kinds[e.kind]()).to(device)
            for e in self.graph.inputs
        }

    def step(self) -> None:
        results = sum("gradient" not in o.kind for o in self.graph.outputs)
        with torch.no_grad():
            out = list(self.bound.forward([self.values[name] for name in self.program.forward_inputs]))
            saved = out[results:]
            del out
            self.bound.backward([*saved, *(self.values[name] for name in self.program.tangents)])

    def run(self, pace: Pace) -> Probed:
        """Medians over some steps; beside each the fixed work, whose seconds are noted."""
        for _ in range(WARM):
            self.step()
        self.seconds.clear()
        self.paces.clear()
        for _ in range(STEPS):
            self.step()
            started = time.perf_counter()
            pace()
            self.paces.append(time.perf_counter() - started)
        samples, views = [], []
        for name, seconds in self.seconds.items():
            node, median = self.graph.nodes.get(name), statistics.median(seconds)
            if node is None or name not in self.plan.ops:
                continue
            if owns(node):  # a product that a bias was fused into ran as the addition of the bias
                did = node.all_input_nodes[0] if is_bias(node) else node
                samples.append(Sample(op_work(did, self.axes, self.plan), median))
            else:
                views.append(median)
        return Probed(tuple(samples), statistics.median(views))
