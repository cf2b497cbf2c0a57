"""Replace ops one of whose own letters is cut by the subgraph that their rule gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from autopar.axes import Axes, is_getitem
from autopar.choices import Choice
from autopar.graph import Graph
from autopar.layout import Layout, Step
from autopar.passes.markers import all_reduce, span_length, span_start
from autopar.plan import Plan
from autopar.rules.core import Instance, operands, results
from autopar.rules.table import lookup


def expand_local(graph: Graph, axes: Axes, plan: Plan) -> Graph:
    """Emit softmax over a cut dim, lookups in a cut table, and their like, as small subgraphs with collectives.

        %p   : f32[b=6, v=50@model] = _softmax(%x, -1)
    becomes
        %top : f32[b=6, 1]          = all_reduce(amax(%x), model, max)
        %e   : f32[b=6, v=50@model] = exp(%x - %top)
        %s   : f32[b=6, 1]          = all_reduce(sum(%e), model, sum)
        %p   : f32[b=6, v=50@model] = %e / %s

    Needs: layouts and choices on every node.  Leaves: every op runs on local pieces alone.
    """
    fresh = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in graph.fx.nodes:
        choice = node.meta.get("choice")
        instance = axes.instances.get(node.meta.get("origin", ""))
        emitted = local_of(instance, choice) if choice and instance else None
        if emitted is not None:
            assert choice is not None and instance is not None
            env[node] = Emitter(fresh, env, node, choice, instance, plan).emit(emitted)
        elif is_getitem(node) and isinstance(env[node.args[0]], list):
            env[node] = env[node.args[0]][node.args[1]]
        else:
            env[node] = fresh.node_copy(node, env.__getitem__)
    fresh.eliminate_dead_code()
    outputs = next(n for n in fresh.nodes if n.op == "output").args[0]
    named = tuple(replace(o, node=None if n is None else n.name) for o, n in zip(graph.outputs, outputs, strict=True))
    return replace(graph, fx=fresh, outputs=named)


def local_of(instance: Instance, choice: Choice) -> Any:
    """The local function that a choice needs, if any."""
    return next((instance.local[role] for role in choice.roles if role in instance.local), None)


LABELS = ("phase", "module", "source", "origin")


class Emitter:
    """Writes the subgraph of one op; see `rules/local.py`."""

    def __init__(
        self, fresh: fx.Graph, env: dict[fx.Node, Any], node: fx.Node, choice: Choice, instance: Instance, plan: Plan
    ) -> None:
        self.fresh, self.env, self.node, self.choice = fresh, env, node, choice
        self.mesh = plan.mesh
        self.args: tuple[Any, ...] = node.args
        self.axes = [a for a, r in zip(plan.mesh.names, choice.roles, strict=True) if r in instance.local]
        self.steps = list(choice.inner)

    def emit(self, local: Any) -> Any:
        """The nodes of the op's results: one node, or a list where the op has several."""
        found = local.emit(self)
        assert not self.steps, f"{self.node}: its rule announces more reductions than it emits"
        for node, layout in zip(found, self.choice.outputs, strict=True):
            if node is not None:
                node.meta["layouts"] = (layout,)
        return found if isinstance(self.node.meta["val"], (list, tuple)) else found[0]

    def operand(self, i: int) -> fx.Node:
        new: fx.Node = self.env[operands(self.node)[i]]
        return new

    def optional(self, *positions: int) -> list[fx.Node | None]:
        """Arguments that may be None, by position."""
        return [None if self.args[p] is None else self.env[self.args[p]] for p in positions]

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """One op on local pieces; its `val` has global sizes, its layout follows from the op's own rule."""
        new = self.fresh.call_function(op, args, kwargs)
        self.describe(new, self._fake(new))
        new.meta["layouts"] = self._layouts(new)
        return new

    def _fake(self, new: fx.Node) -> Any:
        def whole(x: fx.Node) -> Any:
            if x.target is span_start:
                return 0
            return x.meta["span"][0].shape[x.meta["span"][1]] if x.target is span_length else x.meta["val"]

        args, kwargs = fx.node.map_arg((new.args, new.kwargs), whole)
        with operands(self.node)[0].meta["val"].fake_mode:
            return new.target(*args, **kwargs)  # type: ignore[operator]

    def describe(self, new: fx.Node, val: Any) -> None:
        kept: dict[str, Any] = {k: self.node.meta[k] for k in LABELS if k in self.node.meta}
        new.meta = {**kept, "val": val}

    def _layouts(self, new: fx.Node) -> tuple[Layout, ...]:
        """Layouts of what `new` computes: a letter that an operand has cut is cut in the result."""
        rule, found = lookup(new)
        assert found, f"{new.target}, emitted for {self.node}, has no rule"
        known: dict[str, tuple[tuple[int, ...], tuple[tuple[str, ...], ...]]] = {}
        reads = [x.meta["layouts"][0] for x in operands(new)]
        for dims, layout in zip(rule.inputs, reads, strict=True):
            for d, letters in enumerate(dims):
                if len(letters) == 1:
                    known.setdefault(letters[0], (layout.factors[d], layout.cuts[d]))
        for before, after in rule.groups:
            if len(before) == len(after) == 1:
                known[f"@{after[0]}"] = (reads[0].factors[before[0]], reads[0].cuts[before[0]])
        out = []
        for dims, val in zip(rule.outputs, results(new), strict=True):
            assert val is not None
            rows = []
            for d, size in enumerate(val.shape):
                letter = dims[d][0] if dims[d] else f"@{d}"
                blank = ((size,), ((),)) if size != 1 else ((), ())
                rows.append(known.get(letter, blank) if size != 1 else blank)
            out.append(Layout(tuple(r[0] for r in rows), tuple(r[1] for r in rows)))
        return tuple(out)

    def all_reduce(self, x: fx.Node, kind: str) -> fx.Node:
        """Reduce over every mesh axis that cuts one of the op's local letters."""
        for axis in self.axes:
            announced = self.steps.pop(0)
            assert announced.axis == axis, f"{self.node}: its rule announces other reductions than it emits"
            layout: Layout = x.meta["layouts"][0]
            step = Step("all_reduce", axis, layout.with_pending(axis, kind), layout)
            new = self.fresh.call_function(all_reduce, (x, axis, kind))
            self.describe(new, x.meta["val"])
            new.meta |= {"layouts": (layout,), "step": step}
            x = new
        return x

    def span(self, operand: int | None, dim: int) -> tuple[fx.Node, fx.Node]:
        """Start and length of this device's piece of a dim of an operand, or of the result."""
        layout = self.choice.outputs[0] if operand is None else self.choice.inputs[operand]
        found = []
        for marker in (span_start, span_length):
            node = self.fresh.call_function(marker)
            self.describe(node, None)
            node.meta |= {"span": (layout, dim), "layouts": ()}
            found.append(node)
        return found[0], found[1]
