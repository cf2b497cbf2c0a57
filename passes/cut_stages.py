"""Cut forward and backward into what every stage of a pipeline runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.errors import UnsupportedError
from autopar.layout import MICRO, STAGE, Layout
from autopar.program import Cell, Phase, Pipeline, Program, Result, Send, Settled

FREE = -1  # the "stage" of what every stage can compute for itself from what the call is given
HELD = -2  # of parameters, which every stage holds; what is computed from them belongs to one stage


def cut_stages(program: Program) -> Program:
    """Give every stage its part of the program, and tell what goes between them.

        %h    : f32[b=6@micro, d=8] = mm(%x, %w1)          # stage 0
        %y    : f32[b=6@micro, d=8] = mm(%h, %w2)          # stage 1
        %loss : f32[]{sum:micro}    = sum(%y);  all_reduce(%loss, micro)
    becomes, in forward
        stage 0: body (%x, %w1) -> %h;  send %h to stage 1
        stage 1: body (%h, %w2) -> %loss;  settled: %all_reduce is %loss of all microbatches added up

    What no parameter goes into is computed by every stage that needs it. A sum over the microbatches is there when all
    have run; a model that needs one before is refused.

    Without a loss there is nothing that backward could start from by itself, and only forward is cut.

    Needs: a stage for every op that a parameter goes into.  Leaves: `program.pipeline`; a plan without stages as it is.
    """
    if not program.plan.stages:
        return program
    count = program.plan.mesh.size(STAGE)
    held = {entry.node: HELD for entry in program.graph.inputs if entry.kind in ("parameter", "tangent")}
    ahead = _Phase(program.forward, program.plan.stages, count, held)
    saved = [ahead.named[name] for name in program.saved]
    late = program.backward if starts_from_loss(program) else nothing()
    back = _Phase(late, program.plan.stages, count, held | {n.name: ahead.stage[n] for n in saved})
    for result in back.results:
        back.want_result(result)
    for result in ahead.results[: -len(saved) or None]:
        ahead.want_result(result)
    hand_over(saved, ahead, back)
    forward, backward = ahead.built(len(saved)), back.built(0)
    named = ahead.named | back.named
    moved = {send.name for phase in (forward, backward) for send in phase.sends}
    moved |= {result.name for phase in (forward, backward) for result in phase.results if result is not None}
    layouts = {name: named[name].meta["layouts"][0] for name in sorted(moved)}
    dtypes = {name: named[name].meta["val"].dtype for name in sorted(moved)}
    return replace(program, pipeline=Pipeline(forward, backward, layouts, dtypes))


def hand_over(saved: Sequence[fx.Node], ahead: _Phase, back: _Phase) -> None:
    """Let every stage's forward have what its backward reads."""
    for node in saved:
        user = next(iter(back.named[node.name].users), None) if node.name in back.named else None
        if node in ahead.late and user is not None:
            raise refusal(node, user)
        for stage in range(back.count):
            ends_only = back.taken.get((node.name, stage))
            if ends_only is None:
                continue
            if ends_only and node in ahead.varies:
                raise refusal(node, user)
            home = ahead.stage[node]
            if home > stage:  # it comes with the gradients
                back.sends[Send(node.name, home, stage)] = None
            ahead.want(node, max(home, stage))
            ahead.keep(node, max(home, stage))


@dataclass
class _Phase:
    """One graph on its way into stages.

    stage    of every node; of what is settled, where its microbatches ran
    late     nodes that are there once all microbatches have run
    varies   nodes that differ between microbatches
    body     nodes that a stage computes for every microbatch; `end`: once, after all
    kept     names that a stage's body must give
    taken    (name of a placeholder, stage that reads it) -> whether only its end reads it
    """

    graph: fx.Graph
    stages: Mapping[str, int]
    count: int
    given: Mapping[str, int] = field(default_factory=dict)
    stage: dict[fx.Node, int] = field(default_factory=dict)
    late: set[fx.Node] = field(default_factory=set)
    varies: set[fx.Node] = field(default_factory=set)
    body: list[set[fx.Node]] = field(default_factory=list)
    end: list[set[fx.Node]] = field(default_factory=list)
    kept: list[dict[str, None]] = field(default_factory=list)
    summed: list[dict[fx.Node, None]] = field(default_factory=list)
    taken: dict[tuple[str, int], bool] = field(default_factory=dict)
    sends: dict[Send, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for _ in range(self.count):
            self.body.append(set())
            self.end.append(set())
            self.kept.append({})
            self.summed.append({})
        self.named = {node.name: node for node in self.graph.nodes}
        self.results: Sequence[fx.Node | None] = self.named["output"].args[0]
        for node in self.graph.nodes:
            if node.op != "output":
                self.place(node)

    # --- where and when each node runs ---

    def place(self, node: fx.Node) -> None:
        operands = node.all_input_nodes
        if node.op in ("placeholder", "get_attr"):
            self.stage[node] = self.given.get(node.name, FREE)
            if _uses_micro(node):
                self.varies.add(node)
            return
        here = [self.stage[x] for x in operands]
        assert not any(scattered(x) is not x for x in operands), f"%{node} reads a piece of what its stage holds"
        origin = node.meta.get("origin", "")
        late = [x for x in operands if x in self.late]
        if late:
            self.stage[node] = max(self.stage[x] for x in late)
            self.late.add(node)
            if _uses_micro(node) or any(x in self.varies for x in operands if x not in self.late):
                raise refusal(late[0], node)
        elif settles(node):
            self.stage[node] = here[0]
            self.late.add(node)
        else:
            known = FREE if all(stage == FREE for stage in here) else self.stages.get(origin, max(here))
            self.stage[node] = max(known, FREE)
            if _uses_micro(node) or any(x in self.varies for x in operands):
                self.varies.add(node)

    # --- what each stage computes ---

    def want_result(self, node: fx.Node | None) -> None:
        if node is None:
            return
        node = scattered(node)
        if node in self.late:
            self.want_late(node, self.stage[node])
        else:
            stage = max(self.stage[node], 0)
            self.want(node, stage)
            self.keep(node, stage)

    def want(self, node: fx.Node, stage: int) -> None:
        """Let a stage have a value of each microbatch."""
        stack = [(node, stage)]
        while stack:
            node, stage = stack.pop()
            there = self.stage[node]
            if node.op == "placeholder":
                self.taken[node.name, stage] = False
                continue
            if there not in (FREE, stage):
                self.send(node.name, there, stage)
                self.keep(node, there)
                stage = there
            if node not in self.body[stage]:
                self.body[stage].add(node)
                stack += [(x, stage) for x in node.all_input_nodes]

    def want_late(self, node: fx.Node, stage: int) -> None:
        """Let a stage compute a value once all microbatches have run."""
        if self.stage[node] != stage:
            raise UnsupportedError(
                f"%{node.name} is there when all microbatches have run, in stage {self.stage[node]}, and stage {stage} "
                "goes on with it\n  try: a strategy without a pipeline"
            )
        if settles(node):
            (operand,) = node.all_input_nodes
            self.summed[stage][node] = None
            self.want(operand, stage)
            self.keep(operand, stage)
            return
        self.end[stage].add(node)
        for x in node.all_input_nodes:
            if x in self.late:
                self.want_late(x, stage)
            elif x.op == "placeholder":
                self.taken.setdefault((x.name, stage), True)
            else:
                if self.stage[x] not in (FREE, stage):
                    line = f"\n  from {node.meta['source']}" if node.meta.get("source") else ""
                    raise UnsupportedError(
                        f"%{node.name} joins what all microbatches give, in stage {stage}, with %{x.name} of stage "
                        f"{self.stage[x]}: a loss of both the batch and parameters alone is not cut into stages{line}"
                        "\n  try: a strategy without a pipeline"
                    )
                self.want(x, stage)
                self.keep(x, stage)

    def keep(self, node: fx.Node, stage: int) -> None:
        """Let a stage's body give a value; what comes from another stage is at hand already."""
        if node.op != "placeholder" and self.stage[node] in (FREE, stage):
            self.kept[stage][node.name] = None

    def send(self, name: str, source: int, target: int) -> None:
        self.sends[Send(name, source, target)] = None

    # --- the pieces ---

    def built(self, saved: int) -> Phase:
        """The phase; the last `saved` results of the graph are for backward and no results of it."""
        order = {node.name: i for i, node in enumerate(self.graph.nodes)}
        arriving = [{s.name for s in self.sends if s.target == stage} for stage in range(self.count)]
        return Phase(
            bodies=tuple(
                self.cell(self.body[stage], sorted(self.kept[stage], key=order.__getitem__), arriving[stage])
                for stage in range(self.count)
            ),
            sends=tuple(sorted(self.sends, key=lambda s: (order.get(s.name, -1), s.target))),
            settled=tuple(
                tuple(Settled(n.name, n.all_input_nodes[0].name, n.meta["step"]) for n in self.summed[stage])
                for stage in range(self.count)
            ),
            ends=tuple(
                self.cell(self.end[stage], [n.name for n in self.graph.nodes if n in self.end[stage]], ())
                for stage in range(self.count)
            ),
            results=tuple(None if r is None else self.result(r) for r in self.results[: len(self.results) - saved]),
        )

    def result(self, node: fx.Node) -> Result:
        inner = scattered(node)
        return Result(inner.name, max(self.stage[inner], 0), None if inner is node else node.meta["step"])

    def cell(self, nodes: set[fx.Node], gives: Sequence[str], arriving: Iterable[str]) -> Cell:
        """The graph of some nodes; what they read besides each other is taken."""
        fresh = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        ordered = [n for n in self.graph.nodes if n in nodes]
        takes = dict.fromkeys(x for n in ordered for x in n.all_input_nodes if x not in nodes)
        for x in takes:
            env[x] = fresh.placeholder(x.name)
            env[x].meta = {key: x.meta[key] for key in ("val", "layouts", "phase", "module") if key in x.meta}
        for n in ordered:
            env[n] = fresh.node_copy(n, env.__getitem__)
        by_name = {n.name: env[n] for n in ordered}
        fresh.output(tuple(by_name[name] for name in gives))
        fresh.lint()
        return Cell(fresh, tuple(x.name for x in takes), tuple(gives))


def refusal(node: fx.Node, user: fx.Node | None) -> UnsupportedError:
    """What to say of a value that is there only after all microbatches, and that one of them needs."""
    line = next((n.meta["source"] for n in (user, node) if n is not None and n.meta.get("source")), "")
    reads = ""
    if user is not None:
        op = user.target if hasattr(user.target, "namespace") else getattr(user.target, "__name__", user.op)
        reads = f", and %{user.name} ({op}) needs that of every microbatch"
    return UnsupportedError(
        f"this model cannot be run in microbatches: %{node.name} is made of the whole batch{reads}"
        + (f"\n  from {line}" if line else "")
        + "\n  try: a strategy without a pipeline"
    )


def starts_from_loss(program: Program) -> bool:
    """Whether backward starts from a loss alone."""
    heads = {o.name for o in program.graph.outputs if o.kind == "loss"}
    return all(entry.name in heads for entry in program.graph.inputs if entry.kind == "tangent")


def nothing() -> fx.Graph:
    """A graph without results."""
    graph = fx.Graph()
    graph.output(())
    return graph


def settles(node: fx.Node) -> bool:
    """Whether a node is there once all microbatches have run."""
    step = node.meta.get("step")
    return step is not None and step.axis == MICRO and step.kind in ("all_reduce", "all_gather")


def scattered(node: fx.Node) -> fx.Node:
    """What a gradient is before every stage gets its piece of it."""
    step = node.meta.get("step")
    return node.all_input_nodes[0] if step is not None and step.axis == STAGE and step.kind == "slice" else node


def _uses_micro(node: fx.Node) -> bool:
    layouts: tuple[Layout, ...] = node.meta.get("layouts") or ()
    return any(MICRO in layout.axes for layout in layouts)
