"""What the planner chose: the mesh, how every op runs, how every parameter is kept, what that costs.

In: nothing.  Out: `Plan`, the value that passes, text and files share.  Next: `planner/program.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from autopar.layout import Layout, Mesh


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter is kept.

    level   ZeRO level. 0: as it is computed with. 1: optimizer state and stored parameter sharded, a compute copy kept,
            gradients reduced when backward ends. 2: gradients reduce-scattered as they appear. 3: gathered before use
    home    layout of the compute copy (levels 0-2); at level 3 the same as `stored`
    stored  layout of the parameter, its gradient and its optimizer state
    keep    level 3: keep the gathered copy from forward until its backward, rather than gather it again
    """

    level: int
    home: Layout
    stored: Layout
    keep: bool = False


@dataclass(frozen=True)
class Plan:
    """A complete decision for one graph on one cluster.

    ops         node name -> role of each mesh axis, in mesh order: the letter of the op's rule that it cuts, "" for
                whole, "+" for all operands pending, "+0" for operand 0 pending
    inputs      node name -> layout in which an input arrives (only those that are `Local`; others arrive whole)
    parameters  first name -> how it is kept
    costs       seconds and bytes that the planner predicts, by name
    certificate objective, bound, gap, seconds of solving, what else was tried
    stages      node name -> number of the stage that runs it, where the mesh has an axis of stages
    bucket_bytes  size up to which reductions of gradients, and gathers of a block's parameters, run as one collective
    copied_bytes  size up to which a tensor is copied for that; a larger one joins where its op writes into the bucket
    notes       node name -> its module and what its letters are called, "blocks.0.up: m~0=batch n=heads"; for readers
    """

    mesh: Mesh
    ops: Mapping[str, tuple[str, ...]]
    parameters: Mapping[str, ParameterPlan]
    inputs: Mapping[str, Layout] = field(default_factory=lambda: MappingProxyType({}))
    costs: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    certificate: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    fingerprint: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    bucket_bytes: int = 0
    copied_bytes: int = 0
    notes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    stages: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; see `autopar/files.py`."""
        from autopar import files

        files.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that was saved; a mistake in the file is a `PlanError` that holds its place."""
        from autopar import files

        return files.load(path)

    def diff(self, other: Plan) -> str:
        """What another plan does differently, as text; empty where it is the same."""
        from autopar.difference import difference

        return difference(self, other)

    def __str__(self) -> str:
        from autopar.text import text

        return text(self)
