"""What each rank does for one family: train the delivered module, compare, count.

In: a target, a plan as JSON, the file of the reference.  Out: a `Finding`, sent back to the harness.  Next: `run.py`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar import files
from autopar.axes import Axes, analyse
from autopar.graph import Graph
from autopar.layout import STAGE
from autopar.moves import Moved, moves
from autopar.plan import Plan
from autopar.program import Program
from autopar.verify.compare import Comparison, Error
from autopar.verify.count import Counts
from autopar.verify.reference import read
from autopar.verify.steps import RATES, train
from autopar.verify.target import Target


@dataclass(frozen=True)
class Finding:
    """One rank's part of a row.

    counted    (kind, mesh axis, phase) -> (collectives, bytes) of one step
    told       what the program tells of them beforehand
    flops      of one step, on this rank
    memory     bytes stored on this rank: parameters, gradients, state of AdamW
    """

    errors: dict[str, Error]
    counted: dict[tuple[str, str, str], tuple[int, int]]
    told: dict[tuple[str, str, str], Moved]
    flops: int
    memory: dict[str, int]


@lru_cache(maxsize=4)
def captured(target: Target) -> Graph:
    """The graph of a target in float64, as the planner and the passes want it; made once a process."""
    from autopar.capture import capture
    from autopar.passes import copy_views

    built = target.build(double=True)
    return copy_views(capture(built.model, built.args, dict(built.kwargs), double=True))


@lru_cache(maxsize=4)
def analysed(target: Target) -> Axes:
    """The axes of a target's graph."""
    return analyse(captured(target))


def check(
    target: Target, plan_json: str, reference: str, optimizers: Sequence[str], steps: int, device: str = "cpu"
) -> Finding:
    """Train with every optimizer and compare everything with the record in `reference`.

    Collectives and operations are counted in the second step; those of the others are the same. The very last one is
    compared as whole tensors, as a user would gather them, the others piece by piece.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    plan = files.loads(plan_json)
    comparison = Comparison(read(reference), RATES)
    counts, memory = Counts(), dict[str, int]()
    built = target.build(double=True)
    module = deliver(built.model, captured(target), analysed(target), plan, target.seed, device)
    restart = restarter(module)
    axes = group_names(module)
    last, turns = f"{optimizers[-1]}/{steps - 1}/", Counter[str]()

    def see(key: str, tensor: torch.Tensor) -> None:
        comparison.see(key, tensor, whole=key.startswith(last))

    def during(phase: str) -> AbstractContextManager[Any]:
        turns[phase] += 1
        return counts.during(phase, axes) if turns[phase] == min(2, steps) else nullcontext()

    for optimizer in optimizers:
        restart()

        def after(torch_optimizer: torch.optim.Optimizer, optimizer: str = optimizer) -> None:
            if optimizer == "adamw":
                memory.update(stored(module, torch_optimizer))

        train(module, built.args, built.kwargs, optimizer, steps=steps, see=see, during=during, after=after)
    counted = {key: (number, counts.bytes[key]) for key, number in counts.calls.items()}
    return Finding(
        comparison.finish(),
        counted,
        moves(program_of(module), module._autopar.settled().coordinate.get(STAGE, 0)),
        sum(counts.flops.values()),
        memory,
    )


def restarter(module: Any) -> Callable[[], None]:
    """A function that brings the module back to where it is now, through `load_state_dict`."""
    state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}

    def restart() -> None:
        module.load_state_dict(state)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])
        module.rng_step = 0

    return restart


def deliver(model: torch.nn.Module, graph: Graph, axes: Axes, plan: Plan, seed: int, device: str) -> Any:
    """The module a user would get, from a graph that is captured already."""
    from autopar.runtime.compiler import Fixed
    from autopar.runtime.module import ParallelModule

    return ParallelModule(model, graph, plan, compiler=Fixed(seed, device, axes))


def program_of(module: Any) -> Program:
    """The program of the only kind of call that was made."""
    (step,) = module._autopar.programs.values()
    program: Program = step.program
    return program


def group_names(module: Any) -> dict[str, str]:
    """Name of the process group of every mesh axis -> the axis."""
    mesh = module.device_mesh
    return {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names}


def stored(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of what a step leaves on this rank."""
    parameters = list(module.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor) and t.dim()]
    return {
        "parameters": sum(map(local_bytes, parameters)),
        "gradients": sum(map(local_bytes, gradients)),
        "state": sum(map(local_bytes, state)),
    }


def local_bytes(tensor: torch.Tensor) -> int:
    """Bytes of this rank's piece."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().nbytes()
