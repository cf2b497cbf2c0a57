"""What really runs on a device: collectives in tensors and bytes, and floating-point operations.

In: a region of code.  Out: `Counts`.  Next: `rank.py`.

Counted where torch dispatches, so nothing here trusts a graph or a plan. Plain torch: the reference uses it too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from autopar._torch import DispatchMode

# functional and plain collectives by name, without trailing underscores: kind, and which side has the larger tensor
COLLECTIVES = {
    "all_reduce": ("all_reduce", "input"),
    "allreduce": ("all_reduce", "input"),
    "all_gather_into_tensor": ("all_gather", "output"),
    "all_gather_into_tensor_out": ("all_gather", "output"),
    "allgather": ("all_gather", "output"),
    "allgather_base": ("all_gather", "output"),
    "reduce_scatter_tensor": ("reduce_scatter", "input"),
    "reduce_scatter": ("reduce_scatter", "input"),
    "reduce_scatter_base": ("reduce_scatter", "input"),
    "all_to_all_single": ("all_to_all", "input"),
    "alltoall_base": ("all_to_all", "input"),
    "broadcast": ("broadcast", "input"),
}
NAMESPACES = ("_c10d_functional", "c10d", "c10d_functional", "autopar")


@dataclass
class Counts:
    """Collectives and bytes by (kind, mesh axis, phase), and flops by phase."""

    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def during(self, phase: str, axes: Mapping[str, str] | None = None) -> Iterator[None]:
        """Count what runs inside; `axes` maps the name of a process group to a mesh axis."""
        with _Watch(self, phase, axes or {}):
            yield


class _Watch(DispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counts: Counts, phase: str, axes: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts, self.phase, self.axes = counts, phase, axes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        formula = FORMULAS.get(str(packet)) or flop_registry.get(packet)
        if formula is not None:
            self.counts.flops[self.phase] += int(formula(*args, **(kwargs or {}), out_val=out))
        elif func.namespace in NAMESPACES:
            self._collective(packet.__name__, args, kwargs or {}, out)
        return out

    def _collective(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        name = name.strip("_").removesuffix("_coalesced")
        if name not in COLLECTIVES:
            return
        kind, side = COLLECTIVES[name]
        groups = [str(a) for a in (*args, *kwargs.values()) if isinstance(a, str)]
        axis = next((self.axes[g] for g in groups if g in self.axes), "other")
        tensors = [t for t in flat(args[0] if side == "input" else out) if isinstance(t, torch.Tensor)]
        key = kind, axis, self.phase
        self.counts.calls[key] += 1
        self.counts.bytes[key] += sum(t.numel() * t.element_size() for t in tensors)


def flat(value: Any) -> Iterator[Any]:
    """Leaves of nested tuples and lists."""
    if isinstance(value, (tuple, list)):
        for entry in value:
            yield from flat(entry)
    else:
        yield value


# --- formulas that torch's own counter does not have ------------------------------------------------------------------


def attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Two products, scores and values; a causal mask is not taken off, as in torch's own formulas."""
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def attention_backward_flops(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """Five products: the scores again, and the gradients of all four operands."""
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return 2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1])


def grouped_flops(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    """Every row [.., i] times its expert's matrix [e, i, o]; a gradient's [i, ..] by [.., o] counts alike."""
    return 2 * left.numel() * right.shape[-1]


def transposed_flops(left: torch.Tensor, right: torch.Tensor, *_: Any, **__: Any) -> int:
    """As `grouped_flops`, with matrices [e, o, i]."""
    return 2 * left.numel() * right.shape[-2]


FORMULAS: Mapping[str, Callable[..., int]] = {
    "aten._grouped_mm": grouped_flops,
    "autopar.grouped_mm": transposed_flops,
    "autopar.grouped_outer": grouped_flops,
    "aten._scaled_dot_product_flash_attention_for_cpu": attention_flops,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": attention_backward_flops,
    "autopar.attention": attention_flops,
    "autopar.attention_backward": attention_backward_flops,
}
