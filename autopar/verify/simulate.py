"""Run a program's ranks in turns in this process, with collectives done in memory.

In: a `Program` and whole inputs.  Out: what every rank computes, and the whole tensors they stand for.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, ops

from autopar.layout import Layout, Mesh
from autopar.passes import lowered
from autopar.program import Program
from autopar.reduce_scatter import SUMMED

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


@dataclass(frozen=True)
class Post:
    """What one rank puts into a collective: its place in the group, of how many, and the value."""

    group: str
    index: int
    count: int
    value: Any


Running = Generator[Post, list[Any], tuple[Any, ...]]


def ran(
    graph: fx.Graph,
    attributes: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    mesh: Mesh,
    coordinate: dict[str, int],
    log: list[Any],
) -> Running:
    """Run one rank's bound graph; at every collective it posts its value and goes on with those of the group."""
    env: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "get_attr":
            env[node] = attributes[node.target]
        elif node.op == "output":
            return tuple(args[0])
        elif node.target is c10d.wait_tensor.default:
            env[node] = args[0]
        elif not str(node.target).startswith("_c10d_functional") and node.target is not SUMMED:
            env[node] = node.target(*args, **kwargs)
        else:
            group = args[-1]
            axis = group.split(":")[0]
            me, count = coordinate[axis], mesh.size(axis)
            log.append((node.target, axis, args[0].numel()))
            split = node.target is c10d.all_to_all_single.default
            parts = yield Post(group, me, count, args[0].split(list(args[2])) if split else args[0])
            env[node] = received(node.target, args, parts, me)
    raise AssertionError("a graph without an output")


def received(target: Any, args: Any, parts: list[Any], me: int) -> Tensor:
    """What a collective gives the rank at place `me`."""
    if target is c10d.all_to_all_single.default:
        return torch.cat([sent[me] for sent in parts])
    if target in (c10d.all_reduce.default, c10d.all_reduce_.default):
        return REDUCE[args[1]](parts)
    if target is c10d.all_gather_into_tensor.default:
        return torch.cat(parts)
    if target in (c10d.reduce_scatter_tensor.default, SUMMED):
        return REDUCE[args[1]](parts).chunk(len(parts))[me].clone()
    raise NotImplementedError(target)


def in_turns(ranks: Sequence[Running]) -> list[tuple[Any, ...]]:
    """Let every rank run until it posts; when a group is complete, its ranks go on. What each rank returns."""
    found: list[tuple[Any, ...] | None] = [None] * len(ranks)
    posted: dict[str, dict[int, tuple[int, Any]]] = {}
    ready: list[tuple[int, Any]] = [(rank, None) for rank in range(len(ranks))]
    while ready:
        rank, parts = ready.pop()
        try:
            post = ranks[rank].send(parts)
        except StopIteration as end:
            found[rank] = end.value
            continue
        board = posted.setdefault(post.group, {})
        board[post.index] = (rank, post.value)
        if len(board) == post.count:
            del posted[post.group]
            values = [board[i][1] for i in range(post.count)]
            ready += [(member, values) for member, _ in board.values()]
    assert not posted, f"ranks wait for each other in {', '.join(posted)}"
    return [result for result in found if result is not None]


def run(
    program: Program, values: Mapping[str, Tensor], tangents: Sequence[Tensor]
) -> tuple[list[Tensor | None], list[Any]]:
    """Whole results of `graph.outputs` when inputs have these whole values (by node name); and rank 0's collectives."""
    mesh, attributes = program.plan.mesh, program.graph.attributes
    logs: list[list[Any]] = [[] for _ in range(mesh.devices)]

    def work(rank: int) -> Running:
        at = mesh.coordinate(rank)
        forward, backward = lowered(program, at, {axis: group_of(axis, at) for axis in mesh.names})
        ins = [piece(values[n], program.input_layouts[n], mesh, at) for n in program.forward_inputs]
        out = yield from ran(forward, attributes, ins, mesh, at, logs[rank])
        count = len(out) - len(program.saved)
        gradients = yield from ran(backward, attributes, [*out[count:], *tangents], mesh, at, logs[rank])
        return (*out[:count], *gradients)

    found = in_turns([work(rank) for rank in range(mesh.devices)])
    results: list[Tensor | None] = []
    for i, layout in enumerate(program.output_layouts):
        results.append(None if layout is None else whole([f[i] for f in found], layout, mesh))
    return results, logs[0]


def group_of(axis: str, coordinate: Mapping[str, int]) -> str:
    """A name for the ranks along one mesh axis."""
    return axis + ":" + ",".join(f"{a}={c}" for a, c in coordinate.items() if a != axis)
