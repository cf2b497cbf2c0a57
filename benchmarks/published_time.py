"""Predicted seconds of layers and steps against what others published, from traced graphs and presets.

    python benchmarks/published_time.py

Free are, once for a whole table, how near products come to the peak (`best`, `half`) and ops to the bandwidth of memory
(`memory`); they are printed at its head. Everything else is the preset's, the recipe's, or the emitted program's.

Megatron runs a recomputed layer's whole forward again; our program leaves out what nobody reads, its last product and
all-reduce. Where a layer is recomputed the seconds of that are added, as they are in what was measured.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import megatron
import torch

from autopar.api import Compiler
from autopar.cluster import ClusterSpec
from autopar.cost.timeline import Timeline, timeline
from autopar.device import Products

FOLDER = Path(__file__).parent / "published"
LAYER_BOUND, STEP_BOUND = 0.06, 0.10
FEW = 2  # layers that are planned; more are alike
STATE = 2.0  # tensors of a parameter's size in the state of Adam


@dataclass(frozen=True)
class Free:
    """What is chosen for a table."""

    best: float
    half: float
    memory: float

    def on(self, cluster: ClusterSpec) -> ClusterSpec:
        """A cluster of devices that reach so much."""
        halves = (self.half, self.half, self.half)
        products = {dtype: Products(best=self.best, half=halves) for dtype in cluster.device.flops_per_s}
        changed = cluster.device.model_copy(update={"products": products, "memory_fraction": self.memory})
        return cluster.model_copy(update={"device": changed})

    def __str__(self) -> str:
        return f"products reach {self.best:g} x / (x + {self.half:g}) of the peak, ops {self.memory:g} of the bandwidth"


LAYERS, STEPS = Free(best=0.84, half=48, memory=0.8), Free(best=0.72, half=48, memory=0.7)


@dataclass(frozen=True)
class Row:
    """One published figure and ours, in milliseconds."""

    name: str
    predicted: float
    published: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Case:
    """A model, how it is spread, and what of it is recomputed."""

    cluster: ClusterSpec
    strategy: str | None
    precision: str
    sizes: tuple[tuple[str, int], ...]
    recomputed: str

    def told(self, layers: int) -> Timeline:
        """The timeline of a step with so many layers."""
        model, batch = megatron.build(layers=layers, recomputed=self.recomputed, **dict(self.sizes))
        compiler = Compiler(self.cluster, strategy=self.strategy, precision=self.precision, memory_bytes=1e15)
        graph = compiler.graph(model, batch, {})
        program = compiler.emit(graph, compiler.made(graph, frozenset(), None))
        return timeline(program, graph, compiler.axes(graph), self.cluster, STATE)

    def layer_ms(self) -> tuple[float, float]:
        """Forward and backward of one more layer."""
        one, two = self.told(1), self.told(2)
        forward, backward = (span(two, phase) - span(one, phase) for phase in ("forward", "backward"))
        return 1e3 * forward, 1e3 * backward

    def left_out_ms(self) -> float:
        """Of a recomputed layer, what our program does not run again."""
        plain = Case(self.cluster, self.strategy, self.precision, self.sizes, "nothing")
        forward, backward = plain.layer_ms()
        return max(0.0, forward - (self.layer_ms()[1] - backward)) if self.recomputed == "layer" else 0.0


def span(told: Timeline, phase: str) -> float:
    """Seconds from the first event of a phase to its last."""
    events = [event for event in told.events if event.phase == phase]
    return max(e.end_s for e in events) - min(e.start_s for e in events)


def layer_rows() -> list[Row]:
    """Milliseconds of one 22B layer, forward and backward."""
    cluster = LAYERS.on(ClusterSpec.preset("dgx-a100-80", devices=8))
    sizes = tuple({"b": 4, "s": 2048, "v": 51200, "h": 6144, "a": 64}.items())
    rows = []
    for line in read("layer_times_22b.csv"):
        strategy = "megatron(8, sp=True)" if line["sequence_parallel"] == "1" else "megatron(8)"
        case = Case(cluster, strategy, "bf16", sizes, line["recomputed"])
        forward, backward = case.layer_ms()
        backward += case.left_out_ms()
        rows.append(Row(f"{line['experiment']}, forward", forward, float(line["forward_ms"])))
        rows.append(Row(f"{line['experiment']}, backward", backward, float(line["backward_ms"])))
    return rows


def step_rows() -> list[Row]:
    """Milliseconds of an iteration of GPT models of 1 to 8 billion parameters."""
    return [Row(name(line), step_ms(line), float(line["iteration_ms"])) for line in read("iteration_times_2020.csv")]


def name(line: Mapping[str, str]) -> str:
    return f"{line['case']} on {line['gpus']} GPUs, {line['preset']}"


def step_ms(line: Mapping[str, str]) -> float:
    """One iteration as published: every layer recomputed as a whole. Further layers add what the second two add."""
    ways, layers = int(line["tensor"]), int(line["layers"])
    data = int(line["gpus"]) // ways
    parts = [f"ddp({data})"] * (data > 1) + [f"megatron({ways})"] * (ways > 1)
    cluster = STEPS.on(ClusterSpec.preset(line["preset"], devices=int(line["gpus"])))
    sizes = {"b": int(line["batch"]), "s": 1024, "v": 51200, "h": int(line["hidden"]), "a": int(line["heads"])}
    case = Case(cluster, " * ".join(parts) or None, "fp16", tuple(sizes.items()), "layer")
    few, more = case.told(FEW).step_s, case.told(2 * FEW).step_s
    return 1e3 * (few + (layers / FEW - 1) * (more - few)) + layers * case.left_out_ms()


@cache
def read(file: str) -> tuple[Mapping[str, str], ...]:
    lines = (FOLDER / file).read_text(encoding="utf-8").splitlines()
    return tuple(csv.DictReader(line for line in lines if not line.startswith("#")))


def text(head: str, free: Free, rows: Iterable[Row]) -> Iterator[str]:
    """A table: what was chosen for it, then one line a figure."""
    yield f"{head}; free: {free}"
    for row in rows:
        yield f"  {row.name:50} {row.predicted:9.1f} ms, published {row.published:9.1f} ms   {row.error:+6.1%}"


def main() -> int:
    torch.set_num_threads(1)
    layers = layer_rows()
    print("\n".join(text("one layer of a 22B GPT (Korthikanti et al. 2022, table 4)", LAYERS, layers)), flush=True)
    most = max(abs(row.error) for row in layers)
    steps = step_rows()
    print("\n".join(text("iterations of GPTs (Megatron-LM, 2020)", STEPS, steps)))
    mean = statistics.mean(abs(row.error) for row in steps)
    print(f"layers, largest error {most:.1%} (bound {LAYER_BOUND:.0%})")
    print(f"iterations, mean error {mean:.1%} (bound {STEP_BOUND:.0%})")
    return 0 if most <= LAYER_BOUND and mean <= STEP_BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
