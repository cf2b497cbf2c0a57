"""Everything that is compared with what others published, table by table.

    python benchmarks/published.py

Collectives (`published_collectives.py`), memory (`published_memory.py`), seconds of layers and steps
(`published_time.py`); each of these runs alone too. Exits with 1 if a bound is missed.
"""

from __future__ import annotations

import statistics
import sys

import published_collectives
import published_memory
import published_time
import torch

COLLECTIVES_BOUND = 0.10


def collectives() -> bool:
    """Curves by preset, then bus bandwidths; the mean error of each table counts."""
    curves = published_collectives.curves()
    presets = published_collectives.DESCRIBED_BY.values()
    tables = {f"NCCL all-reduce on {p}": [row for row in curves if row.preset == p] for p in presets}
    tables["NCCL bus bandwidths"] = published_collectives.bandwidths()
    good = []
    for name, rows in tables.items():
        error = statistics.mean(row.error for row in rows)
        good.append(error <= COLLECTIVES_BOUND)
        print(f"{name}\n{published_collectives.text(rows)} (bound {COLLECTIVES_BOUND:.0%})\n", flush=True)
    return all(good)


def main() -> int:
    torch.set_num_threads(1)
    good = [collectives(), published_memory.main() == 0, published_time.main() == 0]
    print("published: ok" if all(good) else f"published: {good.count(False)} OF {len(good)} PARTS MISSED A BOUND")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
