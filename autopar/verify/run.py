"""The parity harness: every family of one model against the single device.

In: a target, a number of ranks, families.  Out: a `Report`.  Next: `../cli.py`, which prints it.

    with Harness(4) as harness:
        report = harness.verify(Target.parse("autopar.models.gpt:tiny"), world=2, families=["ddp", "zero3"])

The model is captured once in this process, for planning, and once on each rank; the reference is made once.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from autopar import files
from autopar.cluster import ClusterSpec
from autopar.errors import UnsupportedError
from autopar.moves import Moved
from autopar.plan import Plan
from autopar.verify import families as kinds
from autopar.verify.compare import Error
from autopar.verify.pool import Pool, RankError
from autopar.verify.rank import Finding, analysed, captured, check
from autopar.verify.reference import Reference
from autopar.verify.report import Report, Row, judge
from autopar.verify.target import Target

OPTIMIZERS = ("sgd", "adamw")
STEPS = 3
BUCKETS = ((0, 0), (2000, 2000), (2**22, 2**22), (2**22, 0))
"""For random plans, bytes of a bucket and of what is copied into one: none, little, everything, no copies."""
LIMITS = Path(__file__).resolve().parents[2] / "docs" / "limits.md"
Progress = Callable[[str], None]


class Harness:
    """Ranks and a reference process that live for many calls; `device` and `backend` are those of the ranks."""

    def __init__(self, ranks: int, timeout: float = 180.0, device: str = "cpu", backend: str = "gloo") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="autopar-verify-")
        self.pool = Pool(ranks, timeout=timeout, backend=backend)
        self.device = device
        self.reference = Reference(Path(self._folder.name))

    def __enter__(self) -> Harness:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()
        self.reference.close()
        self._folder.cleanup()

    def verify(
        self,
        target: Target,
        world: int,
        families: Sequence[str] | None = None,
        random: int = 0,
        seed: int = 0,
        progress: Progress = lambda _: None,
        buckets: bool = True,
    ) -> Report:
        """Check the families (all that exist on this many ranks by default), then `random` legal plans.

        Without `buckets` every tensor has a collective of its own, so that tensors can be counted.
        """
        started = time.monotonic()
        rows = []
        progress("reference")
        file = str(self.reference.file(target, OPTIMIZERS, STEPS))
        for name, make in self.plans(target, world, families, random, seed):
            progress(name)
            rows.append(self.row(name, make if buckets else partial(apart, make), target, world, file))
        return Report(str(target), world, rows, time.monotonic() - started)

    def plans(
        self, target: Target, world: int, families: Sequence[str] | None, random: int, seed: int
    ) -> Iterator[tuple[str, Callable[[], Plan]]]:
        """Name of every row, and how its plan is made."""
        cluster = ClusterSpec.preset("cpu-gloo", devices=world)
        for name in kinds.names(world) if families is None else families:
            yield name, partial(forced, target, cluster, name)
        for number in range(random):
            yield f"random {seed}.{number}", partial(drawn, target, world, 1000 * seed + number)

    def row(self, name: str, make: Callable[[], Plan], target: Target, world: int, file: str) -> Row:
        """One family: plan, run, compare; what is refused is a row too."""
        try:
            plan = make()
            findings = self.pool.run(
                check, target, files.dumps(plan), file, OPTIMIZERS, STEPS, self.device, world=world
            )
        except UnsupportedError as error:
            return refused(name, str(error), target, world)
        except RankError as error:
            kinds_of = {o.error for o in error.outcomes if o.error not in ("", "Killed")}
            if kinds_of == {"UnsupportedError"}:
                message = next(o.message for o in error.outcomes if o.message)
                return refused(name, message, target, world)
            return failed(name, error, str(plan.mesh))
        return finished(name, plan, findings, single_flops(self.reference, target))


def apart(make: Callable[[], Plan]) -> Plan:
    """The plan that `make` makes, with a collective for every tensor."""
    return replace(make(), bucket_bytes=0)


def forced(target: Target, cluster: ClusterSpec, family: str) -> Plan:
    """The best plan of a family."""
    from autopar.planner import plan

    strategy = kinds.strategy(family, cluster.devices)
    made: Plan = plan(captured(target), cluster, strategy=strategy, time_limit=30, axes=analysed(target))
    return made


def drawn(target: Target, world: int, seed: int) -> Plan:
    """A legal plan drawn at random."""
    from autopar.planner import random_plan
    from autopar.planner.search import meshes

    made: Plan = random_plan(captured(target), analysed(target), meshes(world), seed)
    bucket, copied = BUCKETS[seed % len(BUCKETS)]
    return replace(made, bucket_bytes=bucket, copied_bytes=copied)


def finished(name: str, plan: Plan, findings: Sequence[Finding], flops: int) -> Row:
    """The row of a family that ran: the worst of all ranks."""
    errors = {kind: worst([f.errors[kind] for f in findings]) for kind in findings[0].errors}
    status, note = judge(errors)
    first = findings[0]
    if status == "ok" and name in kinds.FAMILIES and not kinds.FAMILIES[name].shows(plan, first.counted):
        status, note = "mismatch", f"the plan shows no cut of its kind; collectives: {counted_text(first.counted)}"
    if status == "ok" and (wrong := miscounted(first)):
        status, note = "mismatch", f"collectives that ran are not those of the plan: {wrong}"
    memory = {k: max(f.memory[k] for f in findings) for k in first.memory}
    ratio = sum(f.flops for f in findings) / flops if flops else 0.0
    counted = {" ".join(key): value for key, value in sorted(first.counted.items())}
    told = {" ".join(key): moved.tensors for key, moved in first.told.items()}
    return Row(name, status, note, errors, counted, told, ratio, memory, str(plan.mesh))


def miscounted(finding: Finding) -> str:
    """Where the first rank ran other collectives than its program tells: another number, or bytes off by 1 %.

    What compares calls across ranks runs on no mesh axis ("other"), and belongs to no plan.
    """
    ran = {key: value for key, value in finding.counted.items() if key[1] != "other"}
    wrong = []
    for key in sorted({*ran, *finding.told}):
        (calls, size), told = ran.get(key, (0, 0)), finding.told.get(key, Moved())
        if calls != told.calls or (not told.about and abs(size - told.bytes) > 0.01 * told.bytes):
            wrong.append(f"{' '.join(key)}: {calls} of {size} bytes ran, {told.calls} of {told.bytes} were told")
    return "; ".join(wrong)


def failed(name: str, error: RankError, mesh: str) -> Row:
    """The row of a family whose ranks raised: one line, and the traceback of the first rank."""
    first = next(o for o in error.outcomes if o.error not in ("", "Killed"))
    line = first.message.splitlines()[0] if first.message else ""
    return Row(name, "failed", f"rank {first.rank}: {first.error}: {line}", mesh=mesh, detail=str(error))


def worst(errors: Sequence[Error]) -> Error:
    return max(errors, key=lambda e: e.value)


def counted_text(counted: kinds.Counted) -> str:
    return ", ".join(f"{n} {' '.join(key)}" for key, (n, _) in sorted(counted.items())) or "none"


def single_flops(reference: Reference, target: Target) -> int:
    """Flops of one step on the single device, counted in the reference process."""
    return reference.flops.get(target, 0)


# --- what may be refused ----------------------------------------------------------------------------------------------


def refused(name: str, message: str, target: Target, world: int) -> Row:
    """The row of a refusal: known if docs/limits.md lists it."""
    reason = limit(target.spec, name, world, message.splitlines()[0])
    return Row(
        name, "known" if reason else "refused", message if not reason else f"{message.splitlines()[0]} ({reason})"
    )


def limit(model: str, family: str, world: int, message: str, file: Path | None = None) -> str:
    """The reason that the table in docs/limits.md gives for a refusal, or nothing."""
    file = file or LIMITS
    if not file.exists():
        return ""
    for line in file.read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if len(cells) == 5 and all(map(fits, cells, (model, family, str(world), message))):
            return cells[4]
    return ""


def fits(cell: str, value: str) -> bool:
    """Whether a table cell, in which `*` stands for anything, describes a value."""
    return re.fullmatch(re.escape(cell).replace(r"\*", ".*"), value) is not None
