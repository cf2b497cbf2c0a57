"""The plan families that the harness forces, and what must be seen of each.

In: a name and a number of ranks.  Out: a strategy for the planner, and whether a plan shows a cut of that kind.
Next: `run.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.layout import STAGE
from autopar.plan import ParameterPlan, Plan

Counted = Mapping[tuple[str, str, str], tuple[int, int]]


@dataclass(frozen=True)
class Family:
    """One way to spread a model.

    make      (ranks of the first axis, ranks of the second) -> strategy; None is the planner's own choice
    mixed     it needs two mesh axes, so a world that is no prime
    named     only where it is asked for by name
    shows     what a plan and its running collectives must have
    """

    make: Callable[[int, int], Any]
    shows: Callable[[Plan, Counted], bool]
    mixed: bool = False
    named: bool = False


def split(world: int) -> tuple[int, int]:
    """The two sizes of a mixed family: 4 = 2 x 2, 6 = 3 x 2; a prime does not split."""
    small = next((n for n in range(2, int(world**0.5) + 1) if world % n == 0), 1)
    return world // small, small


def names(world: int) -> list[str]:
    """Families that exist on this many ranks, but for those that are only tried by name."""
    return [name for name, family in FAMILIES.items() if exists(name, world) and not family.named]


def exists(name: str, world: int) -> bool:
    """Whether a family has the mesh axes that it needs."""
    return not FAMILIES[name].mixed or split(world)[1] > 1


def strategy(name: str, world: int) -> Any:
    """The strategy that forces a family."""
    family = FAMILIES[name]
    return family.make(*split(world)) if family.mixed else family.make(world, 1)


def _strategies() -> Any:
    from autopar import strategies

    return strategies


# --- what must be seen ------------------------------------------------------------------------------------------------


def some(plan: Plan, test: Callable[[ParameterPlan], bool]) -> bool:
    return any(test(p) for p in plan.parameters.values())


def ran(counted: Counted, kind: str, phase: str) -> bool:
    """Whether a collective of a kind ran in a phase."""
    return any(k == kind and p == phase for k, _, p in counted)


def data(plan: Plan, counted: Counted) -> bool:
    return ran(counted, "all_reduce", "backward") and some(plan, lambda p: p.level == 0 and not p.home.axes)


def zero(level: int) -> Callable[[Plan, Counted], bool]:
    def shows(plan: Plan, counted: Counted) -> bool:
        return some(plan, lambda p: p.level == level and p.stored != p.home) and ran(
            counted, "reduce_scatter", "backward"
        )

    def shows_3(plan: Plan, counted: Counted) -> bool:
        """Gathers in forward; those in backward are only where a gradient needs the parameter again."""
        return some(plan, lambda p: p.level == 3 and bool(p.stored.axes)) and ran(counted, "all_gather", "forward")

    return shows_3 if level == 3 else shows


def kept(plan: Plan, counted: Counted) -> bool:
    return some(plan, lambda p: p.level == 3 and p.keep and bool(p.stored.axes)) and ran(
        counted, "all_gather", "forward"
    )


def hybrid(plan: Plan, counted: Counted) -> bool:
    axes = set(plan.mesh.names)
    return some(plan, lambda p: p.level == 3 and bool(p.stored.axes) and p.stored.axes < axes)


def cut(plan: Plan, counted: Counted) -> bool:
    return some(plan, lambda p: p.level < 3 and bool(p.home.axes))


def exchanged(plan: Plan, counted: Counted) -> bool:
    """Experts are cut, and tokens travel to them and back."""
    return cut(plan, counted) and ran(counted, "all_to_all", "forward") and ran(counted, "all_to_all", "backward")


def staged(plan: Plan, counted: Counted) -> bool:
    """Every stage has ops of its own."""
    return len(set(plan.stages.values())) == plan.mesh.size(STAGE)


def anything(plan: Plan, counted: Counted) -> bool:
    return True


def cut_and_gathered(plan: Plan, counted: Counted) -> bool:
    """Cut by two axes where it is stored: one it is computed with, one it is gathered over."""
    return some(plan, lambda p: p.level == 3 and len(p.stored.axes) > 1)


FAMILIES: Mapping[str, Family] = {
    "ddp": Family(lambda n, _: _strategies().ddp(), data),
    "zero1": Family(lambda n, _: _strategies().zero(1), zero(1)),
    "zero2": Family(lambda n, _: _strategies().zero(2), zero(2)),
    "zero3": Family(lambda n, _: _strategies().zero(3), zero(3)),
    "fsdp-keep": Family(lambda n, _: _strategies().fsdp(reshard=False), kept),
    "tensor": Family(lambda n, _: _strategies().tensor(n), cut),
    "megatron": Family(lambda n, _: _strategies().megatron(n, sp=False), cut),
    "megatron-sp": Family(lambda n, _: _strategies().megatron(n, sp=True), cut),
    "expert": Family(lambda n, _: _strategies().expert(n), exchanged),
    "hsdp": Family(lambda n, m: _strategies().hsdp(m), hybrid, mixed=True),
    "ddp x tensor": Family(lambda n, m: _strategies().ddp(n) * _strategies().tensor(m), cut, mixed=True),
    "zero3 x megatron": Family(
        lambda n, m: _strategies().zero(3, n) * _strategies().megatron(m, sp=True), cut_and_gathered, mixed=True
    ),
    "pipeline": Family(lambda n, _: _strategies().pipeline(n, microbatches=3), staged, named=True),
    "auto": Family(lambda n, _: None, anything),
}
