"""`autopar calibrate`: what this machine is, as a cluster file.

In: a number of devices.  Out: `ClusterSpec`.  Next: `autopar/cluster.py`, which reads such files.

One host: the ranks are started here.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from autopar.calibrate.collectives import Moving, collectives
from autopar.calibrate.fit import curves, products
from autopar.calibrate.overhead import Overhead, overheads
from autopar.calibrate.pace import Pace
from autopar.calibrate.probe import Probed, Probing
from autopar.cluster import ClusterSpec, parse
from autopar.curve import Curve
from autopar.device import ANY, Device, Products
from autopar.verify.pool import Pool

PEAK_SIZE = 768
"""Of the products that tell how fast a dtype is that the probe does not run in."""

Progress = Callable[[str], None]


def calibrate(
    devices: int | None = None, dtypes: Sequence[str] = ("float32",), progress: Progress = print
) -> ClusterSpec:
    """Measure this machine. `devices`: how many ranks; by default its accelerators or, without any, twice its cores."""
    cpu = not torch.accelerator.is_available()
    at_once = len(os.sched_getaffinity(0)) if cpu else torch.accelerator.device_count()
    base = ClusterSpec.detect(devices or (2 * at_once if cpu else at_once))
    world, kind = base.devices, base.device.type
    at_once = min(at_once, world)
    with Pool(world, timeout=600, backend="gloo" if cpu else "nccl") as pool:
        found: dict[str, tuple[Probed, Probed, float]] = {}
        for dtype in dtypes:
            progress(f"timing every operation in {dtype}, on one device and on {at_once} at once")
            found[dtype] = pool.run(probed, dtype, kind, world=at_once)[0]
        progress("timing products of matrices in every dtype")
        peaks = pool.run(peak_rates, tuple(base.device.flops_per_s), kind, world=at_once)[0]
        progress("timing what a step costs beside its operations")
        costs = {n: pool.run(on_device, overheads, kind, world=n)[0] for n in dict.fromkeys((1, at_once))}
        moving: dict[int, list[Moving]] = {}
        for n in dict.fromkeys((at_once, world)):
            if n > 1:
                progress(f"timing collectives of {n} devices")
                moving[n] = pool.run(on_device, collectives, kind, world=n)[0]
    device = described(base.device, found, peaks, costs, at_once)
    links = [{**base.links[0].model_dump(), "devices": world, **linked(moving)}]
    data = {**base.model_dump(mode="json"), "device": device.model_dump(mode="json"), "links": links}
    return parse({**data, "name": f"calibrated {kind}"}, "calibrate")


# --- on the ranks -----------------------------------------------------------------------------------------------------


def device_of(kind: str) -> torch.device:
    """This rank's device."""
    if kind == "cpu":
        return torch.device(kind)
    index = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def on_device(measure: Callable[..., Any], kind: str, *args: Any) -> Any:
    return measure(device_of(kind), *args)


def probed(dtype: str, kind: str) -> tuple[Probed, Probed, float]:
    """Every op while this device alone is at work, and while all are; seconds of the fixed work among the latter."""
    device = device_of(kind)
    probing, pace = Probing(getattr(torch, dtype), device), Pace(device)
    dist.barrier()
    alone = probing.run(pace) if dist.get_rank() == 0 else None
    dist.barrier()
    both = probing.run(pace)
    return alone or both, both, statistics.median(probing.paces)


def peak_rates(dtypes: Iterable[str], kind: str) -> dict[str, float]:
    """flop/s of a large product in every dtype that the device has."""
    device, out = device_of(kind), {}
    for dtype in dtypes:
        a = torch.randn(PEAK_SIZE, PEAK_SIZE).to(device, getattr(torch, dtype))
        timer = Timer("a @ a", globals={"a": a}, num_threads=1)
        out[dtype] = 2 * PEAK_SIZE**3 / timer.blocked_autorange(min_run_time=0.2).median
    return out


# --- what it means ----------------------------------------------------------------------------------------------------


def described(
    base: Device,
    found: dict[str, tuple[Probed, Probed, float]],
    peaks: dict[str, float],
    costs: dict[int, list[Overhead]],
    at_once: int,
) -> Device:
    """A device as it was measured."""
    kernels: dict[str, dict[str, Curve]] = defaultdict(dict)
    fits = {}
    for dtype, (_, both, _) in found.items():
        fits[dtype] = products([s for s in both.samples if s.work.product and not s.work.pieces])
        for kind, curve in curves(both.samples).items():
            kernels[kind][dtype] = curve
    first = next(iter(found))
    totals = [sum(s.seconds for s in one.samples) for one in found[first][:2]]
    size, seconds = kernels[ANY][first].root[-1]
    per_step, per_parameter, per_byte = outside(costs[1])
    kernels["optimizer"][first] = Curve(((1e3, 1e3 * per_byte), (1e9, 1e9 * per_byte)))
    measured = {
        "flops_per_s": {**peaks, **{dtype: fit.flops_per_s for dtype, fit in fits.items()}},
        "products": {dtype: Products(half=fit.half) for dtype, fit in fits.items()},
        "kernels": dict(kernels),
        "memory_bytes_per_s": size / seconds,
        "launch_s": fits[first].launch_s,
        "view_s": found[first][1].view_s,
        "step_s": per_step,
        "parameter_s": per_parameter,
        "agree_s": max(0.0, outside(costs[at_once])[0] - per_step),
        "pace_s": found[first][2],
        "at_once": at_once,
        "alone": min(1.0, totals[0] / totals[1]),
    }
    return base.model_copy(update=measured)


def outside(costs: list[Overhead]) -> tuple[float, float, float]:
    """Seconds of a step, of every parameter in it, and of an optimizer a byte that it touches (7 an element's byte)."""
    few, many, large = costs
    more = many.parameters - few.parameters
    per_parameter = max(0.0, (many.optimizer_s + many.rest_s - few.optimizer_s - few.rest_s) / more)
    per_byte = max(1e-13, (large.optimizer_s - few.optimizer_s) / (7 * (large.bytes - few.bytes)))
    per_step = max(0.0, few.optimizer_s + few.rest_s - few.parameters * per_parameter)
    return per_step, per_parameter, per_byte


def linked(moving: dict[int, list[Moving]]) -> dict[str, Any]:
    """A link: its curves, and the latency and bandwidth of a ring that fit them best."""
    measured = []
    for world, rows in moving.items():
        named: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        for row in rows:
            named[row.kind, row.devices].append((float(row.bytes), row.seconds))
        for (kind, devices), points in named.items():
            measured.append({"collective": kind, "devices": devices, "beside": world, "points": points})
    rows = [r for found in moving.values() for r in found if r.kind == "all_reduce"]
    latency = statistics.median(
        r.seconds / (2 * (r.devices - 1)) for r in rows if r.bytes == min(x.bytes for x in rows)
    )
    rates = [2 * (r.devices - 1) / r.devices * r.bytes / r.seconds for r in rows if r.bytes >= 2**21]
    return {"latency_s": latency, "bytes_per_s": statistics.median(rates), "measured": measured}
