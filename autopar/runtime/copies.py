"""Compute copies of parameters that are stored cut (ZeRO 1 and 2), kept equal to what is stored.

In: a program's refresh graph, the stored parameters.  Out: up-to-date copies.  Next: `step.py`.

Nothing counts the changes of a DTensor: optimizers, `p.data.mul_`, `p.copy_`, `load_state_dict` and hand-written
updates all leave its version at 0. But every stored shard is a part of this rank's own copy, so before a forward each
rank compares the two, bit for bit, and if they differ on any rank all of them gather again. An optimizer that steps
and a checkpoint that is loaded are known to change parameters; after them nothing need be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.layout import Layout, Mesh
from autopar.placements import piece
from autopar.plan import ParameterPlan

Refresh = Callable[[list[Tensor]], Sequence[Tensor]]


def inside(plan: ParameterPlan, mesh: Mesh, coordinate: Mapping[str, int]) -> Layout | None:
    """Where the stored shard lies in this rank's copy, as a layout of the copy; None if it does not lie in it."""
    local = plan.home.local_factors(mesh, dict(coordinate))
    cuts = []
    for stored_dim, home_dim in zip(plan.stored.cuts, plan.home.cuts, strict=True):
        if any(stored[: len(home)] != home for stored, home in zip(stored_dim, home_dim, strict=True)):
            return None
        cuts.append(tuple(s[len(h) :] for s, h in zip(stored_dim, home_dim, strict=True)))
    return Layout(local, tuple(cuts))


@dataclass
class Copies:
    """The compute copies of one set of parameters on this rank.

    plans   how each of them is kept, in the order in which `refresh` takes and gives them
    dtypes  what each is computed with
    """

    plans: tuple[ParameterPlan, ...]
    dtypes: tuple[torch.dtype, ...]
    refresh: Refresh
    mesh: Mesh
    coordinate: Mapping[str, int]
    values: tuple[Tensor, ...] = ()
    stale: bool = True

    def differ(self, stored: Sequence[Tensor]) -> bool:
        """Whether this rank knows or finds that its shards are not what the copies were made from."""
        if not self.plans:
            return False
        if self.stale or not self.values:
            return True
        return not all(map(self._same, self.plans, self.values, stored))

    def _same(self, plan: ParameterPlan, copy: Tensor, shard: Tensor) -> bool:
        part = inside(plan, self.mesh, self.coordinate)
        return part is not None and torch.equal(
            piece(copy, part, self.mesh, dict(self.coordinate)), shard.to(copy.dtype)
        )

    def renew(self, stored: Sequence[Tensor]) -> None:
        """Gather all copies again; every rank must come here together."""
        self.values = ()
        with torch.no_grad():
            shards = [shard.to(dtype) for shard, dtype in zip(stored, self.dtypes, strict=True)]
            self.values = tuple(self.refresh(shards))
        self.stale = False
