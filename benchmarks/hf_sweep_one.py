"""One architecture after another, for `hf_sweep.py`: built, run by plain torch, captured, planned, trained on 2 ranks.

In: seconds that one may take, then names of classes, one a line on standard input.  Out: a `Found` for each, as a line
of JSON on standard output.

    equal      every loss, output, gradient, parameter and buffer of 3 steps with two optimizers is that of one device
    refused    an error with a name, raised before a program ran
    unstable   numbers differ, and plain torch alone moves as far if its parameters start one rounding away
    wrong      a number differs
    failed     anything else
    absent     the class cannot be built small, or plain torch does not run it in float64 on this machine
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rounding import explains, moved

from autopar.axes import computes
from autopar.errors import AutoparError
from autopar.rules.table import lookup
from autopar.verify.compare import Error
from autopar.verify.rank import captured
from autopar.verify.run import OPTIMIZERS, STEPS, Harness
from autopar.verify.target import Target

FAMILIES = ("ddp", "zero3", "tensor", "auto")
OUTCOMES = {"ok": "equal", "known": "refused", "refused": "refused", "mismatch": "wrong", "failed": "failed"}
WORLD = 2


@dataclass(frozen=True)
class Found:
    """What became of one architecture: an outcome for each family that was tried, and why where it is not equal."""

    name: str
    ops: int = 0
    whole: Mapping[str, int] = field(default_factory=dict)
    outcomes: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        """The worst of all families."""
        return max(self.outcomes.values(), key=("equal", "absent", "refused", "unstable", "wrong", "failed").index)


def line_of(error: BaseException) -> str:
    """The name of an error, what it says, and the user's line where it tells one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    where = [line for line in lines[1:] if line.startswith("from ")][:1]
    return " ".join([f"{type(error).__name__}: {lines[0]}", *where])[:400]


def everywhere(outcome: str) -> dict[str, str]:
    return dict.fromkeys(FAMILIES, outcome)


def tried(harness: Harness, name: str) -> Found:
    """Everything that is done with one architecture."""
    target = Target.parse(f"hf:{name}", {"tiny": True})
    try:
        target.build()
        harness.reference.file(target, OPTIMIZERS, STEPS)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is not ours, but for what cannot be drawn
        outcome = "refused" if "does not run: UnsupportedError" in str(error) else "absent"
        return Found(name, outcomes=everywhere(outcome), reason=line_of(error))
    try:
        nodes = [node for node in captured(target).fx.nodes if computes(node)]
    except Exception as error:  # noqa: BLE001 - told about in the table
        outcome = "refused" if isinstance(error, AutoparError) else "failed"
        return Found(name, outcomes=everywhere(outcome), reason=line_of(error))
    whole = Counter(str(node.target) for node in nodes if not lookup(node)[1])
    outcomes, reasons = {}, []
    for family, outcome, reason in trained(harness, target):
        outcomes[family] = outcome
        reasons += [f"{family}: {reason}"] if reason else []
    return Found(name, len(nodes), dict(whole), outcomes, "; ".join(reasons))


def trained(harness: Harness, target: Target) -> Iterator[tuple[str, str, str]]:
    """(family, outcome, reason), family by family."""
    own: dict[str, Error] = {}
    for family in FAMILIES:
        try:
            (row,) = harness.verify(target, WORLD, [family]).rows
            outcome, note = OUTCOMES[row.status], row.note.split("\n")[0]
            if outcome == "wrong":
                own = own or rounded(harness, target)
                if explains(own, row.errors):
                    most = max(own.values(), key=lambda e: e.value)
                    outcome, note = "unstable", f"one rounding moves plain torch by {most.value:.1e} at {most.where}"
            yield family, outcome, note
        except AutoparError as error:
            yield family, "refused", line_of(error)
        except Exception as error:  # noqa: BLE001 - told about in the table
            yield family, "failed", line_of(error)


def rounded(harness: Harness, target: Target) -> dict[str, Error]:
    """How far plain torch alone moves."""
    return moved(target, str(harness.reference.file(target, OPTIMIZERS, STEPS)), OPTIMIZERS, STEPS)


def serve(limit: float) -> None:
    """Answer names until standard input ends."""
    warnings.filterwarnings("ignore")
    answers, sys.stdout = sys.stdout, sys.stderr
    with Harness(WORLD, timeout=limit) as harness:
        for name in sys.stdin:
            started = time.monotonic()
            found: dict[str, Any] = asdict(tried(harness, name.strip()))
            answers.write(json.dumps({**found, "seconds": round(time.monotonic() - started, 1)}) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve(float(sys.argv[1]))
