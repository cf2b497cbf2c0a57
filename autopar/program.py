"""What every rank runs: three small graphs and the layouts of their ends.

In: `passes` make it.  Out: `runtime` binds it to one rank.  Next: `passes/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx

from autopar.graph import Graph
from autopar.layout import Layout, Step
from autopar.plan import Plan


@dataclass(frozen=True)
class Cell:
    """A piece of a program that one stage runs at once: values it takes, by name, and values it gives."""

    graph: fx.Graph
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True)
class Send:
    """A value that goes from one stage to another."""

    name: str
    source: int
    target: int


@dataclass(frozen=True)
class Settled:
    """A value that is there once all microbatches have run: `of` added up, or put side by side."""

    name: str
    of: str
    step: Step


@dataclass(frozen=True)
class Result:
    """A result of a phase: in one stage; `step` is the slice along the stages in which it is wanted, None for whole."""

    name: str
    stage: int
    step: Step | None = None


@dataclass(frozen=True)
class Phase:
    """Forward or backward, by stage.

    bodies    run once a microbatch
    sends     what goes between stages for each microbatch, in the order of sending
    settled   what the microbatches of a stage become together
    ends      run once, when all of it is there
    results   one per result of the program's graph of this phase; None for a gradient that is zero
    """

    bodies: tuple[Cell, ...]
    sends: tuple[Send, ...]
    settled: tuple[tuple[Settled, ...], ...]
    ends: tuple[Cell, ...]
    results: tuple[Result | None, ...]


@dataclass(frozen=True)
class Pipeline:
    """The stages of a program. `layouts` and `dtypes` are of the values that go between stages."""

    forward: Phase
    backward: Phase
    layouts: Mapping[str, Layout]
    dtypes: Mapping[str, torch.dtype]


@dataclass(frozen=True)
class Program:
    """One program for all ranks; sizes are those of the whole tensors until `bind` makes them a rank's own.

    refresh         stored shards of the parameters at ZeRO 1 and 2 -> their compute copies (in `refreshed` order, first
                    names); run when the copies are stale
    forward         placeholders `forward_inputs` (node names of graph inputs) -> the results of `graph.outputs` whose
                    kind is loss, output or buffer (in that order), then the `saved` values
    backward        placeholders `saved`, then the tangents -> the results whose kind is gradient or input_gradient
    input_layouts   node name -> layout in which each graph input is handed in (a parameter at level 1 or 2: its copy)
    output_layouts  one per `graph.outputs`; None where the output is None or no tensor
    pipeline        forward and backward cut into stages, where the plan has them; they run instead
    """

    graph: Graph
    plan: Plan
    refresh: fx.Graph
    forward: fx.Graph
    backward: fx.Graph
    refreshed: tuple[str, ...]
    forward_inputs: tuple[str, ...]
    saved: tuple[str, ...]
    tangents: tuple[str, ...]
    input_layouts: Mapping[str, Layout]
    output_layouts: tuple[Layout | None, ...]
    pipeline: Pipeline | None = None
