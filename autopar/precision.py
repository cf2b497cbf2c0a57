"""Training in low precision: what is stored, what is computed with, what is reduced.

In: the dtypes that a user asks for.  Out: `Precision`; a graph whose gradients are reduced in the dtype asked for.
Next: `capture.py`.

    autopar.parallelize(model, cluster, precision=Precision(param=torch.bfloat16, reduce=torch.float32))

Parameters, their gradients and the optimizer's state are stored as the model has them (float32). Every forward computes
with copies of this rank's shards in `param`, which is also what is gathered. A gradient is computed in `param`, cast to
`reduce`, reduced, and cast to what its parameter is stored in. Buffers keep their dtypes. This is the recipe of FSDP2's
`MixedPrecisionPolicy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import InputError
from autopar.graph import Graph
from autopar.layout import Step

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """Dtypes of a training step.

    param   of computing, of inputs, and of what is gathered; None: the model's own
    reduce  in which gradients are summed over devices; None: as they are computed
    output  of what the model returns; None: as it is computed
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, dtype in vars(self).items():
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise InputError(
                    f"Precision({name}={dtype!r}): give a floating-point dtype like torch.bfloat16, or None"
                )

    def __str__(self) -> str:
        named = (f"{k}={str(v).removeprefix('torch.')}" for k, v in vars(self).items() if v is not None)
        return f"Precision({', '.join(named)})"

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """What a parameter or an input of this dtype is computed with."""
        return self.param if self.param is not None and dtype.is_floating_point else dtype


def low(name: str) -> Precision:
    """ "bf16" or "bfloat16", "fp16" or "float16": computed and gathered so, reduced in float32."""
    return Precision(param=LOW[name], reduce=torch.float32)


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """A floating-point tensor in another dtype; anything else as it is."""
    return value.to(dtype) if dtype is not None and isinstance(value, Tensor) and value.is_floating_point() else value


def with_reductions(graph: Graph, precision: Precision, stored: Sequence[tuple[str, torch.dtype]]) -> Graph:
    """Gradients leave in what their parameters are stored in, cast before they are reduced or after, and at once: a
    reduction goes on while backward does.

    stored   (name, dtype) of every parameter

        %g   : bf16[d, f] = mm(%x, %y)              # the gradient of w
    becomes
        %g   : bf16[d, f] = mm(%x, %y)
        %g_1 : f32[d, f]  = _to_copy(%g, float32)   # sums over devices come behind it
    """
    dtypes = dict(stored)
    outputs, late = list(graph.outputs), set()
    end = next(n for n in graph.fx.nodes if n.op == "output")
    for i, output in enumerate(outputs):
        if output.kind != "gradient" or output.node is None:
            continue
        node = graph.node(output.node)
        wanted = [d for d in (precision.reduce, dtypes[output.name]) if d is not None]
        for number, dtype in enumerate(wanted):
            if node.meta["val"].dtype == dtype:
                continue
            with graph.fx.inserting_after(node):
                new = graph.fx.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
            reduction, stored_so = number == 0 and precision.reduce is not None, number == len(wanted) - 1
            val = node.meta["val"].to(dtype)
            new.meta = {**node.meta, "val": val, "reduction": reduction, "stored": stored_so}
            if reduction:
                late.add(new.name)
            node = new
        outputs[i] = replace(output, node=node.name)
    end.args = (tuple(None if o.node is None else graph.node(o.node) for o in outputs),)
    return replace(graph, outputs=tuple(outputs), stored=dtypes, unreduced=frozenset(late))


def low_loss(graph: Graph) -> str:
    """The dtype that the loss is computed in, where it has fewer bits than float32; a cast behind it does not count."""
    node = next((graph.node(o.node) for o in graph.outputs if o.kind == "loss" and o.node is not None), None)
    while node is not None and node.target is torch.ops.aten._to_copy.default:
        (node,) = node.all_input_nodes
    dtype = torch.float32 if node is None else node.meta["val"].dtype
    return str(dtype).removeprefix("torch.") if dtype.itemsize < torch.float32.itemsize else ""


def sums(path: Sequence[Step]) -> bool:
    """Whether a conversion adds up what devices have."""
    return any(step.kind in ("all_reduce", "reduce_scatter") for step in path)


def reduces_early(graph: Graph, reader: fx.Node | str, path: Sequence[Step]) -> bool:
    """Whether a conversion in front of `reader` would sum in a dtype that is too low."""
    name = reader if isinstance(reader, str) else reader.name
    return name in graph.unreduced and sums(path)
