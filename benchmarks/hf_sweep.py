"""`make sweep`: every architecture of four auto-mappings of transformers, small, trained on 2 ranks and compared.

Causal and masked language models, sequence to sequence, pictures: each is built from a small config with random weights
and goes through `hf_sweep_one.py` in a process of its own kind, which is ended and started anew when one takes too long
or dies. Writes docs/architectures.md and prints the figures. Exits with 1 if fewer than 60 architectures are equal, a
number is wrong, or something failed without a name.

    --only NAME      this one alone; may be given again; no page is written
    --jobs N         so many side by side
    --limit SECONDS  for each architecture
    --resume FILE    JSON lines: what stands there is not done again, what is done is added
    --page           nothing is done; the page is written of what stands in FILE
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from hf_sweep_one import FAMILIES, Found, everywhere

from autopar.hf_inputs import classes_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architectures.md"
PURPOSES = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION")
BESIDES = ("WhisperForConditionalGeneration",)
ENOUGH = 60
FIXED = {"OMP_NUM_THREADS": "1", "AUTOPAR_CACHE": "off", "PYTHONHASHSEED": "0"}  # some models walk through sets


def architectures() -> list[str]:
    """Classes of the four mappings, each once."""
    return list(dict.fromkeys([*(name for purpose in PURPOSES for name in classes_of(purpose)), *BESIDES]))


# ---- processes -------------------------------------------------------------------------------------------------------


class Child:
    """A process that answers names, until one takes too long."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.process: subprocess.Popen[str] | None = None

    def ask(self, name: str) -> Found:
        """What became of one architecture."""
        process = self.process = self.process or self.start()
        assert process.stdin is not None and process.stdout is not None
        clock = threading.Timer(self.limit, self.end)
        clock.start()
        try:
            process.stdin.write(name + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        late = not clock.is_alive()
        clock.cancel()
        if line:
            return Found(**json.loads(line))
        self.end()
        reason = f"not done after {self.limit:.0f} s" if late else "its process died"
        return Found(name, outcomes=everywhere("failed"), reason=reason, seconds=self.limit)

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "benchmarks" / "hf_sweep_one.py"), str(self.limit)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={"TRANSFORMERS_VERBOSITY": "error", **os.environ, **FIXED},
        )

    def end(self) -> None:
        """End the process and its ranks."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def sweep(names: Sequence[str], jobs: int, limit: float) -> Iterator[Found]:
    """Results as they come."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[Found] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)

    def work() -> None:
        child = Child(limit)
        while not waiting.empty():
            done.put(child.ask(waiting.get()))
        child.end()

    for _ in range(jobs):
        threading.Thread(target=work, daemon=True).start()
    for _ in names:
        yield done.get()


# ---- the page --------------------------------------------------------------------------------------------------------

HEAD = """# Architectures

Classes of the auto-mappings of transformers for causal and masked language models, sequence to sequence models and
classification of pictures, built from a small config with random weights and trained for 3 steps with two optimizers on
2 processes under four plan families. *equal*: every loss, output, gradient, parameter and buffer is that of the
untouched module on one device, within 1e-9 in float64. *refused*: an error with a name, before any program runs.
*unstable*: some differ, and plain torch on one device moves as far (at least a hundredth of it) if its parameters start
one rounding, 2e-16, away: in models this small batch normalisation has channels without variance, and means that are
zero but for rounding. *whole*: kinds of ops that have no rule and run whole on every device.

Written by `make sweep`, transformers {version}.

{figures}

| architecture | ops | whole | {families} | seconds |
| --- | --- | --- |{rules}| --- |
"""
REASONS = """
## Why not

| architecture | reason |
| --- | --- |
"""
ABSENT = """
## Not built small, or not run by plain torch here in float64

| architecture | reason |
| --- | --- |
"""


def page(found: Sequence[Found]) -> str:
    """The whole page."""
    import transformers

    ran = [f for f in found if f.outcome != "absent"]
    left = len(set(architectures()) - {f.name for f in found})
    head = HEAD.format(
        version=transformers.__version__,
        figures="  \n".join([*figures(found), *([f"{left} not tried yet"] if left else [])]),
        families=" | ".join(FAMILIES),
        rules="|".join([" --- "] * len(FAMILIES)),
    )
    rows = "".join(row(f) for f in ran)
    why = "".join(reason(f) for f in ran if f.reason)
    absent = "".join(reason(f) for f in found if f.outcome == "absent")
    return head + rows + REASONS + why + ABSENT + absent


def row(found: Found) -> str:
    whole = ", ".join(f"`{op}` x {count}" for op, count in sorted(found.whole.items()))
    outcomes = " | ".join(found.outcomes[family] for family in FAMILIES)
    return f"| {found.name} | {found.ops or '-'} | {whole or '-'} | {outcomes} | {found.seconds:.0f} |\n"


def reason(found: Found) -> str:
    return f"| {found.name} | {found.reason.replace('|', '/')} |\n"


def figures(found: Sequence[Found]) -> list[str]:
    """How many architectures came out how."""
    counts = Counter(f.outcome for f in found)
    whole = sum(bool(f.whole) for f in found if f.ops)
    return [
        f"equal {counts['equal']}, refused {counts['refused']}, unstable {counts['unstable']}, "
        f"wrong {counts['wrong']}, failed {counts['failed']}, not here {counts['absent']}, "
        f"of {len(found)} architectures",
        f"ops without a rule in {whole} of {sum(bool(f.ops) for f in found)} that were captured",
        f"{sum(f.seconds for f in found) / 60:.0f} minutes",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1800)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    kept = given.resume.read_text().splitlines() if given.resume and given.resume.exists() else []
    found = {f.name: f for f in (Found(**json.loads(line)) for line in kept)}
    names = given.only or [name for name in architectures() if name in found or not given.page]
    for one in sweep([name for name in names if name not in found], given.jobs, given.limit):
        found[one.name] = one
        print(f"{one.outcome:8} {one.name} {one.seconds:.0f} s {one.reason}", flush=True)
        if given.resume:
            with given.resume.open("a") as file:
                file.write(json.dumps(asdict(one)) + "\n")
    results = [found[name] for name in names]
    if not given.only:
        PAGE.write_text(page(results))
    print("\n".join(figures(results)))
    bad = any(f.outcome in ("wrong", "failed") for f in results)
    few = not given.only and sum(f.outcome == "equal" for f in results) < ENOUGH
    return int(bad or few)


if __name__ == "__main__":
    sys.exit(main())
