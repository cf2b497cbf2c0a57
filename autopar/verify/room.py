"""Whether this machine has the memory to verify a model, told before anything is allocated.

In: a target and a number of ranks.  Out: nothing, or an `InputError` with the numbers.  Next: `run.py`.

In units of the model's parameters and buffers in float64 (measured as resident memory, on a perceptron of 10 M
parameters): the reference holds 16, which are its training state and what it writes down of 2 optimizers in 3 steps;
after it each rank holds up to 6, under ddp, and reads the record from the page cache.
"""

from __future__ import annotations

import os

from autopar import _torch
from autopar.errors import InputError
from autopar.text import size
from autopar.verify.target import Built, Target

REFERENCE, RANK = 16, 6


def check_room(target: Target, world: int, machine_bytes: float | None = None) -> None:
    """Refuse a model that needs more than the machine has (its physical memory); one that has no fake form may pass."""
    try:
        with _torch.fake_mode():
            built = target.build()
    except _torch.DataDependent:
        return
    model_bytes = 8 * numbers(built)
    needed = model_bytes * max(REFERENCE, RANK * world)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if machine_bytes is None else machine_bytes
    if needed <= there:
        return
    hf = target.spec.startswith("hf:")
    small = (
        "tiny=true for small sizes of everything, or keys of its config" if hf else "smaller arguments of its function"
    )
    raise InputError(
        f"{target} takes {size(model_bytes)} in float64: to verify it on {world} ranks takes about {size(needed)}, and "
        f"this machine has {size(there)}\n  try: --set {small}"
    )


def numbers(built: Built) -> int:
    """How many numbers the parameters and buffers hold."""
    return sum(t.numel() for t in (*built.model.parameters(), *built.model.buffers()))
