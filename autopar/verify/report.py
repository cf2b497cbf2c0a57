"""The answer of `autopar verify`: one row for each family, one column for each kind of tensor.

In: errors and counts of every family.  Out: a table, JSON, an exit code.  Next: `run.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from autopar.verify.compare import KINDS, TOLERANCE, Error

OK, MISMATCH, REFUSED = 0, 1, 3


@dataclass(frozen=True)
class Row:
    """One family.

    status    "ok" | "mismatch" | "refused" | "known" (refused, and listed in docs/limits.md) | "failed"
    note      why, where the status is not ok
    errors    kind -> the largest error, over all ranks, optimizers and steps
    counted   "all_reduce data backward" -> (collectives, bytes), from the running ranks, a step
    tensors   the same key -> tensors that the plan tells for them; those of one bucket share a collective
    flops     floating-point operations of all ranks / of the single device
    memory    bytes that the fullest rank stores: parameters, gradients, optimizer state
    detail    the traceback of a rank that failed
    """

    family: str
    status: str
    note: str = ""
    errors: Mapping[str, Error] = field(default_factory=dict)
    counted: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    tensors: Mapping[str, int] = field(default_factory=dict)
    flops: float = 0.0
    memory: Mapping[str, int] = field(default_factory=dict)
    mesh: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """All rows of one model on one world."""

    model: str
    world: int
    rows: Sequence[Row]
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """1 if a number is wrong or a rank failed, 3 if something was refused that docs/limits.md does not list."""
        states = {row.status for row in self.rows}
        if states & {"mismatch", "failed"}:
            return MISMATCH
        return REFUSED if "refused" in states else OK

    def text(self) -> str:
        """The table, and below it a line for everything that is not ok."""
        width = max([len("family"), *(len(row.family) for row in self.rows)])
        head = f"{'family':{width}}  " + "  ".join(f"{kind:>10}" for kind in KINDS) + "   flops  mesh"
        lines = [f"verify {self.model} on {self.world} ranks; largest error, bound {TOLERANCE:g}", head]
        for row in self.rows:
            lines.append(f"{row.family:{width}}  {cells(row)}")
        notes = [f"{row.family}: {row.status}: {row.note}" for row in self.rows if row.note]
        notes += [row.detail for row in self.rows if row.detail][:1]
        good = sum(row.status == "ok" for row in self.rows)
        verdict = {OK: "ok", MISMATCH: "MISMATCH", REFUSED: "REFUSED"}[self.exit_code]
        return "\n".join([*lines, *notes, f"{verdict}: {good} of {len(self.rows)} equal in {self.seconds:.0f} s"])

    def json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "model": self.model,
            "world": self.world,
            "tolerance": TOLERANCE,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 1),
            "rows": [asdict(row) for row in self.rows],
        }


def cells(row: Row) -> str:
    """The numbers of one row."""
    if not row.errors:
        return row.status
    numbers = "  ".join(f"{row.errors[kind].value:10.1e}" for kind in KINDS)
    return f"{numbers}  {row.flops:6.3f}  {row.mesh}"


def judge(errors: Mapping[str, Error]) -> tuple[str, str]:
    """Status and note of a row."""
    worst = max(errors.values(), key=lambda e: e.value)
    if worst.value <= TOLERANCE:
        return "ok", ""
    wrong = [kind for kind in KINDS if errors[kind].value > TOLERANCE]
    return "mismatch", f"{', '.join(wrong)}; worst {worst.value:.2e} at {worst.where}"
