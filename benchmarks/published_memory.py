"""Published figures of memory, reproduced from programs that autopar emits.

    python benchmarks/published_memory.py

Model states at ZeRO 0 to 3 (Rajbhandari et al. 2020, table 1), activations of a transformer layer (Korthikanti et al.
2022, table 2), and what follows from them (figures 1 and 7). Nothing is allocated: models are captured on fake tensors
and planned under the strategy in question; what is counted is what the emitted program holds. Where our recipe keeps
other bytes than a paper's, the numbers of elements are ours and the bytes of each are the paper's; docs/memory.md tells
where and why. Exits with 1 if a figure is off by more than 1 %.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import materialised
import torch
from torch import Tensor, nn

from autopar.api import Compiler
from autopar.cluster import ClusterSpec
from autopar.cost.memory import Memory, memory
from autopar.models import mlp
from autopar.plan import Plan

DATA = Path(__file__).resolve().parent / "published"
BOUND = 0.01
GIB = 2**30
SEQUENCE, VOCABULARY = 2048, 51200


@dataclass(frozen=True)
class Row:
    """One published figure; the error is relative, for percentages the difference in points."""

    table: str
    name: str
    predicted: float
    published: float

    @property
    def error(self) -> float:
        off = self.predicted - self.published
        return off / 100 if self.table.endswith("%") else off / self.published


def read(name: str) -> list[dict[str, str]]:
    """The rows of a file of published figures, without the lines that tell their source."""
    lines = (DATA / name).read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def planned(
    model: nn.Module, batch: tuple[Tensor, ...], devices: int, strategy: str | None, precision: str | None = None
) -> tuple[Plan, Memory]:
    """The plan of a strategy, whatever it takes, and what its program holds."""
    cluster = ClusterSpec.preset("cpu-gloo", devices=devices)
    compiler = Compiler(cluster, strategy=strategy, precision=precision, memory_bytes=1e18)
    graph = compiler.graph(model, batch, {})
    plan = compiler.made(graph, frozenset(), None)
    return plan, memory(compiler.emit(graph, plan), compiler.optimizer)


# --- model states -----------------------------------------------------------------------------------------------------

LEVELS = ("ddp()", "zero(1)", "zero(2)", "zero(3)")
SIZES = {"d": 2048, "f": 3072, "g": 1024, "o": 4096}  # all multiples of 1024


@dataclass(frozen=True)
class States:
    """Elements on one device, for every parameter of the model: of 16-bit copies, gradients, optimizer state.

    bytes   what our program holds of them
    """

    copies: float
    gradients: float
    master: float
    bytes: float

    def paper_bytes(self) -> float:
        """2 + 2 + K with K = 12: float32 master, momentum and variance."""
        return 2 * self.copies + 2 * self.gradients + 12 * self.master


@cache
def states(level: int, devices: int) -> States:
    """From the plan of a perceptron whose parameters divide."""
    with torch.device("meta"):
        model = mlp.MLP(**SIZES, dropout=0.0)
        batch = (torch.empty(devices, SIZES["d"]), torch.empty(devices, SIZES["o"]))
    plan, held = planned(model, batch, devices, LEVELS[level], "bf16")
    count = sum(p.numel() for p in model.parameters())
    ways = plan.parameters.values()
    assert {way.level for way in ways} <= {level, 0}
    master = sum(way.stored.local_numel(plan.mesh) for way in ways)
    copies = sum((way.home if level < 3 else way.stored).local_numel(plan.mesh) for way in ways)
    gradients = sum((way.home if level < 2 else way.stored).local_numel(plan.mesh) for way in ways)
    assert held.persistent["parameters"] + held.persistent["optimizer"] == 12 * master
    assert held.persistent["copies"] + held.casts == 2 * copies
    assert held.gradients == 4 * (master if level == 1 else gradients)
    return States(copies / count, gradients / count, master / count, (12 * master + 2 * copies + 4 * gradients) / count)


def zero_rows() -> list[Row]:
    """Table 1 of the ZeRO paper: GB of model states on one device."""
    rows = []
    for line in read("zero_model_states_gb.csv"):
        for level in range(4):
            bytes_ = float(line["parameters_b"]) * states(level, int(line["devices"])).paper_bytes()
            name = f"{line['model']} on {line['devices']}, ZeRO {level}"
            rows.append(Row("ZeRO table 1, GB", name, bytes_, float(line[f"zero{level}"])))
    return rows


def recipe(devices: int = 64) -> str:
    """Bytes of model states a parameter: the paper's, and ours, where gradients are float32 as parameters are."""
    lines = [f"model states on {devices} devices, bytes a parameter: the paper's, ours with float32 gradients"]
    for level in range(4):
        found = states(level, devices)
        lines.append(f"  ZeRO {level} {found.paper_bytes():8.4f} {found.bytes:8.4f}")
    return "\n".join(lines)


# --- activations ------------------------------------------------------------------------------------------------------

Formula = Callable[[int, float], float]  # of t and of 5 a s / h: bytes of a layer over s b h


@dataclass(frozen=True)
class Way:
    """How a layer is spread and what of it is computed again, with the formula of table 2."""

    strategy: str | None
    recomputed: str
    formula: Formula


WAYS: Mapping[str, Way] = {
    "no parallelism": Way(None, "nothing", lambda t, c: 34 + c),
    "tensor": Way("megatron()", "nothing", lambda t, c: 10 + 24 / t + c / t),
    "tensor and sequence": Way("megatron(sp=True)", "nothing", lambda t, c: 34 / t + c / t),
    "tensor, selective": Way("megatron()", "attention", lambda t, c: 10 + 24 / t),
    "tensor and sequence, selective": Way("megatron(sp=True)", "attention", lambda t, c: 34 / t),
    "full": Way("megatron()", "layer", lambda t, c: 2),
}


@dataclass(frozen=True)
class Shape:
    """A configuration of table 5."""

    name: str
    h: int
    layers: int
    a: int
    b: int
    t: int
    p: int
    m: int

    @staticmethod
    def of(line: Mapping[str, str]) -> Shape:
        return Shape(line["model"], *(int(line[key]) for key in ("h", "layers", "a", "b", "t", "p", "m")))

    @property
    def unit(self) -> int:
        """s b h."""
        return SEQUENCE * self.b * self.h

    @property
    def in_flight(self) -> float:
        """Layers whose activations the first of p stages holds: 1F1B, interleaved m times (section 4.2.3)."""
        return self.layers * (1 + (self.p - 1) / (self.p * self.m) if self.m > 1 else 1)


@cache
def layer(shape: Shape, way: str) -> tuple[int, int]:
    """(bytes saved for backward, parameters) of one layer on one device: what two layers have more than one."""
    one, two = (_layers(shape, WAYS[way], count) for count in (1, 2))
    saved = [sum(x.bytes for x in held.saved) for held in (one, two)]
    parameters = [held.persistent["parameters"] // 2 for held in (one, two)]
    return saved[1] - saved[0], parameters[1] - parameters[0]


def _layers(shape: Shape, way: Way, count: int) -> Memory:
    model, ids = materialised.build(
        b=shape.b, s=SEQUENCE, v=VOCABULARY, h=shape.h, a=shape.a, layers=count, recomputed=way.recomputed
    )
    return planned(model, (ids,), 1 if way.strategy is None else shape.t, way.strategy)[1]


def activation_rows(shapes: Iterable[Shape]) -> list[Row]:
    """Table 2: bytes of a layer's activations, over s b h."""
    rows = []
    for shape in shapes:
        core = 5 * shape.a * SEQUENCE / shape.h
        for name, way in WAYS.items():
            found = layer(shape, name)[0] / shape.unit
            rows.append(
                Row("activations, table 2, bytes / sbh", f"{shape.name} {name}", found, way.formula(shape.t, core))
            )
    return rows


def figure_1_rows(lines: Iterable[Mapping[str, str]]) -> list[Row]:
    """GiB of one GPU: 18 bytes a parameter of the layers for it and its optimizer; activations of the first stage."""
    rows = []
    for line in lines:
        shape = Shape.of(line)
        kept = 18 * layer(shape, "tensor")[1] * shape.layers / shape.p / GIB
        found = {"parameters_optimizer_gib": kept}
        for key, way in (("baseline_gib", "tensor"), ("present_gib", "tensor and sequence, selective")):
            found[key] = layer(shape, way)[0] * shape.in_flight / GIB
        rows += [Row("figure 1, GiB", f"{shape.name} {k[:-4]}", v, float(line[k])) for k, v in found.items()]
    return rows


def figure_7_rows(lines: Iterable[Mapping[str, str]]) -> list[Row]:
    """Activations of a layer as percent of tensor parallelism alone; the published ones are read off at two digits."""
    columns = {
        "sequence_pct": "tensor and sequence",
        "selective_pct": "tensor, selective",
        "both_pct": "tensor and sequence, selective",
        "full_pct": "full",
    }
    rows = []
    for line in lines:
        shape = Shape.of(line)
        for column, way in columns.items():
            found = 100 * layer(shape, way)[0] / layer(shape, "tensor")[0]
            rows.append(Row("figure 7, %", f"{shape.name} {way}", found, float(line[column])))
    return rows


# --- all of it --------------------------------------------------------------------------------------------------------


def tables() -> list[Callable[[], list[Row]]]:
    """A function for every table."""
    lines = read("activation_memory.csv")
    shapes = [Shape.of(line) for line in lines]
    return [zero_rows, partial(activation_rows, shapes), partial(figure_1_rows, lines), partial(figure_7_rows, lines)]


def text(rows: Iterable[Row]) -> str:
    """One line a figure."""
    lines = [f"{'':72} {'predicted':>11} {'published':>11} {'error':>8}"]
    for row in rows:
        name = f"{row.table}: {row.name}"
        lines.append(f"{name:72} {row.predicted:11.3f} {row.published:11.3f} {row.error:8.2%}")
    return "\n".join(lines)


def main() -> int:
    torch.set_num_threads(1)
    rows = [row for table in tables() for row in table()]
    missed = [row for row in rows if abs(row.error) > BOUND]
    print(text(rows))
    print(
        "published_memory: ok" if not missed else f"published_memory: {len(missed)} OF {len(rows)} OFF BY MORE THAN 1 %"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
