"""`make startup`: how long GPT-2 small takes from the model to its plan for 4 devices, and from plan to first step.

The first step on 4 ranks also computes, which takes a second step as long: what is beyond that is the compiler's.
Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import itertools
import os
import sys
import time

import torch

from autopar import ClusterSpec, files, parallelize, plan
from autopar.models import gpt
from autopar.verify.pool import Pool

WORLD, PLAN_S, FIRST_STEP_S = 4, 10.0, 5.0


def planned() -> tuple[str, float]:
    """The plan as JSON, and seconds from the model to it."""
    model, args = gpt.gpt2_small()
    started = time.perf_counter()
    made = plan(model, ClusterSpec.preset("cpu-gloo", devices=WORLD), example_inputs=args)
    return files.dumps(made), time.perf_counter() - started


def first_steps(made: str) -> tuple[float, float, float]:
    """Seconds of `parallelize`, of the first forward and backward, and of the second; what each rank does."""
    model, args = gpt.gpt2_small()
    marks = [time.perf_counter()]
    cluster = ClusterSpec.preset("cpu-gloo", devices=WORLD)
    module = parallelize(model, cluster, example_inputs=args, plan=files.loads(made))
    marks.append(time.perf_counter())
    for _ in range(2):
        module(*args).backward()
        marks.append(time.perf_counter())
    ready, first, second = (b - a for a, b in itertools.pairwise(marks))
    return ready, first, second


def main() -> int:
    torch.set_num_threads(1)
    os.environ["AUTOPAR_CACHE"] = "off"  # a plan that is known already would take no time
    made, plan_s = planned()
    with Pool(WORLD, timeout=300) as pool:
        ready, first, second = (max(times) for times in zip(*pool.run(first_steps, made), strict=True))
    extra = ready + first - second
    good = plan_s <= PLAN_S and extra <= FIRST_STEP_S
    print(f"plan to module ready {ready:.1f} s, first step {first:.1f} s, second step {second:.1f} s")
    print(f"GPT-2 small on {WORLD} devices: model to plan {plan_s:.1f} s (bound {PLAN_S:.0f})")
    print(f"plan to first step, beyond what a step takes: {extra:.1f} s (bound {FIRST_STEP_S:.0f})")
    print("startup: ok" if good else "startup: A BOUND WAS MISSED")
    return 0 if good else 1


if __name__ == "__main__":
    import startup  # under its own name, by which the ranks find its functions

    sys.exit(startup.main())
