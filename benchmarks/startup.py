"""`make startup`: GPT-2 small on 4 ranks, from the model to its plan and from the plan to a first step.

The plan is made as `autopar plan` makes it, in one process. Then 4 ranks capture, plan, and from the plan on emit and
bind their program and spread the parameters. The first step also computes, as long as a second one does: that is shown
beside, and only what is beyond it counts. Exits with 1 when a bound is missed.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any

import torch

from autopar import ClusterSpec, parallelize, plan
from autopar.models import gpt
from autopar.verify.pool import Pool

WORLD, PLAN_S, FIRST_STEP_S = 4, 10.0, 5.0


def planned() -> float:
    """Seconds from the model to its plan."""
    model, args = gpt.gpt2_small()
    start = time.perf_counter()
    plan(model, ClusterSpec.preset("cpu-gloo", devices=WORLD), example_inputs=args)
    return time.perf_counter() - start


def started() -> tuple[float, ...]:
    """Seconds from model to plan, from plan to module, of a first forward and backward, of a second; on one rank."""
    model, args = gpt.gpt2_small()
    marks = [time.perf_counter()]
    module = parallelize(model, ClusterSpec.preset("cpu-gloo", devices=WORLD))
    compiler: Any = module._autopar.compiler
    make_plan = compiler.plan

    def marked(*arguments: Any) -> Any:
        found = make_plan(*arguments)
        marks.append(time.perf_counter())
        return found

    compiler.plan = marked
    module.prepare(*args)
    marks.append(time.perf_counter())
    for _ in range(2):
        module(*args).backward()
        marks.append(time.perf_counter())
    return tuple(b - a for a, b in itertools.pairwise(marks))


def main() -> int:
    torch.set_num_threads(1)
    os.environ["AUTOPAR_CACHE"] = "off"  # a plan that is known already would take no time
    plan_s = planned()
    with Pool(WORLD, timeout=300) as pool:
        on_ranks, ready, first, second = (max(times) for times in zip(*pool.run(started), strict=True))
    extra = ready + max(0.0, first - second)
    good = plan_s <= PLAN_S and extra <= FIRST_STEP_S
    print(f"on {WORLD} ranks: model to plan {on_ranks:.1f} s, plan to module {ready:.1f} s")
    print(f"first step {first:.1f} s, second step {second:.1f} s")
    print(f"GPT-2 small for {WORLD} devices: model to plan {plan_s:.1f} s (bound {PLAN_S:.0f})")
    print(f"plan to first step, beyond what a step takes: {extra:.1f} s (bound {FIRST_STEP_S:.0f})")
    print("startup: ok" if good else "startup: A BOUND WAS MISSED")
    return 0 if good else 1


if __name__ == "__main__":
    import startup  # under its own name, by which the ranks find its functions

    sys.exit(startup.main())
