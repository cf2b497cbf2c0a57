"""`make demo`: plan a GPT, train it on 4 ranks, compare losses with one device and step time with DDP and FSDP2.

Exits with 1 when a loss is off by more than 1e-6 (relative, float32), or when it took more than 5 minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import paired
import torch
from torch import nn

from autopar import files
from autopar.models import gpt
from autopar.random import replay
from autopar.verify.pool import Pool

WORLD, STEPS, ROUNDS, LIMIT_S, LOSS_BOUND, SEED = 4, 5, 40, 300.0, 1e-6, 0
SIZES = {"b": 8, "s": 64, "v": 1003, "d": 192, "heads": 6, "f": 768, "layers": 4}


def build(dropout: float = 0.0) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model of the demo with one batch."""
    torch.manual_seed(SEED)
    return gpt.build(**SIZES, dropout=dropout)


def single() -> list[float]:
    """Losses of the plain module on one device; dropout draws from the generator that plans share."""
    model, args = build(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=paired.LR)
    losses = []
    for step in range(STEPS):
        with replay(SEED, step):
            loss = model(*args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def deliver(model: nn.Module, args: tuple[torch.Tensor, ...], plan: str) -> nn.Module:
    """The parallel module under a plan that is made already."""
    import autopar

    cluster = autopar.ClusterSpec.preset("cpu-gloo", devices=WORLD)
    return autopar.parallelize(model, cluster, example_inputs=args, plan=files.loads(plan), seed=SEED)


def losses_on_ranks(plan: str) -> list[float]:
    """Losses of the delivered module; what each rank does."""
    model, args = build(0.1)
    module = deliver(model, args, plan)
    optimizer = torch.optim.AdamW(module.parameters(), lr=paired.LR)
    losses = []
    for _ in range(STEPS):
        loss = module(*args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def times_on_ranks(plan: str, count: int) -> dict[str, list[float]]:
    """Step times of all contenders; what each rank does."""
    device = torch.device("cpu")
    steps = paired.contenders(build, device, lambda model, args: deliver(model, args, plan))
    return paired.rounds(steps, count, device)


def planned(dropout: float) -> tuple[Any, float]:
    """The planner's own choice for 4 ranks, and seconds from model to plan."""
    import autopar

    model, args = build(dropout)
    started = time.perf_counter()
    cluster = autopar.ClusterSpec.preset("cpu-gloo", devices=WORLD)
    return autopar.plan(model, cluster, example_inputs=args), time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    count = parser.parse_args().rounds
    torch.set_num_threads(1)
    started = time.perf_counter()
    plan, seconds = planned(0.1)
    print(plan)
    with Pool(WORLD, timeout=LIMIT_S) as pool:
        reference = single()
        ours = pool.run(losses_on_ranks, files.dumps(plan))
        worst = max(abs(a - b) / abs(b) for losses in ours for a, b in zip(losses, reference, strict=True))
        timing, _ = planned(0.0)
        times = pool.run(times_on_ranks, files.dumps(timing), count)[0]
    took = time.perf_counter() - started
    good = worst <= LOSS_BOUND and took <= LIMIT_S
    print("\nlosses on 1 device ", "  ".join(f"{x:.7f}" for x in reference))
    print(f"losses on {WORLD} ranks  ", "  ".join(f"{x:.7f}" for x in ours[0]))
    print(f"model to plan      {seconds:.1f} s")
    print(f"step times on {WORLD} ranks, dropout off, AdamW, {timing.mesh}")
    print("\n".join(paired.report(times)))
    print(f"largest relative difference of a loss {worst:.1e} (bound {LOSS_BOUND:g})")
    print(f"took {took:.0f} s (bound {LIMIT_S:.0f})   step {1e3 * statistics.median(times['autopar']):.1f} ms")
    print("demo: ok" if good else "demo: A BOUND WAS MISSED")
    return 0 if good else 1


if __name__ == "__main__":
    import demo  # under its own name, by which the ranks find its functions

    sys.exit(demo.main())
