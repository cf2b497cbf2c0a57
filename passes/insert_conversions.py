"""Turn every disagreement about a layout into collectives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from autopar.axes import Axes, computes, is_getitem, source
from autopar.choices import choice_of
from autopar.errors import PlanError
from autopar.graph import Graph, Input
from autopar.layout import MICRO, Layout, Step, conversion
from autopar.passes.lower_rows import moves_rows
from autopar.passes.markers import COLLECTIVES
from autopar.plan import Plan
from autopar.precision import reduces_early
from autopar.rules.core import operands
from autopar.rules.experts import index_of


def arrives(entry: Input, axes: Axes, plan: Plan) -> Layout:
    """The layout in which a graph input is handed to the program."""
    if entry.kind == "parameter":
        kept = plan.parameters[entry.name]
        return kept.stored if kept.level in (0, 3) else kept.home
    return plan.inputs.get(entry.node, Layout.whole(axes.factors[entry.node, 0]))


def insert_conversions(graph: Graph, axes: Axes, plan: Plan) -> Graph:
    """Turn every disagreement about a layout into collectives.

        %y   : f32[b=64@data, d=512]{sum:model} = mm(%r, %w2)
        return %y                               # the caller wants no pending sum
    becomes
        %y   : f32[b=64@data, d=512]{sum:model} = mm(%r, %w2)
        %y_1 : f32[b=64@data, d=512]            = all_reduce(%y, model)
        return %y_1

    One conversion of a value serves all its consumers in the same phase; a parameter at ZeRO 3 is gathered for each
    module that uses it. Gradients are reduced where they appear, at ZeRO 1 when backward ends.

    Needs: a choice for every op, a plan for every parameter.  Leaves: both ends of every edge agree.
    """
    return _Inserter(graph, axes, plan).run()


class _Inserter:
    def __init__(self, graph: Graph, axes: Axes, plan: Plan) -> None:
        self.graph, self.axes, self.plan = graph, axes, plan
        self.fresh = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.made: dict[tuple[Any, ...], fx.Node] = {}
        self.entries = {entry.node: entry for entry in graph.inputs}
        self.nodes = graph.nodes

    def run(self) -> Graph:
        gradients: dict[str, list[int]] = {}
        for i, output in enumerate(self.graph.outputs):
            if output.node is not None and output.kind == "gradient":
                gradients.setdefault(output.node, []).append(i)
        results: list[fx.Node | None] = [None] * len(self.graph.outputs)
        for node in self.graph.fx.nodes:
            if node.op == "output":
                continue
            self.place(node)
            for i in gradients.get(node.name, []):
                if self.plan.parameters[self.graph.outputs[i].name].level != 1:
                    results[i] = self.result(i)
        for i, output in enumerate(self.graph.outputs):
            if output.node is not None and results[i] is None:
                results[i] = self.result(i)
        self.fresh.output(tuple(results))
        self.fresh.eliminate_dead_code()
        names = {old.name: new.name for old, new in self.env.items()}
        outputs = tuple(
            replace(o, node=None if r is None else r.name) for o, r in zip(self.graph.outputs, results, strict=True)
        )
        inputs = tuple(replace(e, node=names[e.node]) for e in self.graph.inputs)
        return replace(self.graph, fx=self.fresh, inputs=inputs, outputs=outputs)

    def place(self, node: fx.Node) -> None:
        """Copy one node, its operands brought into the layouts that its choice asks for."""
        if not computes(node):
            new = self.fresh.node_copy(node, self.env.__getitem__)
            if is_getitem(node):
                name, index = source(node)
                new.meta["layouts"] = (self.env[self.nodes[name]].meta["layouts"][index],)
            elif node.op == "placeholder":
                new.meta["layouts"] = (arrives(self.entries[node.name], self.axes, self.plan),)
            else:
                new.meta["layouts"] = (Layout.whole(self.axes.factors[node.name, 0]),)
            self.env[node] = new
            return
        roles = self.plan.ops.get(node.name)
        choice = None if roles is None else choice_of(self.axes, node, roles, self.plan.mesh)
        if choice is None:
            raise PlanError(f"the plan has no legal choice for %{node.name}: {roles}\n  from {node.meta.get('source')}")
        wanted = dict(zip(operands(node), choice.inputs, strict=False))
        if len(wanted) != len(choice.inputs):  # one value in several places of an op
            self.place_repeated(node, choice.inputs)
        else:
            ready = {o: self.convert(o, layout, node) for o, layout in wanted.items()}
            self.env[node] = self.fresh.node_copy(node, ready.__getitem__)
        self.env[node].meta = {**node.meta, "layouts": choice.outputs, "choice": choice, "origin": node.name}

    def place_repeated(self, node: fx.Node, layouts: tuple[Layout, ...]) -> None:
        """As `place`, for an op that reads one value twice, perhaps in two layouts (`z @ z.T`)."""
        ready = iter([self.convert(o, layout, node) for o, layout in zip(operands(node), layouts, strict=True)])
        self.env[node] = self.fresh.node_copy(node, lambda _: next(ready))

    def convert(self, node: fx.Node, layout: Layout, consumer: fx.Node) -> fx.Node:
        """`node`'s value in `layout`, for a consumer."""
        path = conversion(self.env[node].meta["layouts"][0], layout, self.plan.mesh) or ()
        if reduces_early(self.graph, consumer, path):
            raise PlanError(f"%{node.name} is summed over devices before %{consumer.name} casts it for that")
        return self.converted(node, layout, consumer.meta["phase"], consumer.meta.get("module", ""))

    def converted(self, node: fx.Node, layout: Layout, phase: str, module: str) -> fx.Node:
        here = self.env[node]
        entry = self.entries.get(node.name)
        site: Any = None
        if entry is not None and entry.kind == "parameter" and self.plan.parameters[entry.name].level == 3:
            site = module
            phase = "forward" if self.plan.parameters[entry.name].keep else phase
        steps = conversion(here.meta["layouts"][0], layout, self.plan.mesh)
        if steps is None:
            raise PlanError(f"no conversion of %{node.name} from {here.meta['layouts'][0]} to {layout}")
        key = (source(node), layout, phase, site)
        if steps and key not in self.made:
            for step in steps:
                here = self.step(here, step, phase, module, **self.routing(node, step, phase, module))
            self.made[key] = here
        return self.made[key] if steps else here

    def routing(self, node: fx.Node, step: Step, phase: str, module: str) -> dict[str, fx.Node]:
        """What a step that moves rows reads besides them: which experts the tokens chose."""
        if not moves_rows(step):
            return {}
        index = index_of(node)
        return {"index": self.converted(index, Layout.whole(self.axes.factors[source(index)]), phase, module)}

    def step(self, x: fx.Node, step: Step, phase: str, module: str, **index: fx.Node) -> fx.Node:
        kind = () if step.kind not in ("all_reduce", "reduce_scatter") else (dict(step.before.pending)[step.axis],)
        new = self.fresh.call_function(COLLECTIVES[step.kind], (x, step.axis, *kind), dict(index))
        new.meta = {"val": x.meta["val"], "layouts": (step.after,), "step": step, "phase": phase, "module": module}
        return new

    def result(self, i: int) -> fx.Node:
        """Output `i` in the layout in which it leaves the program."""
        output = self.graph.outputs[i]
        assert output.node is not None
        node = self.nodes[output.node]
        layout = self.env[node].meta["layouts"][0]
        if output.kind in ("loss", "buffer"):
            layout = Layout.whole(self.axes.factors[source(node)])
        elif output.kind == "gradient":
            layout = self.plan.parameters[output.name].stored
        else:
            layout = layout.settled().without(MICRO)
        phase = "backward" if "gradient" in output.kind else "forward"
        return self.converted(node, layout, phase, node.meta.get("module", ""))
