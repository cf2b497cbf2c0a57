"""`make gpu`: on a host with accelerators and NCCL, one report to paste.

Three questions, one section each, within 10 minutes on one host:
    verify   do all plan families give the single device's numbers (tiny models, float64)?
    times    how long is a step beside DDP and FSDP2, paired in one process group?
    memory   how far is the predicted peak from the allocator's?

With `--device cpu` it runs on gloo and the CPU, where there is no allocator to ask; that is how it is tested without a
GPU.
Exits with 1 when a family is off by more than 1e-9 or a section fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

import paired
import torch
from torch import nn

import autopar
from autopar import ClusterSpec, Plan, files
from autopar.models import gpt
from autopar.verify.pool import Pool
from autopar.verify.run import Harness
from autopar.verify.target import Target

SMALL = {"b": 8, "s": 32, "v": 211, "d": 48, "heads": 6, "f": 96, "layers": 2, "dropout": 0.0}
LARGE = {"b": 16, "s": 1024, "v": 50257, "d": 768, "heads": 12, "f": 3072, "layers": 12, "dropout": 0.0}
FAMILIES = ("ddp", "zero3", "megatron-sp", "auto")


@dataclass(frozen=True)
class Host:
    """What this run works on."""

    device: str
    world: int
    sizes: tuple[tuple[str, Any], ...]

    @property
    def backend(self) -> str:
        return "gloo" if self.device == "cpu" else torch.distributed.get_default_backend_for_device(self.device)

    def cluster(self) -> ClusterSpec:
        return (
            ClusterSpec.preset("cpu-gloo", devices=self.world)
            if self.device == "cpu"
            else ClusterSpec.detect(self.world)
        )

    def build(self) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        torch.manual_seed(0)
        return gpt.build(**dict(self.sizes))

    def here(self, rank: int) -> torch.device:
        """A rank's own device."""
        return torch.device("cpu") if self.device == "cpu" else torch.device(self.device, rank)


def deliver(host: Host, model: nn.Module, args: tuple[torch.Tensor, ...], plan: str) -> nn.Module:
    """The parallel module under a plan that is made already."""
    return autopar.parallelize(model, host.cluster(), example_inputs=args, plan=files.loads(plan))


def on_device(host: Host) -> torch.device:
    """Make a rank's device the current one."""
    device = host.here(torch.distributed.get_rank())
    if host.device != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device


def times_on_ranks(host: Host, plan: str, count: int) -> dict[str, list[float]]:
    """Step times of all contenders; what each rank does."""
    device = on_device(host)
    steps = paired.contenders(host.build, device, lambda model, args: deliver(host, model, args, plan))
    return paired.rounds(steps, count, device)


def peak_on_ranks(host: Host, plan: str) -> int:
    """Bytes that the allocator held at most in a step, or 0 where it cannot be asked; what each rank does."""
    device = on_device(host)
    model, args = host.build()
    module = deliver(host, model, args, plan)
    step = paired.stepper(module, args)
    step()
    if host.device == "cpu":
        return 0
    torch.accelerator.reset_peak_memory_stats(device)
    step()
    return int(torch.accelerator.max_memory_allocated(device))


def verify(host: Host) -> tuple[bool, list[str]]:
    """The parity table of a tiny model on the host's devices."""
    with Harness(host.world, backend=host.backend, device=host.device) as harness:
        report = harness.verify(Target.parse("autopar.models.gpt:divisible"), host.world, names(host.world))
    return report.exit_code == 0, report.text().splitlines()


def names(world: int) -> list[str]:
    """Families that mean something on this many devices."""
    return list(FAMILIES) if world > 1 else ["auto"]


def times(host: Host, plan: Plan, pool: Pool, count: int) -> list[str]:
    """Step times beside DDP and FSDP2."""
    return paired.report(pool.run(times_on_ranks, host, files.dumps(plan), count)[0])


def memory(host: Host, plan: Plan, pool: Pool) -> list[str]:
    """The predicted peak beside the allocator's."""
    peaks = pool.run(peak_on_ranks, host, files.dumps(plan))
    predicted = plan.costs["peak_bytes"]
    line = f"  predicted {predicted / 2**30:.3f} GiB"
    if not any(peaks):
        return [f"{line}; this device has no allocator to ask"]
    return [f"{line}, allocator {max(peaks) / 2**30:.3f} GiB, predicted / allocator {predicted / max(peaks):.3f}"]


def machine(host: Host) -> str:
    """Device, versions, date."""
    kind = "cpu" if host.device == "cpu" else torch.get_device_module(host.device).get_device_name(0)
    return (
        f"{host.world} x {kind}, torch {torch.__version__}, autopar {autopar.__version__}, {time.strftime('%Y-%m-%d')}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    parser.add_argument("--device", default=found.type if found else "cpu")
    parser.add_argument("--world", type=int, default=torch.accelerator.device_count() if found else 2)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    sizes = SMALL if options.device == "cpu" else LARGE
    host = Host(options.device, options.world, tuple(sizes.items()))
    print(f"# {machine(host)}\n# python benchmarks/gpu.py {' '.join(sys.argv[1:])}\n\n## verify")
    good, lines = verify(host)
    print("\n".join(lines))
    model, args = host.build()
    plan = autopar.plan(model, host.cluster(), example_inputs=args)
    print(f"\n## plan\n{plan}\n\n## times: gpt {sizes}, AdamW, float32")
    with Pool(host.world, timeout=400, backend=host.backend) as pool:
        print("\n".join(times(host, plan, pool, options.rounds)))
        print("\n## memory")
        print("\n".join(memory(host, plan, pool)))
    print("gpu: ok" if good else "gpu: A BOUND WAS MISSED")
    return 0 if good else 1


if __name__ == "__main__":
    import gpu  # under its own name, by which the ranks find its functions

    sys.exit(gpu.main())
