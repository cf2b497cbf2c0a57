"""Training steps as an expert writes them with torch alone: what autopar is measured against.

In: a model that every rank holds whole, the whole batch.  Out: (module, this rank's part of the batch).
Used by `step_time.py`. Nothing here knows autopar.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

Batch = tuple[Tensor, ...]


def part(batch: Batch) -> Batch:
    """This rank's rows."""
    return tuple(t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch)


def ddp(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch]:
    """DDP whose graph does not change, gradients in its buckets, which are large since nothing overlaps on CPU."""
    wrapped = DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True, bucket_cap_mb=100)
    return wrapped, part(batch)


def fsdp2(model: Any, batch: Batch) -> tuple[nn.Module, Batch]:
    """FSDP2 by blocks; the root is not gathered again in backward."""
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model, reshard_after_forward=False), part(batch)


def tensor(model: Any, batch: Batch) -> tuple[nn.Module, Batch]:
    """Heads and hidden widths cut, one all-reduce behind attention and one behind the perceptron."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        **dict.fromkeys(("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up"), ColwiseParallel()),
        **dict.fromkeys(("attn.out", "mlp.down"), RowwiseParallel()),
    }
    for block in model.blocks:
        block.attn.h //= mesh.size()
        block.attn.g //= mesh.size()
        parallelize_module(block, mesh, plan)
    return model, batch


def stepper(model: nn.Module, batch: Batch) -> tuple[Any, torch.optim.Optimizer]:
    """A function that runs one step and returns its loss, and the optimizer, fused where every parameter is alike."""
    parameters = list(model.parameters())
    alike = len({type(p) for p in parameters}) == 1
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=alike, foreach=None if alike else False)

    def step() -> Tensor:
        loss: Tensor = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, optimizer
