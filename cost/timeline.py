"""When everything in a step happens: the emitted program on a compute stream and a stream for each mesh axis.

In: a captured graph, the `Program` emitted from it, a cluster.  Out: `Timeline`.  Next: `trace.py`, which draws it.

An op starts once its operands are there and the op before it has ended. A collective starts once its operand is there
and its mesh axis is free; on devices whose process groups run one thing at a time everything waits for it, elsewhere
only its readers do. Collectives that share a bucket run as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from torch import fx

from autopar.axes import Axes
from autopar.cluster import ClusterSpec
from autopar.cost.comm import axis_s, step_s
from autopar.cost.compute import update_s
from autopar.cost.price import op_s
from autopar.device import SERIAL
from autopar.graph import Graph
from autopar.layout import MICRO, STAGE, Step
from autopar.moves import elements, itemsize
from autopar.passes.buckets import Bucket, buckets
from autopar.program import Program

COMPUTE = "compute"


@dataclass(frozen=True)
class Event:
    """Something that occupies a stream: "compute", or the name of a mesh axis."""

    name: str
    phase: str
    stream: str
    start_s: float
    end_s: float
    source: str = ""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """A step of training on one device.

    events      in the order in which they start
    overlap     times longer that ops take while something is sent beside them
    overhead_s  what a step costs beside its operations
    """

    events: tuple[Event, ...]
    overlap: float = 1.0
    overhead_s: float = 0.0

    def seconds(self, phase: str = "", stream: str = "") -> float:
        """Seconds of the events of a phase, on a stream; all of them by default."""
        return sum(e.seconds for e in self.events if phase in ("", e.phase) and stream in ("", e.stream))

    @property
    def compute_s(self) -> float:
        """Of forward and backward: the optimizer has a figure of its own."""
        return self.seconds(stream=COMPUTE) - self.optimizer_s

    @property
    def optimizer_s(self) -> float:
        return self.seconds("optimizer")

    @property
    def communication_s(self) -> float:
        return sum(e.seconds for e in self.events if e.stream != COMPUTE)

    @property
    def exposed_s(self) -> float:
        """Communication that nothing hides, and what hiding the rest costs the ops beside it."""
        end = max((e.end_s for e in self.events), default=0.0)
        exposed = max(0.0, end - self.seconds(stream=COMPUTE))
        hidden = max(0.0, self.communication_s - exposed)
        return exposed + (self.overlap - 1.0) * hidden

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s + self.optimizer_s + self.overhead_s

    @property
    def utilisation(self) -> float:
        """The part of the step in which the device computes."""
        return (self.compute_s + self.optimizer_s) / self.step_s if self.step_s else 0.0


def timeline(program: Program, graph: Graph, axes: Axes, cluster: ClusterSpec, copies: float) -> Timeline:
    """The step of the device with the largest pieces; `graph` as captured, `copies` of parameters in the optimizer."""
    clock = _Clock(program, graph, axes, cluster)
    for phase in ("refresh", "forward", "backward"):
        clock.run(phase, getattr(program, phase))
    events = clock.pipelined() if program.plan.stages else clock.events
    updates = [
        (e.name, update_s(program.plan.parameters[e.name].stored, graph.stored_dtype(e), copies, clock.mesh, cluster))
        for e in graph.trained
    ]
    ends = accumulate((seconds for _, seconds in updates), initial=max((e.end_s for e in events), default=0.0))
    for (name, _), (start, end) in zip(updates, pairwise(ends), strict=True):
        events.append(Event(name, "optimizer", COMPUTE, start, end))
    device = cluster.device
    overhead = device.step_s + len(updates) * device.parameter_s + (device.agree_s if clock.mesh.devices > 1 else 0.0)
    return Timeline(tuple(sorted(events, key=lambda e: e.start_s)), device.overlap, cluster.crowding * overhead)


class _Clock:
    """What has happened so far: when each value is there, and when each stream is free."""

    def __init__(self, program: Program, graph: Graph, axes: Axes, cluster: ClusterSpec) -> None:
        self.program, self.axes, self.cluster = program, axes, cluster
        self.mesh, self.nodes = program.plan.mesh, graph.nodes
        self.serial = cluster.device.type == SERIAL
        self.events: list[Event] = []
        self.there: dict[fx.Node, float] = {}
        self.free: dict[str, float] = {}
        self.priced: set[str] = set()
        self.stages: dict[tuple[int, str], float] = {}

    def run(self, phase: str, graph: fx.Graph) -> None:
        """One graph, after everything that the compute stream was given before."""
        shared = {node: bucket for bucket in buckets(graph, self.program.plan) for node in bucket.nodes}
        begun = max(self.free.values(), default=0.0)
        for node in graph.nodes:
            if node.op != "call_function":
                self.there[node] = begun
            elif node in shared:
                if shared[node].place is node:
                    self.bucket(shared[node], phase)
                else:
                    self.there.setdefault(node, self.ready([node]))
            elif "step" in node.meta and self.moves(node.meta["step"]):
                seconds = step_s(node.meta["step"], itemsize(node), self.mesh, self.cluster)
                self.send([node], node.name, phase, seconds)
            else:
                self.compute(node, phase)

    def moves(self, step: Step) -> bool:
        return not step.free and step.axis != MICRO

    def ready(self, nodes: Sequence[fx.Node]) -> float:
        return max((self.there[x] for node in nodes for x in node.all_input_nodes), default=0.0)

    def compute(self, node: fx.Node, phase: str) -> None:
        """An op, or a slice of what is there, after the one before it."""
        seconds = self.seconds(node)
        start = max(self.ready([node]), self.free.get(COMPUTE, 0.0)) if seconds else self.ready([node])
        self.there[node] = start + seconds
        if seconds:
            self.free[COMPUTE] = start + seconds
            self.add(node.name, phase, COMPUTE, start, seconds, node)

    def seconds(self, node: fx.Node) -> float:
        """Of the op that a node came from, the first time that one of its nodes runs."""
        if "step" in node.meta:
            return step_s(node.meta["step"], itemsize(node), self.mesh, self.cluster)
        origin = node.meta.get("origin")
        if origin not in self.axes.instances or origin in self.priced:
            return 0.0
        self.priced.add(origin)
        return op_s(self.nodes[origin], self.axes, self.program.plan, self.cluster)

    def bucket(self, bucket: Bucket, phase: str) -> None:
        """All members as one collective of what they move together."""
        first, nodes = bucket.nodes[0].meta["step"], bucket.nodes
        moved = sum(elements(node.meta["step"], self.mesh) * itemsize(node) for node in nodes)
        seconds = axis_s(first.kind, moved, first.axis, self.mesh, self.cluster)
        self.send(nodes, f"{nodes[0].name} and {len(nodes) - 1} more", phase, seconds)

    def send(self, nodes: Sequence[fx.Node], name: str, phase: str, seconds: float) -> None:
        """A collective; where devices run one thing at a time, the ops behind it wait for it."""
        axis = nodes[0].meta["step"].axis
        start = max(self.ready(nodes), self.free.get(axis, 0.0), self.free.get(COMPUTE, 0.0) if self.serial else 0.0)
        self.free[axis] = end = start + seconds
        if self.serial:
            self.free[COMPUTE] = end
        self.there.update(dict.fromkeys(nodes, end))
        self.add(name, phase, axis, start, seconds, nodes[0])

    def add(self, name: str, phase: str, stream: str, start: float, seconds: float, node: fx.Node) -> None:
        self.events.append(Event(name, phase, stream, start, start + seconds, node.meta.get("source", "")))
        stage = self.program.plan.stages.get(node.meta.get("origin", node.name), 0)
        if stream == COMPUTE:
            self.stages[stage, phase] = self.stages.get((stage, phase), 0.0) + seconds

    def pipelined(self) -> list[Event]:
        """Of a pipeline: m + p - 1 turns of its slowest stage, forward, then as many backward (Huang et al. 2019).

        What is sent between stages is not in it.
        """
        turns, now, out = self.mesh.size(MICRO) + self.mesh.size(STAGE) - 1, 0.0, []
        for phase in ("refresh", "forward", "backward"):
            slowest = max((s for (_, where), s in self.stages.items() if where == phase), default=0.0)
            for turn in range(turns if slowest else 0):
                out.append(Event(f"{phase} {turn}", phase, COMPUTE, now, now + slowest))
                now += slowest
            for event in (e for e in self.events if e.phase == phase and e.stream != COMPUTE):
                out.append(replace(event, start_s=now, end_s=now + event.seconds))
                now += event.seconds
        return out
