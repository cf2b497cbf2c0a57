"""Predicted seconds of collectives against what others published.

    python benchmarks/published_collectives.py

The constants of a preset hold for all of its rows; bandwidths of links were chosen with the large rows in view. In:
benchmarks/published/nccl_*.csv. Out: tables; `curves()` and `bandwidths()` give them to other scripts.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from autopar.cluster import ClusterSpec
from autopar.cost.comm import bus_bytes, choose

FOLDER = Path(__file__).parent / "published"
DESCRIBED_BY = {"a100": "dgx-a100-80", "v100": "dgx-2"}  # gpu of a curve -> preset


@dataclass(frozen=True)
class Row:
    """One published number and ours."""

    preset: str
    devices: int
    collective: str
    bytes: int
    published_s: float
    predicted_s: float
    algorithm: str
    source: str

    @property
    def error(self) -> float:
        """Relative error of the predicted seconds."""
        return abs(self.predicted_s / self.published_s - 1)

    @property
    def bus_bytes_per_s(self) -> tuple[float, float]:
        """Published and predicted bus bandwidth, as nccl-tests defines it."""
        moved = bus_bytes(self.collective, self.bytes, self.devices)
        return moved / self.published_s, moved / self.predicted_s


def curves() -> list[Row]:
    """Every point of the published curves."""
    return [
        _row(DESCRIBED_BY[r["gpu"]], int(r["devices"]), "all_reduce", int(r["bytes"]), float(r["seconds"]), "vTrain")
        for r in _read("nccl_all_reduce_curves.csv")
    ]


def bandwidths(*, claimed: bool = True) -> list[Row]:
    """Published bus bandwidths that presets are meant to reproduce, or those of their hardware that they are not."""
    rows = []
    for r in _read("nccl_bus_bandwidths.csv"):
        if r["preset"] and r["claimed"] == ("yes" if claimed else "no"):
            n, count = int(r["devices"]), int(r["bytes"])
            seconds = bus_bytes(r["collective"], count, n) / float(r["bus_bytes_per_s"])
            rows.append(_row(r["preset"], n, r["collective"], count, seconds, r["source"]))
    return rows


def text(rows: list[Row]) -> str:
    """One line a row, then the mean and the largest error."""
    lines = [
        f"{'preset':<12} {'n':>4} {'collective':<15}{'MiB':>9}{'ms':>10}{'here':>10}{'bus GB/s':>10}{'here':>8}  error"
    ]
    for r in rows:
        theirs, ours = r.bus_bytes_per_s
        lines.append(
            f"{r.preset:<12} {r.devices:>4} {r.collective:<15}{r.bytes / 2**20:>9.0f}{r.published_s * 1e3:>10.3f}"
            f"{r.predicted_s * 1e3:>10.3f}{theirs / 1e9:>10.1f}{ours / 1e9:>8.1f} {r.error:>6.1%}  {r.algorithm}"
        )
    errors = [r.error for r in rows]
    return "\n".join([*lines, f"mean error {mean(errors):.1%}, largest {max(errors):.1%}, of {len(errors)} rows"])


def _row(preset: str, devices: int, collective: str, count: int, seconds: float, source: str) -> Row:
    cluster = ClusterSpec.preset(preset, devices=devices)
    choice = choose(collective, count, cluster.way(1, devices))
    return Row(preset, devices, collective, count, seconds, choice.seconds, choice.name, source)


def _read(name: str) -> Iterator[dict[str, str]]:
    lines = (FOLDER / name).read_text().splitlines()
    return csv.DictReader(line for line in lines if not line.startswith("#"))


if __name__ == "__main__":
    by_gpu = curves()
    for preset in DESCRIBED_BY.values():
        print(text([row for row in by_gpu if row.preset == preset]), end="\n\n")
    print(text(bandwidths()), end="\n\n")
    print("published as too slow, and not claimed:")
    print(text(bandwidths(claimed=False)))
