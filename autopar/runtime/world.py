"""The process group: joined, checked against the cluster, made into a mesh; and failures that all ranks share.

In: the environment that `torchrun` sets, a `Mesh`.  Out: a `World`.  Next: `guards.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import errors
from autopar._torch import serial_gloo
from autopar.errors import AutoparError, ClusterError
from autopar.layout import Mesh

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}


@dataclass(frozen=True)
class World:
    """Who this process is, and how it talks about things that are not tensors of the model.

    device    where its tensors live
    control   a group that moves small CPU tensors (None for the default one)
    """

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None = None

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """[world, n] int64: the same-sized CPU vector of every rank."""
        return self.post(values)()

    def post(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """As `gather`, but goes on at once: what it returns gives the result when it is called."""
        if self.size == 1:
            return lambda: values.unsqueeze(0)
        sent, out = values.contiguous(), torch.empty(self.size * values.numel(), dtype=torch.int64)
        work = dist.all_gather_single(out, sent, group=self.control, async_op=True)
        assert work is not None

        def result() -> torch.Tensor:
            work.wait()
            return out.view(self.size, sent.numel())

        return result

    def gather_text(self, text: str) -> list[str]:
        """The text of every rank."""
        data = torch.tensor(list(text.encode()), dtype=torch.int64)
        lengths = self.gather(torch.tensor([len(data)])).flatten().tolist()
        padded = torch.zeros(max(1, *lengths), dtype=torch.int64)
        padded[: len(data)] = data
        rows = self.gather(padded)
        return [bytes(row[:n].tolist()).decode() for row, n in zip(rows, lengths, strict=True)]

    def broadcast_text(self, text: str) -> str:
        """Rank 0's text on every rank."""
        if self.size == 1:
            return text
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0, group=self.control)
        data = data if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.control)
        return bytes(data.tolist()).decode()

    @contextmanager
    def agreeing(self, doing: str) -> Iterator[None]:
        """Run a part that may fail on one rank alone; if it does, every rank raises."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below, once the other ranks know
            problem = error
        if not bool(self.gather(torch.tensor([int(problem is not None)])).any()):
            return
        note = "" if problem is None else json.dumps([type(problem).__name__, str(problem)])
        told = self.gather_text(note)
        if problem is not None:
            raise problem
        rank = next(r for r, text in enumerate(told) if text)
        kind, message = json.loads(told[rank])
        known = getattr(errors, kind, AutoparError)
        raise known(f"{doing} failed on rank {rank}: {message}")


def share_cores() -> None:
    """Let the ranks that this process is, or starts, share cores without preempting each other.

    Gloo's thread that receives asks for a lock again and again while it is held; where it may preempt the thread that
    holds it, it does so for a whole time slice. A process that was given another policy keeps it.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def join(device_type: str, devices: int) -> World:
    """Enter the process group that `torchrun` prepared, or one of a single process, and check its size on all ranks."""
    alone = not dist.is_initialized() and not ("WORLD_SIZE" in os.environ and "RANK" in os.environ)
    if alone and devices != 1:
        raise ClusterError(wrong_size(devices, 1))
    backend = BACKENDS.get(device_type, "gloo")
    if alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    elif not dist.is_initialized():
        dist.init_process_group(backend)
    world = here(device_type)
    told = world.gather(torch.tensor([devices])).flatten().tolist()
    wrong = next((rank for rank, number in enumerate(told) if number != world.size), None)
    if wrong is not None:
        raise ClusterError(wrong_size(told[wrong], world.size, "" if len(set(told)) == 1 else f" on rank {wrong}"))
    return world


def wrong_size(devices: int, size: int, where: str = "") -> str:
    """What to say of a cluster that is not what runs."""
    running = "1 process is" if size == 1 else f"{size} processes are"
    return (
        f"the cluster has {devices} devices{where}, but {running} running\n"
        f"  try: torchrun --nproc-per-node {devices} ..., or a cluster of {size} devices"
    )


def here(device_type: str) -> World:
    """The process group that stands already."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if device_type == "cpu":
        device = torch.device("cpu")
    else:
        device = torch.device(device_type, int(os.environ.get("LOCAL_RANK", rank)))
        torch.get_device_module(device_type).set_device(device)
    control = None if dist.get_backend() == "gloo" or size == 1 else dist.new_group(backend="gloo")
    return World(rank, size, device, control)


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """The one mesh that every parameter is placed on.

    Modules of one process share it, and with it the process groups of its axes and their threads: torch keeps groups
    until the process leaves the default one.
    """
    if _made.group is not dist.group.WORLD:
        _made.group, _made.meshes = dist.group.WORLD, {}
    if (device_type, mesh) not in _made.meshes:
        serial = dist.get_backend() == "gloo" and device_type == "cpu" and mesh.devices > 1
        _made.meshes[device_type, mesh] = init_device_mesh(
            device_type,
            mesh.sizes,
            mesh_dim_names=mesh.names,
            backend_override=dict.fromkeys(mesh.names, serial_gloo()) if serial else None,
        )
    return _made.meshes[device_type, mesh]


@dataclass
class _Made:
    """The meshes of one default process group."""

    group: object = None
    meshes: dict[tuple[str, Mesh], DeviceMesh] = field(default_factory=dict)


_made = _Made()


def group_names(mesh: DeviceMesh) -> dict[str, str]:
    """Mesh axis -> name of this rank's process group along it."""
    assert mesh.mesh_dim_names is not None
    return {axis: mesh.get_group(axis).group_name for axis in mesh.mesh_dim_names}
