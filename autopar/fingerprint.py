"""What a plan was made for, as a few short texts, and whether that is what stands here.

In: a graph, a cluster, options.  Out: a mapping that is saved with the plan.  Next: `files.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.graph import Graph
from autopar.plan import Plan
from autopar.rules.core import RULES

# compared in this order, so that a refusal names the cause rather than what follows from it
FIELDS = ("autopar", "torch", "ortools", "cluster", "options", "inputs", "parameters", "rules", "graph")


def digest(value: Any) -> str:
    """A short hash of a JSON-like value, the same in every process."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def fingerprint(graph: Graph, cluster: Any, options: Mapping[str, Any] | None = None) -> dict[str, str]:
    """What a plan for `graph` on `cluster` depends on.

    cluster   a pydantic model or anything that prints what it is
    options   whatever else was asked of the planner (strategy, memory, optimizer, ...)
    """
    described = cluster.model_dump_json() if hasattr(cluster, "model_dump_json") else str(cluster)
    return {
        **versions(),
        "cluster": described,
        "options": ", ".join(f"{k}={v}" for k, v in sorted((options or {}).items()) if v is not None),
        "inputs": "; ".join(ends(graph, "input")),
        "parameters": digest(list(ends(graph, "parameter"))),
        "rules": "; ".join(sorted(set(given_rules(graph)))),
        "graph": digest(list(structure(graph.fx))),
    }


def versions() -> dict[str, str]:
    """Versions of the software that plans depend on."""
    import autopar

    return {"autopar": autopar.__version__, "torch": torch.__version__, "ortools": version("ortools")}


@cache
def source_digest() -> str:
    """A hash of autopar's own code, so that no cached plan outlives the planner that made it."""
    root = Path(__file__).parent
    files = sorted({path.resolve() for path in root.glob("**/*.py")} | {p.resolve() for p in root.glob("*/*.py")})
    return digest([path.read_text(encoding="utf-8") for path in files])


def ends(graph: Graph, kind: str) -> Iterator[str]:
    """`args[0]: i64[12, 10]` for every placeholder of a kind."""
    nodes = graph.nodes
    for entry in graph.inputs:
        if entry.kind == kind:
            frozen = " frozen" if kind == "parameter" and not entry.trainable else ""
            yield f"{entry.name}: {type_text(nodes[entry.node].meta['val'])}{frozen}"


def given_rules(graph: Graph) -> Iterator[str]:
    """`mine.scale.default: b d, d -> b d` for every op whose rule is a user's."""
    for node in graph.fx.nodes:
        known = RULES.get(node.target) if node.op == "call_function" else None
        if known is not None and known.given:
            yield f"{node.target}: {known.given}"


def type_text(value: torch.Tensor) -> str:
    """`f32[64, 512]`."""
    short = str(value.dtype).removeprefix("torch.").replace("float", "f").replace("uint", "u").replace("int", "i")
    return f"{short}[{', '.join(str(s) for s in value.shape)}]"


def structure(graph: fx.Graph) -> Iterator[list[str]]:
    """Every node as text, operands by position, so that names do not matter."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    opaque: dict[str, str] = {}  # the number in an opaque module's key counts what its process has seen

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{position[value]}"
        if isinstance(value, (tuple, list)):
            return "[" + ",".join(text(v) for v in value) + "]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}={text(v)}" for k, v in sorted(value.items())) + "}"
        return str(value)

    for node in graph.nodes:
        target = "" if node.op in ("placeholder", "output") else str(node.target)
        args = node.args
        if target.startswith("autopar.opaque"):
            key = str(args[0])
            args = (opaque.setdefault(key, f"{key.partition('#')[0]}#{len(opaque)}"), *args[1:])
        yield [node.op, target, text(args), text(node.kwargs)]


def check(plan: Plan, expected: Mapping[str, str], fields: Sequence[str] = FIELDS) -> None:
    """Refuse a plan that was made for something else, and name the first of these fields that differs."""
    if not plan.fingerprint:
        raise PlanError("the plan does not tell what it was made for (no fingerprint); plan again")
    for field in fields:
        theirs, ours = plan.fingerprint.get(field, ""), expected.get(field, "")
        if theirs != ours:
            if field == "cluster":
                raise PlanError(
                    f"the plan was made for another cluster: {differing(theirs, ours)}\n"
                    "  try: the cluster that it was made for (`autopar run --plan FILE` alone takes that), plan again "
                    "for this one (`autopar plan --cluster ... --devices ...`), or "
                    'reuse="placements" on as many devices'
                )
            raise PlanError(
                f"the plan was made for something else: {field}: {theirs or 'none'} in the plan, "
                f"{ours or 'none'} here\n"
                '  try: plan again, or load it with reuse="placements" to keep where its parameters are and price the '
                "rest anew"
            )


def differing(theirs: str, ours: str) -> str:
    """`devices 4 in the plan, 2 here`."""
    return "; ".join(f"{path} {a} in the plan, {b} here" for path, a, b in differences(theirs, ours))


def differences(one: str, other: str) -> list[tuple[str, str, str]]:
    """(path, value here, value there) of every field in which two clusters, as they stand in a fingerprint, differ."""
    if one == other:
        return []
    try:
        here, there = dict(fields_of(json.loads(one))), dict(fields_of(json.loads(other)))
    except ValueError:
        return [("cluster", one or "none", other or "none")]
    pairs = [(path, str(here.get(path, "none")), str(there.get(path, "none"))) for path in {**here, **there}]
    return [(path, a, b) for path, a, b in pairs if a != b]


def fields_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every plain value in nested JSON: `device.type`, `links.0.devices`."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from fields_of(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
