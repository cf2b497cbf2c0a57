"""What each rank of `autopar run` does: an ordinary training loop.

In: a `Job`, under torchrun.  Out: one line a step, from rank 0.  Next: `api.py`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopar import cluster as clusters
from autopar import files, hf
from autopar.cluster import ClusterSpec
from autopar.errors import ClusterError, PlanError
from autopar.parsing import read_bytes, read_cluster, read_strategy
from autopar.pins import load as load_pins
from autopar.verify.steps import leaves, loss_of
from autopar.verify.target import Target


@dataclass(frozen=True)
class Job:
    """The arguments of `autopar run`."""

    model: str
    settings: tuple[str, ...] = ()
    seed: int = 0
    steps: int = 10
    lr: float = 1e-3
    cluster: str | None = None  # None: that of the plan, or else the machine's own
    strategy: str | None = None
    memory: str | None = None
    plan: str | None = None
    pins: str | None = None
    as_json: bool = False


def check(job: Job, ranks: int) -> None:
    """Refuse a wrong call before ranks are started for it."""
    Target.parse(job.model, hf.settings(list(job.settings)), job.seed).check()
    if job.strategy:
        read_strategy(job.strategy).mesh(ranks)
    if job.memory:
        read_bytes(job.memory)
    if job.pins:
        load_pins(job.pins)
    devices = cluster_of(job, ranks).devices
    if devices != ranks:
        raise ClusterError(f"{job.plan} is for {devices} devices, and --world is {ranks}\n  try: --world {devices}")


def cluster_of(job: Job, ranks: int | None) -> ClusterSpec:
    """The cluster that was named, or the one that the plan was made for, or this machine."""
    if job.cluster is None and job.plan is not None:
        return planned_for(job.plan)
    return read_cluster(job.cluster or "detect", ranks, None)


def planned_for(path: str) -> ClusterSpec:
    """The cluster that a plan file tells."""
    text = files.load(path).fingerprint.get("cluster", "")
    try:
        described = json.loads(text)
    except ValueError:
        raise PlanError(f"{path} does not tell its cluster\n  try: --cluster, or plan again") from None
    return clusters.parse(described, f"{path}: fingerprint.cluster")


def work(job: Job) -> None:
    """Plan, then train on one batch."""
    from autopar.api import parallelize

    cluster = cluster_of(job, int(os.environ["WORLD_SIZE"]))
    built = Target.parse(job.model, hf.settings(list(job.settings)), job.seed).build()
    module = parallelize(
        built.model,
        cluster,
        example_inputs=(built.args, dict(built.kwargs)) if built.kwargs else built.args,
        memory_bytes=job.memory,
        strategy=job.strategy,
        pins=job.pins,
        plan=job.plan,
        seed=job.seed,
    )
    say(job, {"plan": str(module.plan).splitlines()[0].removeprefix("plan").strip()})
    optimizer = torch.optim.AdamW(module.parameters(), lr=job.lr)
    for step in range(job.steps):
        started = time.perf_counter()
        _, loss = loss_of(list(leaves(module(*built.args, **built.kwargs))))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        say(job, {"step": step, "loss": round(loss.item(), 6), "ms": round(1e3 * (time.perf_counter() - started), 1)})
    dist.barrier()
    dist.destroy_process_group()


def say(job: Job, entry: dict[str, object]) -> None:
    """One line on standard output, from rank 0."""
    if dist.get_rank() == 0:
        line = json.dumps(entry) if job.as_json else "  ".join(f"{k} {v}" for k, v in entry.items())
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
