"""Which collectives of a program run together as one.

In: one of a program's graphs and the size of a bucket.  Out: groups of its nodes.  Next: `bind.py`.

Many small collectives cost their latencies. Gradient reductions of one kind wait until they fill a bucket; the gathers
of a block's parameters start together, one block ahead of their use. What an op can write into the bucket costs nothing
to join; the rest is copied, which pays for small tensors only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.layout import Mesh, Step
from autopar.passes.in_place import WRITES, alone
from autopar.plan import Plan

REDUCTIONS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class Bucket:
    """Nodes of one kind, mesh axis and dtype, in graph order; if `early` they run at the first, else at the last."""

    nodes: tuple[fx.Node, ...]
    early: bool

    @property
    def place(self) -> fx.Node:
        """The node at which all of them run."""
        return self.nodes[0] if self.early else self.nodes[-1]

    @property
    def in_place(self) -> bool:
        """Whether what goes in and what comes out are the same memory."""
        return written(self.nodes[0])


def buckets(graph: fx.Graph, plan: Plan) -> list[Bucket]:
    """Groups of at most twice the size of a bucket on a device; every group has at least two members, each below it.

    Buckets are of `plan.bucket_bytes` where ops can write into them; what would be copied in joins up to
    `plan.copied_bytes`, which is also the size of a bucket that all its members are copied into.
    """
    mesh, large = plan.mesh, plan.bucket_bytes
    small = min(large, plan.copied_bytes)
    open_: dict[Any, list[fx.Node]] = {}
    filled: dict[Any, int] = {}
    done: list[Bucket] = []

    def close(key: Any) -> None:
        nodes = open_.pop(key, [])
        filled.pop(key, None)
        if len(nodes) > 1:
            done.append(Bucket(tuple(nodes), key[0] == "all_gather"))

    for node in graph.nodes:
        key = kind_of(node)
        if key is None or size_bytes(node, mesh) >= (large if writer(node) else small):
            continue
        if filled.get(key, 0) >= (large if written(node) else small):
            close(key)
        open_.setdefault(key, []).append(node)
        filled[key] = filled.get(key, 0) + size_bytes(node, mesh)
    for key in list(open_):
        close(key)
    order = {node: i for i, node in enumerate(graph.nodes)}
    return sorted(done, key=lambda bucket: order[bucket.place])


def kind_of(node: fx.Node) -> Any:
    """What a node may share a bucket with: equal keys; None for a node that runs alone."""
    step: Step | None = node.meta.get("step")
    if step is None or step.before.rows is not None:
        return None
    dtype = node.meta["val"].dtype
    if step.kind in REDUCTIONS and all(user.op == "output" for user in node.users):
        return step.kind, step.axis, dict(step.before.pending)[step.axis], dtype
    if step.kind == "all_gather" and node.args[0].op == "placeholder":  # type: ignore[union-attr]
        return step.kind, step.axis, block_of(node.meta.get("module", "")), dtype
    return None


def written(node: fx.Node) -> bool:
    """Whether a collective gives its result where its operand lies: sums of what can be sent as it is."""
    return node.meta["step"].kind == "all_reduce" and not node.meta["val"].is_complex()


def writer(node: fx.Node) -> fx.Node | None:
    """The op that makes the operand of a collective, where it may write it into memory that both share."""
    made: Any = node.args[0]
    return made if written(node) and made.target in WRITES and alone(made) else None


def block_of(module: str) -> str:
    """The repeated block that a submodule lies in: `h.3` of `h.3.attn.c_proj`; the module itself outside any."""
    found = re.match(r"(.*?\.?\d+)(\.|$)", module)
    return found.group(1) if found else module


def size_bytes(node: fx.Node, mesh: Mesh) -> int:
    """Bytes on a device of the larger end of a step."""
    step: Step = node.meta["step"]
    return max(step.before.local_numel(mesh), step.after.local_numel(mesh)) * int(node.meta["val"].dtype.itemsize)
