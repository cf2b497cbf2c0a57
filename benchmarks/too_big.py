"""`make too-big`: a model that kills one process under a memory limit trains on 4 ranks under the same limit each.

The limit is on data memory (RLIMIT_DATA: every private writable page, so also what was allocated and never touched),
counted from what the process has before the model is there. Exits with 1 when the single process survives, when the
ranks do not train, or when a rank's loss is not the one of a single process without the limit.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

import autopar
from autopar import Plan, files
from autopar.models import gpt
from autopar.verify.pool import Pool

WORLD, STEPS, SEED, LR = 4, 2, 0, 1e-3
LIMIT_BYTES = 700 * 2**20
BOUND = 1e-5
SIZES = {"b": 4, "s": 16, "v": 8003, "d": 768, "heads": 12, "f": 3072, "layers": 6, "dropout": 0.0}


def data_bytes() -> int:
    """Private writable memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmData in /proc/self/status")


def limit() -> int:
    """Forbid this process more than LIMIT_BYTES from here on; what it had before."""
    before = data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (before + LIMIT_BYTES, resource.RLIM_INFINITY))
    return before


def unlimited() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def train(model: nn.Module, args: tuple[torch.Tensor, ...]) -> list[float]:
    """Losses of a few steps with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for _ in range(STEPS):
        loss = model(*args)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def single(limited: bool) -> list[float]:
    """One process, with or without the limit."""
    torch.set_num_threads(1)
    warm_up()
    if limited:
        limit()
    torch.manual_seed(SEED)
    model, args = gpt.build(**SIZES)  # type: ignore[arg-type]
    return train(model, args)


def warm_up() -> None:
    """Start the threads that the first backward starts, so that their stacks are not counted as the model's."""
    train(*gpt.build(b=2, s=4, v=11, d=8, heads=2, f=16, layers=1, dropout=0.0))


def on_meta() -> nn.Module:
    """The model, with nothing allocated."""
    with torch.device("meta"):
        return gpt.GPT(**{k: v for k, v in SIZES.items() if k != "b"})  # type: ignore[arg-type]


def planned() -> Plan:
    """The planner's own choice under half of the limit; the other half is left for the allocator and gloo."""
    cluster = autopar.ClusterSpec.preset("cpu-gloo", devices=WORLD)
    return autopar.plan(on_meta(), cluster, example_inputs=batch(), memory_bytes=LIMIT_BYTES // 2)


def on_rank(plan: str) -> tuple[list[float], int]:
    """One of 4 ranks: losses, and data memory at the end."""
    warm_up()
    model, args = on_meta(), batch()
    cluster = autopar.ClusterSpec.preset("cpu-gloo", devices=WORLD)
    before = limit()
    try:
        torch.manual_seed(SEED)
        module = autopar.parallelize(model, cluster, example_inputs=args, plan=files.loads(plan), seed=SEED)
        return train(module, args), data_bytes() - before
    finally:
        unlimited()


def batch() -> tuple[torch.Tensor, ...]:
    """The batch of `gpt.build`, without the model."""
    return gpt.build(**{**SIZES, "d": 12, "f": 12, "layers": 1})[1]  # type: ignore[arg-type]


def main() -> int:
    if sys.argv[1:] == ["single"]:
        print(single(limited=True))
        return 0
    started = time.perf_counter()
    alone = subprocess.run([sys.executable, __file__, "single"], capture_output=True, text=True, timeout=300)
    died = alone.returncode != 0
    reason = (alone.stderr.strip().splitlines() or ["it trained"])[-1]
    print(f"single process under {LIMIT_BYTES >> 20} MiB: {'died: ' + reason[:160] if died else 'survived'}")
    reference = single(limited=False)
    plan = planned()
    with Pool(WORLD, timeout=300) as pool:
        ranks = pool.run(on_rank, files.dumps(plan))
    worst = max(abs(a - b) / abs(b) for losses, _ in ranks for a, b in zip(losses, reference, strict=True))
    good = died and worst <= BOUND
    print(plan)
    print(f"losses of a process without the limit  {reference}")
    print(f"losses of {WORLD} ranks under it            {ranks[0][0]}")
    print(f"data memory of the ranks               {[f'{used >> 20} MiB' for _, used in ranks]}")
    print(f"largest relative difference {worst:.1e} (bound {BOUND:g})   took {time.perf_counter() - started:.0f} s")
    print("too-big: ok" if good else "too-big: A BOUND WAS MISSED")
    return 0 if good else 1


if __name__ == "__main__":
    import too_big  # under its own name, by which the ranks find its functions

    sys.exit(too_big.main())
