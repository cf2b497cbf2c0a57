"""Run a program's ranks as threads of this process, with collectives done in memory.

In: a `Program` and whole inputs.  Out: what every rank computes, and the whole tensors they stand for.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, ops

from autopar.layout import Layout, Mesh
from autopar.passes import bind
from autopar.program import Program

c10d = ops._c10d_functional
REDUCE = {
    "sum": lambda ts: torch.stack(ts).sum(0),
    "max": lambda ts: torch.stack(ts).amax(0),
    "min": lambda ts: torch.stack(ts).amin(0),
}


def piece(tensor: Tensor, layout: Layout, mesh: Mesh, coordinate: dict[str, int]) -> Tensor:
    """A rank's piece of a whole tensor; a pending sum is split 60/40 with terms of mixed signs."""
    for axis, kind in layout.pending:
        assert kind == "sum"
        tensor = term(tensor, coordinate[axis], mesh.size(axis))
    flat = tensor.reshape([n for dim in layout.factors for n in dim])
    for i, (place, _, _) in enumerate(layout.places()):
        start, length = layout.span(place, mesh, coordinate)
        flat = flat.narrow(i, start, length)
    return flat.reshape(layout.local_shape(mesh, coordinate)).clone()


def term(tensor: Tensor, index: int, count: int) -> Tensor:
    """Term `index` of `count` that add up to the tensor: noise on all but the last, which takes it back."""
    if not tensor.is_floating_point():
        return tensor if index == 0 else torch.zeros_like(tensor)
    generator = torch.Generator().manual_seed(tensor.numel())
    noise = [torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for _ in range(count - 1)]
    parts = [0.6 / (count - 1) * tensor + n.to(tensor.dtype) for n in noise]
    return parts[index] if index < count - 1 else tensor - sum(parts, torch.zeros_like(tensor))


def whole(pieces: Sequence[Tensor], layout: Layout, mesh: Mesh) -> Tensor:
    """The tensor that all ranks' pieces stand for; replicas must agree."""
    out = pieces[0].new_zeros([n for dim in layout.factors for n in dim])
    seen = torch.zeros_like(out, dtype=torch.bool)
    for rank, part in enumerate(pieces):
        coordinate = mesh.coordinate(rank)
        if layout.pending and any(coordinate[axis] for axis in mesh.names if axis not in layout.axes):
            continue  # a replica of a term that is counted already
        view, done = out, seen
        for i, (place, _, _) in enumerate(layout.places()):
            start, length = layout.span(place, mesh, coordinate)
            view, done = view.narrow(i, start, length), done.narrow(i, start, length)
        part = part.reshape(view.shape)
        kinds = {kind for _, kind in layout.pending}
        assert len(kinds) <= 1, "a tensor pending in two ways"
        if kinds & {"max", "min"}:
            better = torch.maximum if "max" in kinds else torch.minimum
            view.copy_(torch.where(done, better(view, part), part))
        elif not layout.pending:
            assert not done.any() or torch.allclose(view[done], part[done], rtol=1e-12, atol=1e-12, equal_nan=True)
            view.copy_(part)
        else:
            view.add_(part)
        done.fill_(True)
    return out.reshape(layout.shape)


class Exchange:
    """A barrier and a board per process group."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.boards: dict[str, list[Any]] = {}
        self.barriers: dict[str, threading.Barrier] = {}
        for rank in range(mesh.devices):
            for axis in mesh.names:
                name = self.group(axis, mesh.coordinate(rank))
                self.boards.setdefault(name, [None] * mesh.size(axis))
                self.barriers.setdefault(name, threading.Barrier(mesh.size(axis), timeout=30))

    def group(self, axis: str, coordinate: Mapping[str, int]) -> str:
        return axis + ":" + ",".join(f"{a}={c}" for a, c in coordinate.items() if a != axis)

    def swap(self, group: str, index: int, value: Any) -> list[Any]:
        self.boards[group][index] = value
        self.barriers[group].wait()
        found = list(self.boards[group])
        self.barriers[group].wait()
        return found


class Rank(fx.Interpreter):
    """One rank's bound graph."""

    def __init__(self, module: fx.GraphModule, exchange: Exchange, coordinate: dict[str, int], log: list[Any]) -> None:
        super().__init__(module)
        self.exchange, self.coordinate, self.log = exchange, coordinate, log

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not str(target).startswith("_c10d_functional"):
            return super().call_function(target, args, kwargs)
        if target is c10d.wait_tensor.default:
            return args[0]
        group = args[-1]
        axis = group.split(":")[0]
        me, n = self.coordinate[axis], self.exchange.mesh.size(axis)
        self.log.append((target, axis, args[0].numel()))
        if target is c10d.all_to_all_single.default:
            sent = self.exchange.swap(group, me, args[0].split(list(args[2])))
            return torch.cat([parts[me] for parts in sent])
        parts = self.exchange.swap(group, me, args[0])
        if target is c10d.all_reduce.default:
            return REDUCE[args[1]](parts)
        if target is c10d.all_gather_into_tensor.default:
            return torch.cat(parts)
        if target is c10d.reduce_scatter_tensor.default:
            return REDUCE[args[1]](parts).chunk(n)[me].clone()
        raise NotImplementedError(target)


def run(
    program: Program, values: Mapping[str, Tensor], tangents: Sequence[Tensor]
) -> tuple[list[Tensor | None], list[Any]]:
    """Whole results of `graph.outputs` when inputs have these whole values (by node name); and rank 0's collectives."""
    mesh = program.plan.mesh
    exchange = Exchange(mesh)
    found: list[Any] = [None] * mesh.devices
    logs: list[list[Any]] = [[] for _ in range(mesh.devices)]

    def work(rank: int) -> None:
        coordinate = mesh.coordinate(rank)
        groups = {axis: exchange.group(axis, coordinate) for axis in mesh.names}
        try:
            bound = bind(program, coordinate, groups)
            ins = [piece(values[n], program.input_layouts[n], mesh, coordinate) for n in program.forward_inputs]
            out = Rank(bound.forward, exchange, coordinate, logs[rank]).run(*ins)
            count = len(out) - len(program.saved)
            grads = Rank(bound.backward, exchange, coordinate, logs[rank]).run(*out[count:], *tangents)
            found[rank] = [*out[:count], *grads]
        except Exception as error:  # noqa: BLE001  (raised again by the caller, once every thread has ended)
            for barrier in exchange.barriers.values():
                barrier.abort()
            found[rank] = error

    threads = [threading.Thread(target=work, args=(r,)) for r in range(mesh.devices)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    errors = [e for e in found if isinstance(e, Exception)]
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    results: list[Tensor | None] = []
    for i, layout in enumerate(program.output_layouts):
        results.append(None if layout is None else whole([f[i] for f in found], layout, mesh))
    return results, logs[0]
