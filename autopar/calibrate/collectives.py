"""Seconds of every collective by size, along groups of every number of devices.

In: a process group, on every rank.  Out: `Moving`, one per collective, group and size.  Next: `run.py`.

Groups of a size all run at once, as they do along an axis of a mesh.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, ops
from torch.distributed.device_mesh import init_device_mesh

from autopar.device import SERIAL
from autopar.reduce_scatter import SUMMED

c10d = ops._c10d_functional
SIZES = (2**10, 2**14, 2**17, 2**19, 2**21, 2**23, 2**25)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LEAST, ENOUGH_S = 5, 0.12  # repetitions of each, and seconds after which there are enough


@dataclass(frozen=True)
class Moving:
    """Median seconds of one collective: of groups of `devices` ranks, of `bytes` at the larger end."""

    kind: str
    devices: int
    bytes: int
    seconds: float


def collectives(device: torch.device) -> list[Moving]:
    """Every collective in neighbouring groups of 2, 4, ... ranks, and of all."""
    world = dist.get_world_size()
    out = []
    for devices in groups(world):
        mesh = init_device_mesh(device.type, (world // devices, devices))
        group = mesh.get_group(1).group_name
        for kind in KINDS:
            for size in SIZES:
                out.append(Moving(kind, devices, size, median(call(kind, size, devices, group, device))))
    return out


def groups(world: int) -> list[int]:
    """Sizes of the groups to measure: powers of two that divide the number of ranks, and that number."""
    return [n for n in range(2, world + 1) if world % n == 0 and (n & (n - 1) == 0 or n == world)]


def call(kind: str, size: int, devices: int, group: str, device: torch.device) -> Callable[[], Tensor]:
    """One collective as a program runs it, on tensors of `size` bytes at its larger end."""
    count = max(devices, size // 4 // devices * devices)
    whole, part = torch.zeros(count, device=device), torch.zeros(count // devices, device=device)
    equal = [count // devices] * devices

    def scattered() -> Tensor:
        if device.type == SERIAL:
            done: Tensor = SUMMED(whole, "sum", devices, group)
            return done
        return waited(c10d.reduce_scatter_tensor(whole, "sum", devices, group))

    return {
        "all_reduce": lambda: waited(c10d.all_reduce_(whole, "sum", group)),
        "all_gather": lambda: waited(c10d.all_gather_into_tensor(part, devices, group)),
        "reduce_scatter": scattered,
        "all_to_all": lambda: waited(c10d.all_to_all_single(whole, equal, equal, group)),
    }[kind]


def waited(moved: Tensor) -> Tensor:
    done: Tensor = c10d.wait_tensor(moved)
    return done


def median(fn: Callable[[], Tensor]) -> float:
    """Seconds of a call; all ranks make equally many, as many as take rank 0 about `ENOUGH_S`."""
    fn()
    dist.barrier()
    started = time.perf_counter()
    fn()
    once = torch.tensor(time.perf_counter() - started)
    dist.broadcast(once, 0)
    seconds = []
    for _ in range(max(LEAST, min(200, int(ENOUGH_S / max(1e-6, once.item()))))):
        started = time.perf_counter()
        result = fn()
        if result.device.type != SERIAL:
            torch.accelerator.synchronize(result.device)
        seconds.append(time.perf_counter() - started)
    seconds.sort()
    return seconds[len(seconds) // 2]
