"""The single device: the untouched module, run eagerly by plain torch in a process of its own.

In: targets, one JSON line each on standard input.  Out: a safetensors file for each, with everything that happened.
Next: `compare.py`.

This process imports no capture, rules, planner or passes, and says so after every answer. Two modes are all that is
not plain torch: float32 becomes float64 wherever it appears, and random functions draw from the generator whose numbers
do not depend on how many devices there are.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from autopar.double import Double
from autopar.errors import InputError
from autopar.random import replay
from autopar.verify.count import Counts
from autopar.verify.steps import Record, train
from autopar.verify.target import Target

FOREIGN = ("capture", "axes", "rules", "choices", "planner", "passes", "api", "runtime")


def serve() -> None:
    """Answer requests until standard input ends; every answer is one JSON line."""
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            flops = answer(request)
            reply: dict[str, Any] = {"flops": flops, "imported": foreign_modules()}
        except Exception as error:  # noqa: BLE001 - the one who asked raises it
            reply = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def foreign_modules() -> list[str]:
    """Rooms of the compiler that this process has loaded; there must be none."""
    return sorted(m for m in sys.modules if m.startswith(tuple(f"autopar.{room}" for room in FOREIGN)))


def answer(request: dict[str, Any]) -> int:
    """Train the target with every optimizer and write the record; the flops of one step."""
    sys.path[:] = request["path"]
    target = Target.parse(request["spec"], request["settings"], request["seed"])
    record: Record = {}
    counts = Counts()
    for optimizer in request["optimizers"]:
        record |= reference(target, optimizer, request["steps"], counts)
    save_file(record, request["file"])
    times: int = len(request["optimizers"]) * request["steps"]
    return sum(counts.flops.values()) // times


def reference(target: Target, optimizer: str, steps: int, counts: Counts) -> Record:
    """What one device does."""
    built = target.build(double=True)
    forwards = itertools.count()

    @contextmanager
    def during(phase: str) -> Iterator[None]:
        draws = replay(target.seed, next(forwards)) if phase == "forward" else nullcontext()
        with counts.during(phase), Double(), draws:  # type: ignore[no-untyped-call]
            yield

    record: Record = {}

    def keep(key: str, tensor: torch.Tensor) -> None:
        record[key] = own(tensor)

    train(built.model, built.args, built.kwargs, optimizer, steps=steps, see=keep, during=during)
    return record


def own(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor that nobody else changes."""
    return tensor.detach().clone().contiguous()


class Reference:
    """The other end: a process that is started once and asked for one target after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._files: dict[tuple[Any, ...], Path] = {}
        self.flops: dict[Target, int] = {}

    def file(self, target: Target, optimizers: Sequence[str], steps: int) -> Path:
        """The record of a target; made once."""
        key = (target, tuple(optimizers), steps)
        if key not in self._files:
            file = self.folder / f"reference{len(self._files)}.safetensors"
            reply = self._ask(
                {
                    "spec": target.spec,
                    "settings": dict(target.settings),
                    "seed": target.seed,
                    "path": list(target.path),
                    "optimizers": list(optimizers),
                    "steps": steps,
                    "file": str(file),
                }
            )
            self._files[key] = file
            self.flops[target] = reply["flops"]
        return self._files[key]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "autopar.verify.reference"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={"TRANSFORMERS_VERBOSITY": "error", **os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code, self._process = self._process.wait(), None
            raise RuntimeError(f"the reference process ended with exit code {code}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"the untouched model does not run: {reply['error']}")
        if reply["imported"]:
            raise InputError(
                f"{request['spec']} loads {reply['imported'][0]}, and the reference runs without any of the compiler\n"
                "  try: keep the model in a file of its own, and import the compiler where it is used"
            )
        return reply

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(10)
            self._process = None


def read(file: str) -> Record:
    """The record in a file."""
    return load_file(file)


if __name__ == "__main__":
    serve()
