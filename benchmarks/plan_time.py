"""How long a large model takes to be planned: Llama 3 8B on 32 devices, as mesh(data=8, model=4).

    python benchmarks/plan_time.py [--layers 32]

Two sequences of 2048 for each of the 8 data ranks, bf16 compute and float32 parameters, AdamW, the loss in the graph,
72 GiB a device. Nothing is allocated and no device is needed. Exits with 1 above the bound.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch

from autopar import ClusterSpec, plan
from autopar.models import llama

BOUND_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    layers = parser.parse_args().layers
    os.environ["AUTOPAR_CACHE"] = "off"  # a plan that is known already would take no time
    torch.set_num_threads(1)
    model, batch = llama.llama3_8b(layers, b=16, s=2048)
    start = time.perf_counter()
    found = plan(
        model,
        ClusterSpec.preset("dgx-h100", devices=32),
        example_inputs=batch,
        precision="bf16",
        memory_bytes="72GiB",
        pins={"mesh": {"data": 8, "model": 4}},
    )
    seconds = time.perf_counter() - start
    print(found)
    print(f"{layers} layers, model to plan: {seconds:.1f} s (bound {BOUND_S:.0f})")
    return 0 if seconds <= BOUND_S else 1


if __name__ == "__main__":
    sys.exit(main())
