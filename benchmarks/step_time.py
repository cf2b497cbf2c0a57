"""Step time and memory of emitted programs beside torch's own DDP, FSDP2 and `parallelize_module`.

    python benchmarks/step_time.py [--rounds 40] [--world 2 4]

A model of about 10 M parameters, AdamW, float32, dropout off. For each strategy three contenders train in one process
group, in turn: autopar under that strategy, torch's (`baselines.py`), and torch's again, whose ratio (A/A) shows what
noise alone does. First their losses are compared, then memory is measured, then time.

A bound "x" holds if the lower end of the 95 % bootstrap interval of the paired ratio is at most x and its median at
most 1.03 x. Memory is the peak of live tensors in a step, parameters and optimizer included. Exits with 1 if a bound is
missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import baselines
import paired
import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.models import gpt, llama
from autopar.verify.live import LiveBytes
from autopar.verify.pool import Pool

STEPS, LOSS_BOUND, MEMORY_BOUND, SLACK = 3, 1e-5, 1.02, 1.03
NAMES = ("autopar", "torch", "torch again")


def small_gpt() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return labelled(*gpt.build(b=4, s=32, v=1000, d=320, heads=8, f=1280, layers=8, dropout=0.0))


def small_llama() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return labelled(*llama.build(b=4, s=32, v=1000, d=320, h=8, g=4, e=40, f=864, layers=8, dropout=0.0))


def labelled(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Every position has a label: DDP and FSDP2 average over ranks, which is the mean over labels only then."""
    ids, labels = batch
    return model, (ids, labels.where(labels >= 0, 0))


@dataclass(frozen=True)
class Contest:
    """A strategy of autopar beside what torch has for it, and how much longer it may take."""

    name: str
    strategy: str
    theirs: str
    build: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
    bound: float


CONTESTS = (
    Contest("DDP", "ddp()", "ddp", small_gpt, 1.05),
    Contest("FSDP2", "zero(3)", "fsdp2", small_gpt, 0.9),
    Contest("parallelize_module", "tensor()", "tensor", small_llama, 1.0),
)


@dataclass(frozen=True)
class Measured:
    """Of every contender: losses of the first steps, seconds of every round, bytes at the peak."""

    losses: dict[str, list[float]]
    seconds: dict[str, list[float]]
    peaks: dict[str, int]


def delivered(contest: Contest, name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A contender's module and its batch on this rank."""
    from autopar import ClusterSpec, parallelize

    torch.manual_seed(0)
    model, batch = contest.build()
    if name != "autopar":
        found: tuple[nn.Module, tuple[Tensor, ...]] = getattr(baselines, contest.theirs)(model, batch)
        return found
    cluster = ClusterSpec.preset("cpu-gloo", devices=dist.get_world_size())
    return parallelize(model, cluster, example_inputs=batch, strategy=contest.strategy), batch


def measured(contest: Contest, rounds: int) -> Measured:
    """What each rank does."""
    steps: dict[str, Any] = {}
    losses: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    for name in NAMES:
        module, batch = delivered(contest, name)
        step, optimizer = baselines.stepper(module, batch)
        losses[name] = [whole(step(), batch, contest) for _ in range(STEPS)]
        state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)]
        with LiveBytes([*module.parameters(), *module.buffers(), *state, *batch]) as live:
            step()
        peaks[name] = live.peak
        steps[name] = step
    return Measured(losses, paired.rounds(steps, rounds, torch.device("cpu")), peaks)


def whole(loss: Tensor, batch: tuple[Tensor, ...], contest: Contest) -> float:
    """The loss of the whole batch, of which a rank may have a part as large as the others'."""
    rows, labels = contest.build()[1][0].shape[0], batch[1]
    if labels.shape[0] == rows:
        return loss.item()
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def report(contest: Contest, world: int, found: list[Measured]) -> bool:
    """Print a contest; whether every bound holds."""
    first = found[0]
    apart = max(abs(a - b) / abs(b) for a, b in zip(first.losses["autopar"], first.losses["torch"], strict=True))
    ratio = paired.ratio(first.seconds["autopar"], first.seconds["torch"])
    noise = paired.ratio(first.seconds["torch again"], first.seconds["torch"])
    peaks = {name: max(m.peaks[name] for m in found) for name in NAMES}
    memory = peaks["autopar"] / peaks["torch"]
    fast = ratio.low <= contest.bound and ratio.median <= SLACK * contest.bound
    good = fast and memory <= MEMORY_BOUND and apart <= LOSS_BOUND
    millis = {name: 1e3 * statistics.median(s) for name, s in first.seconds.items()}
    print(f"{contest.strategy} beside {contest.name} on {world} ranks: {'ok' if good else 'A BOUND WAS MISSED'}")
    print(f"  step    {millis['autopar']:.1f} ms, torch {millis['torch']:.1f} ms")
    print(f"  ratio   {ratio} (bound {contest.bound})   A/A {noise}")
    print(f"  memory  {memory:.3f} of torch's {peaks['torch'] / 2**20:.1f} MiB (bound {MEMORY_BOUND})")
    print(f"  losses  apart by {apart:.1e} (bound {LOSS_BOUND:g})", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    good = []
    with Pool(max(asked.world), timeout=900) as pool:
        for world in asked.world:
            for contest in CONTESTS:
                good.append(report(contest, world, pool.run(measured, contest, asked.rounds, world=world)))
    print("step_time: ok" if all(good) else f"step_time: {good.count(False)} OF {len(good)} MISSED A BOUND")
    return 0 if all(good) else 1


if __name__ == "__main__":
    import step_time  # under its own name, by which the ranks find its functions

    sys.exit(step_time.main())
