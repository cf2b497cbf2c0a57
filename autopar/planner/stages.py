"""The stage of a pipeline that runs each op.

In: a graph, its axes, a plan for every op.  Out: a number for every op.  Next: `passes/cut_stages.py`.

Forward is cut into runs of about equal seconds, each cut moved to the place near it where least has to be sent on.
Backward ops go where what they differentiate ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from torch import fx

from autopar.axes import Axes, computes
from autopar.cluster import ClusterSpec
from autopar.cost.price import op_s
from autopar.errors import UnsupportedError
from autopar.graph import Graph
from autopar.layout import STAGE
from autopar.plan import Plan
from autopar.rules.core import results

WINDOW = 0.3  # of a stage's seconds: how far a cut is moved for less to be sent


def without_parameters(graph: Graph) -> frozenset[str]:
    """The nodes that no parameter goes into: every stage can compute them from what the call is given."""
    found: set[fx.Node] = set()
    parameters = {entry.node for entry in graph.inputs if entry.kind in ("parameter", "tangent")}
    for node in graph.fx.nodes:
        if node.name not in parameters and found.issuperset(node.all_input_nodes):
            found.add(node)
    return frozenset(node.name for node in found)


def stages(graph: Graph, axes: Axes, plan: Plan, cluster: ClusterSpec) -> dict[str, int]:
    """The stage of every op into which a parameter goes."""
    once = without_parameters(graph)
    count = plan.mesh.size(STAGE)
    ops = [n for n in graph.fx.nodes if n.op == "call_function" and n.name not in once]
    forward = [n for n in ops if n.meta["phase"] == "forward"]
    if len(forward) < count:
        raise UnsupportedError(f"{len(forward)} ops cannot be cut into {count} stages")
    seconds = [op_s(n, axes, plan, cluster) if computes(n) else 0.0 for n in forward]
    cuts = [0, *places(seconds, sent(forward), count), len(forward)]
    found = {n.name: stage for stage, (a, b) in enumerate(pairwise(cuts)) for n in forward[a:b]}
    return found | backward_stages([n for n in ops if n.meta["phase"] == "backward"], found, forward)


def places(seconds: Sequence[float], sent_bytes: Sequence[int], count: int) -> Iterator[int]:
    """Where each stage but the first begins: of the ops within a window of an equal share, the one with least sent."""
    reached = list(accumulate(seconds, initial=0.0))
    share, before = reached[-1] / count, 0
    for stage in range(1, count):
        last = len(seconds) - (count - stage)
        able = range(before + 1, last + 1)
        off = {i: abs(reached[i] - stage * share) for i in able}
        near = [i for i in able if off[i] <= WINDOW * share] or [min(able, key=lambda i: off[i])]
        before = min(near, key=lambda i: (sent_bytes[i], off[i]))
        yield before


def sent(forward: Sequence[fx.Node]) -> list[int]:
    """Bytes that go over a cut in front of each op: what ran before it and is read from there on."""
    order = {node: i for i, node in enumerate(forward)}
    change = [0] * (len(forward) + 1)
    for node, i in order.items():
        last = max((order[user] for user in node.users if user in order), default=i)
        size = sum(t.numel() * t.dtype.itemsize for t in results(node) if t is not None)
        change[i + 1] += size
        change[last + 1] -= size
    return list(accumulate(change))


def backward_stages(
    backward: Sequence[fx.Node], known: Mapping[str, int], forward: Sequence[fx.Node]
) -> dict[str, int]:
    """Where the forward ops of the same module ran, if that is one stage; else where the values that it reads are.

    A gradient never goes to a later stage.
    """
    modules: dict[str, set[int]] = {}
    for node in forward:
        modules.setdefault(node.meta.get("module", ""), set()).add(known[node.name])
    found: dict[str, int] = {}
    for node in backward:
        here = modules.get(node.meta.get("module", ""), set())
        values = [known[x.name] for x in node.all_input_nodes if x.name in known]
        gradients = [found[x.name] for x in node.all_input_nodes if x.name in found]
        latest = min(gradients, default=max(known.values()))
        found[node.name] = min(latest, *here) if len(here) == 1 else min(latest, max(values, default=latest))
    return found
