"""A model delivered under a plan family, trained beside the untouched one and compared with it.

In: a function at the top of a module that makes a model and one call, and the name of a family.  Out: largest gaps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar import tree
from autopar.random import replay
from autopar.verify.families import strategy

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
TINY = 1e-11

DATA = ("ddp", "zero1", "zero2", "zero3", "fsdp-keep")
MODEL = ("tensor", "megatron", "megatron-sp")
TWO_AXES = ("hsdp", "ddp x tensor", "zero3 x megatron")
ON_TWO = [(family, 2) for family in (*DATA, *MODEL, "auto")]
ON_FOUR = [(family, 4) for family in (*TWO_AXES, "zero3", "auto")]


def cluster() -> autopar.ClusterSpec:
    """As many CPU devices as there are ranks."""
    return autopar.ClusterSpec.preset("cpu-gloo", devices=dist.get_world_size())


def deliver(make: Callable[[], Made], family: str, **options: Any) -> tuple[Any, nn.Module, tuple[Any, ...], Any]:
    """(the parallel module, the single device's, args, kwargs)."""
    torch.manual_seed(0)
    model, args, kwargs = make()
    single = copy.deepcopy(model)
    forced = strategy(family, dist.get_world_size())
    ours = autopar.parallelize(
        model, cluster(), example_inputs=(args, kwargs), strategy=forced, optimizer=torch.optim.SGD, **options
    )
    return ours, single, args, kwargs


def whole(tensor: Any) -> Tensor:
    """The whole plain tensor, complex numbers as pairs."""
    full = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    return torch.view_as_real(full) if full.is_complex() else full


def gap(ours: Any, theirs: Any) -> float:
    """Largest difference, relative where numbers are above 1; NaN and missing tensors are infinitely far."""
    if ours is None or theirs is None:
        return 0.0 if ours is None and theirs is None else float("inf")
    a, b = whole(ours).double(), whole(theirs).double()
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    scale = max(1.0, float(b.abs().max()))
    return float((a - b).abs().nan_to_num(nan=float("inf")).max()) / scale


def pairs_gap(ours: Iterable[Any], theirs: Iterable[Any]) -> float:
    """Largest gap of two equally long rows of tensors."""
    return max((gap(a, b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def gradients_gap(ours: nn.Module, theirs: nn.Module) -> float:
    """Largest gap of gradients; one that the other side lacks counts as zero, but must be zero."""
    worst = 0.0
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        if (a.grad is None) != (b.grad is None):
            present = a.grad if a.grad is not None else b.grad
            assert present is not None
            worst = max(worst, float(whole(present).abs().max()))
        else:
            worst = max(worst, gap(a.grad, b.grad))
    return worst


def state_gap(ours: nn.Module, theirs: nn.Module) -> float:
    """Largest gap of parameters and buffers."""
    parameters = pairs_gap(ours.parameters(), theirs.parameters())
    return max(parameters, pairs_gap(ours.buffers(), theirs.buffers()))


def leaves(out: Any) -> list[Any]:
    """Tensors and constants of a result, in order."""
    return tree.flatten(out)[0]


def loss_of(out: Any) -> Tensor:
    """The first scalar that has a gradient."""
    return next(x for x in leaves(out) if isinstance(x, Tensor) and x.dim() == 0 and x.requires_grad)


def outputs_gap(ours: Any, theirs: Any) -> float:
    """Largest gap of two results, which must have one structure."""
    (a, tree_a), (b, tree_b) = tree.flatten(ours), tree.flatten(theirs)
    assert tree_a == tree_b
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if isinstance(y, Tensor):
            worst = max(worst, gap(x, y))
        else:
            assert x == y
    return worst


def drawing(module: nn.Module, step: int, random: bool) -> AbstractContextManager[Any]:
    """Inside, the single device's module draws what the parallel one draws."""
    return replay(0, step) if random else nullcontext()


def trained(
    ours: Any,
    single: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    steps: int = 3,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    random: bool = False,
) -> dict[str, float]:
    """Both modules trained; the largest gap of each kind, also of replicated gradients and parameters across ranks."""
    make = optimizer or (lambda p: torch.optim.SGD(p, lr=0.1))
    optimizers = [make(m.parameters()) for m in (ours, single)]
    worst: dict[str, float] = {}
    for step in range(steps):
        out = ours(*args, **kwargs)
        loss_of(out).backward()
        with drawing(single, step, random):
            expected = single(*args, **kwargs)
        loss_of(expected).backward()
        found = {"outputs": outputs_gap(out, expected), "gradients": gradients_gap(ours, single)}
        found["ranks"] = max(apart(p.grad) for p in ours.parameters() if p.grad is not None)
        for each in optimizers:
            each.step()
            each.zero_grad()
        found["state"] = state_gap(ours, single)
        found["ranks"] = max(found["ranks"], *(apart(p) for p in ours.parameters()))
        worst = {kind: max(worst.get(kind, 0.0), value) for kind, value in found.items()}
    return worst


def apart(tensor: Tensor) -> float:
    """How far copies on different ranks are from rank 0's, for a tensor that is nowhere cut; 0 for others."""
    if not isinstance(tensor, DTensor) or not all(p.is_replicate() for p in tensor.placements):
        return 0.0
    local = tensor.to_local().detach().contiguous()
    rows = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, local)
    return max((float((row - rows[0]).abs().max()) for row in rows if row.numel()), default=0.0)


def parity(make: Callable[[], Made], family: str, **options: Any) -> dict[str, float]:
    """Three steps under a family."""
    random = bool(options.pop("random", False))
    ours, single, args, kwargs = deliver(make, family)
    return trained(ours, single, args, kwargs, random=random, **options)
