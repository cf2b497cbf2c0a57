"""What every rank runs: three small graphs and the layouts of their ends.

In: `passes` make it.  Out: `runtime` binds it to one rank.  Next: `passes/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.fx as fx

from autopar.graph import Graph
from autopar.layout import Layout
from autopar.plan import Plan


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
