"""What a step of training costs beside its programs: calls, gradients handed over, the optimizer.

In: a process group, on every rank.  Out: `Overhead`.  Next: `run.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from autopar.api import parallelize
from autopar.cluster import ClusterSpec
from autopar.models import gpt
from autopar.runtime.module import ParallelModule
from autopar.runtime.step import Frame

WARM, STEPS = 4, 15
SHAPES = (
    {"d": 24, "f": 48, "layers": 1},
    {"d": 24, "f": 48, "layers": 6},
    {"d": 768, "f": 3072, "layers": 1},
)
"""Few parameters, many, and few large ones."""


@dataclass(frozen=True)
class Overhead:
    """Of one model: trained tensors, their bytes; seconds of the optimizer, and of a step outside of all programs."""

    parameters: int
    bytes: int
    optimizer_s: float
    rest_s: float


def overheads(device: torch.device) -> list[Overhead]:
    """Every shape, on all ranks."""
    return [overhead(shape, device) for shape in SHAPES]


def overhead(shape: dict[str, int], device: torch.device) -> Overhead:
    """One model, cut as data parallelism has it."""
    model, batch = gpt.build(b=8, s=8, v=64, heads=4, dropout=0.0, **shape)
    cluster = ClusterSpec.preset("cpu-gloo", devices=dist.get_world_size())
    cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update={"type": device.type})})
    batch = tuple(t.to(device) for t in batch)
    module = parallelize(model.to(device), cluster, example_inputs=batch, strategy="ddp()")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    inside: list[float] = []
    timed(module, inside)
    steps, updates = [], []
    for i in range(WARM + STEPS):
        dist.barrier()
        inside.clear()
        started = time.perf_counter()
        module(*batch).backward()
        before = time.perf_counter()
        optimizer.step()
        updated = time.perf_counter()
        optimizer.zero_grad()
        if i >= WARM:
            steps.append(time.perf_counter() - started - sum(inside) - (updated - before))
            updates.append(updated - before)
    trained = list(module.parameters())
    size = sum(p.numel() * p.element_size() for p in trained)
    return Overhead(len(trained), size, statistics.median(updates), statistics.median(steps))


@dataclass
class Timed:
    """A program that adds its seconds up."""

    part: Callable[..., Any]
    inside: list[float]
    graph: Any = None

    def __call__(self, *args: Any) -> Any:
        started = time.perf_counter()
        out = self.part(*args)
        self.inside.append(time.perf_counter() - started)
        return out


def timed(module: ParallelModule, inside: list[float]) -> None:
    """Note the seconds of every program of a module; those in which forward waits for the other ranks' word less."""
    step: Any
    for step in module._autopar.programs.values():
        bound = step.bound
        parts = {
            name: Timed(getattr(bound, name), inside, getattr(bound, name).graph) for name in ("forward", "backward")
        }
        step.bound, step.run = replace(bound, **parts), partial(outside, step.run, inside)


def outside(run: Callable[..., Any], inside: list[float], frame: Frame, tensors: Any) -> Any:
    """Run a step whose wait for the others counts as outside of its program."""
    if frame.agree is not None:
        frame.agree = partial(less, frame.agree, inside)
    return run(frame, tensors)


def less(call: Callable[[], Any], inside: list[float]) -> Any:
    """Call, and take the seconds off."""
    started = time.perf_counter()
    out = call()
    inside.append(started - time.perf_counter())
    return out
