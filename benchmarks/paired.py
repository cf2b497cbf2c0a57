"""Step times of autopar, DDP and FSDP2 side by side, in one process group.

In: a model function and a plan.  Out: seconds of every round.  Used by `demo.py`, `gpu.py` and `step_time.py`.

Every round runs one training step of each contender, in turn, between barriers; ratios are taken within a round, so
that what slows the machine for a moment slows all of them. DDP runs twice: the ratio of its two copies (A/A) shows the
noise.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

LR = 1e-3
RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Paired ratios of two lists of seconds."""
    pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return Ratio(statistics.median(pairs), medians[RESAMPLES // 40], medians[-RESAMPLES // 40])


def share(batch: Any, rank: int, world: int) -> Any:
    """A rank's part of a batch."""
    return batch.chunk(world)[rank] if isinstance(batch, torch.Tensor) else batch


def stepper(model: nn.Module, args: tuple[Any, ...]) -> Callable[[], None]:
    """One training step with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> None:
        model(*args).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def contenders(build: Callable[[], tuple[nn.Module, Any]], device: torch.device, ours: Any) -> dict[str, Any]:
    """Name -> step. `ours(model, args)` delivers autopar's module."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    rank, world = dist.get_rank(), dist.get_world_size()

    def fresh() -> tuple[nn.Module, tuple[Any, ...]]:
        torch.manual_seed(0)
        model, args = build()
        return model.to(device), tuple(a.to(device) for a in args)

    out: dict[str, Any] = {}
    model, args = fresh()
    out["autopar"] = stepper(ours(model, args), args)
    for name in ("DDP", "DDP again"):
        model, args = fresh()
        part = tuple(share(a, rank, world) for a in args)
        out[name] = stepper(DistributedDataParallel(model), part)
    model, args = fresh()
    for block in getattr(model, "blocks", []):
        fully_shard(block)
    out["FSDP2"] = stepper(fully_shard(model), tuple(share(a, rank, world) for a in args))
    return out


def rounds(steps: Mapping[str, Callable[[], None]], count: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of every contender in every round, after three rounds that are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for i in range(-3, count):
        turn = names[i % len(names) :] + names[: i % len(names)]
        for name in turn:
            dist.barrier()
            wait(device)
            started = time.perf_counter()
            steps[name]()
            wait(device)
            dist.barrier()
            if i >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def report(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """A line for each contender, and the paired ratios."""
    lines = [
        f"  {name:10} {1e3 * statistics.median(s):8.1f} ms a step (median of {len(s)})" for name, s in seconds.items()
    ]
    ours = seconds["autopar"]
    for other in ("DDP", "FSDP2"):
        lines.append(f"  autopar / {other:9} {ratio(ours, seconds[other])}")
    lines.append(f"  DDP / DDP again   {ratio(seconds['DDP'], seconds['DDP again'])}   (A/A: what noise alone does)")
    return lines
