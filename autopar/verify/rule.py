"""`autopar verify-rule`: the rules of a user's ops, proved by running every cut in this process.

In: `module:function`, a function that runs the ops on example tensors.  Out: `RuleReport`: a table, JSON, an exit code.
Next: `cuts.py`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar import _torch
from autopar.axes import analyse, computes
from autopar.choices import choices, fills
from autopar.errors import AutoparError, InputError
from autopar.fingerprint import type_text
from autopar.graph import Graph
from autopar.layout import Mesh
from autopar.rules.core import RULES, operands
from autopar.rules.table import lookup
from autopar.verify.cuts import Cut, cuts, single
from autopar.verify.target import found

OK, WRONG = 0, 1
MESHES = (Mesh(("data",), (2,)), Mesh(("data",), (3,)), Mesh(("data", "model"), (2, 2)))
MOST_S = 0.05  # of enumerating the choices of one op on two mesh axes
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Call:
    """One op on one set of operands, as it ran."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any


class Recording(_torch.DispatchMode):  # type: ignore[no-untyped-call]
    """Inside, calls of ops that are not torch's own, or have a rule of the user's, are kept, each kind of call once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[Any, Call] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        own = op in RULES and RULES[op].given
        if own or op.namespace not in ("aten", "prim", "prims", "autopar"):
            seen = tuple((t.shape, t.dtype) for t in _torch.tensors_in((args, kwargs)))
            self.calls.setdefault((op, seen), Call(op, args, kwargs or {}, result))
        return result


@dataclass(frozen=True)
class Proof:
    """One call under every cut.

    ends      the names of operands and results
    choices, enumeration_s   how many the op has on two mesh axes of two devices, and how long it takes to list them
    notes     what the example leaves untried
    """

    call: str
    rule: str
    ends: tuple[str, ...]
    cuts: tuple[Cut, ...]
    bound: float
    choices: int
    enumeration_s: float
    notes: tuple[str, ...] = ()

    @property
    def wrong(self) -> list[Cut]:
        return [cut for cut in self.cuts if not cut.error <= self.bound]

    def lines(self) -> Iterator[str]:
        """The op, its rule, a line a cut, what is wrong; cuts by two mesh axes are pairs of these and share a line."""
        yield f"{self.call}\n  {self.rule}"
        alone, pairs = ([c for c in self.cuts if (len(c.mesh.names) > 1) is two] for two in (False, True))
        rows = [("mesh", "cut", *self.ends, "error")]
        rows += [(str(c.mesh), str(c), *map(str, (*c.choice.inputs, *c.choice.outputs)), told(c)) for c in alone]
        worst = max(pairs, key=lambda c: c.error)
        rows.append((str(worst.mesh), f"{len(pairs)} pairs of these", *("" for _ in self.ends), told(worst)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            yield "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for cut in self.wrong:
            why = cut.problem or f"off by {cut.error:.1e}, the bound is {self.bound:g}"
            yield f"  WRONG: {cut} on {cut.mesh}: {why}"
        yield f"  {self.choices} choices on 2 mesh axes, listed in {1e3 * self.enumeration_s:.1f} ms"
        if self.enumeration_s > MOST_S:
            yield f"  note: that is above {1e3 * MOST_S:.0f} ms; name letters that nobody cuts in whole"
        yield from (f"  note: {note}" for note in self.notes)


@dataclass(frozen=True)
class RuleReport:
    """What was proved of every op; `without`: ops of the user's that have no rule."""

    proofs: tuple[Proof, ...]
    without: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return WRONG if any(proof.wrong for proof in self.proofs) else OK

    def text(self) -> str:
        """The table of every op, and the verdict."""
        lines = [line for proof in self.proofs for line in proof.lines()]
        lines += [f"{op} has no rule: it runs whole on every device" for op in self.without]
        total, wrong = (sum(len(found) for found in kind) for kind in zip(*((p.cuts, p.wrong) for p in self.proofs)))
        return "\n".join([*lines, f"{'WRONG' if wrong else 'ok'}: {total - wrong} of {total} cuts equal the whole op"])

    def json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "exit_code": self.exit_code,
            "without_rule": list(self.without),
            "ops": [
                {
                    "op": proof.call,
                    "rule": proof.rule,
                    "bound": proof.bound,
                    "choices": proof.choices,
                    "enumeration_s": proof.enumeration_s,
                    "cuts": [cut_json(proof, cut) for cut in proof.cuts],
                }
                for proof in self.proofs
            ],
        }


def cut_json(proof: Proof, cut: Cut) -> dict[str, Any]:
    layouts = dict(zip(proof.ends, map(str, (*cut.choice.inputs, *cut.choice.outputs)), strict=True))
    return {"mesh": str(cut.mesh), "cut": str(cut), "layouts": layouts, "error": told(cut), "problem": cut.problem}


def told(cut: Cut) -> str:
    """The error as the table has it."""
    return "failed" if cut.problem else f"{cut.error:.1e}"


def verify_rule(spec: str) -> RuleReport:
    """Prove the rules of the ops that `module:function` runs."""
    calls = recorded(spec)
    without = sorted({str(call.op) for call in calls if call.op not in RULES})
    ruled = [call for call in calls if call.op in RULES]
    if not ruled:
        what = f": not {', '.join(without)}" if without else " of yours"
        raise InputError(f"{spec} runs no op that has a rule{what}\n  try: autopar.rule(op, 'b d, d -> b d')")
    return RuleReport(tuple(proof(call) for call in ruled), tuple(without))


def recorded(spec: str) -> list[Call]:
    """What runs in `module:function`; an error of its own is told in one line."""
    module, colon, name = spec.partition(":")
    if not colon:
        raise InputError(f"{spec!r} is no function; write package.module:function")
    function: Callable[[], Any] = found(module, name, {})
    with Recording() as recording:
        try:
            function()
        except AutoparError:
            raise
        except Exception as error:
            raise InputError(f"{spec} failed: {type(error).__name__}: {error}") from error
    return list(recording.calls.values())


def proof(call: Call) -> Proof:
    """Every cut of one call."""
    node, values = node_of(call)
    graph = single(node)
    axes = analyse(graph)
    (op,) = (n for n in graph.fx.nodes if computes(n))
    listed, seconds = enumerated(graph, MESHES[-1])
    results = _torch.tensors_in(call.result)
    named = [f"result {i}" for i in range(len(results))] if len(results) > 1 else ["result"]
    floats = [t.dtype for t in (*values.values(), *results) if t.is_floating_point()]
    return Proof(
        shown(call),
        RULES[call.op].given or RULES[call.op].text,
        (*(o.name for o in operands(op)), *named),
        tuple(cuts(graph, values, MESHES)),
        max((BOUNDS.get(dtype, 1e-9) for dtype in floats), default=1e-9),
        listed,
        seconds,
        tuple(untried({x: n for x, n in axes.rule(op).sizes.items() if x not in axes.rule(op).whole})),
    )


def untried(sizes: Mapping[str, int]) -> Iterator[str]:
    """What the sizes of letters that may be cut leave untried."""
    counts = {devices for mesh in MESHES for devices in mesh.sizes}
    for letter, size in sizes.items():
        if not any(fills(size, devices) and size % devices for devices in counts):
            yield f"{letter} = {size} makes equal pieces only; another size, like 7, tries unequal ones"
    for size in sorted({n for n in sizes.values() if list(sizes.values()).count(n) > 1}):
        alike = [letter for letter, n in sizes.items() if n == size]
        yield f"{' and '.join(alike)} are both {size}: a rule that takes one for the other may pass; make them differ"


def enumerated(graph: Graph, mesh: Mesh) -> tuple[int, float]:
    """How many choices the one op of a graph has, and the seconds that this thread takes to list them."""
    axes = analyse(graph)
    (op,) = (n for n in graph.fx.nodes if computes(n))
    collects = gc.isenabled()
    gc.disable()
    try:
        started = time.thread_time()
        count = len(choices(axes, op, mesh))
        return count, time.thread_time() - started
    finally:
        if collects:
            gc.enable()


def node_of(call: Call) -> tuple[fx.Node, dict[str, Tensor]]:
    """The call as a node whose operands are placeholders named after the op's arguments, and their values."""
    graph, mode = fx.Graph(), _torch.fake_mode()
    values: dict[str, Tensor] = {}
    names = [argument.name for argument in call.op._schema.arguments]

    def placed(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [placed(f"{name}_{i}", one) for i, one in enumerate(value)]
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(name)
        node.meta["val"] = _torch.fake_like(mode, value)
        values[node.name] = value.detach()
        return node

    args = tuple(placed(name, value) for name, value in zip(names, call.args, strict=False))
    node = graph.call_function(call.op, args, {name: placed(name, value) for name, value in call.kwargs.items()})
    fakes = [_torch.fake_like(mode, t) for t in _torch.tensors_in(call.result)]
    node.meta = {"val": fakes[0] if isinstance(call.result, Tensor) else tuple(fakes), "phase": "forward"}
    lookup(node)  # refuses a rule that does not fit the example
    return node, values


def shown(call: Call) -> str:
    """The op with the shapes that it ran on."""
    names = [argument.name for argument in call.op._schema.arguments]
    given = [*zip(names, call.args, strict=False), *call.kwargs.items()]
    return f"{call.op}({', '.join(f'{name}: {short(value)}' for name, value in given)})"


def short(value: Any) -> str:
    if isinstance(value, Tensor):
        return type_text(value)
    return f"[{', '.join(short(one) for one in value)}]" if isinstance(value, (list, tuple)) else repr(value)
