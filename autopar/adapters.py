"""What capture knows about other libraries: torch's own decompositions that are used, and how transformers branches.

In: the call that is traced.  Out: a decomposition table; contexts.  Next: `normalise.py`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from autopar import _torch, experts

DECOMPOSED = """
mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward l1_loss
binary_cross_entropy binary_cross_entropy_backward soft_margin_loss log_sigmoid_forward log_sigmoid_backward
_fused_rms_norm _fused_rms_norm_backward native_group_norm native_group_norm_backward glu glu_backward
_native_batch_norm_legit_functional _native_batch_norm_legit _native_batch_norm_legit_no_training native_batch_norm
native_batch_norm_backward
addcmul addcdiv addmv addr addbmm baddbmm lerp logit logit_backward unbind stack roll trace rsub norm
linalg_vector_norm linspace eye dot vdot mv
"""


def decompositions() -> dict[Any, Any]:
    """Rare ops that are taken apart while tracing; the common ones are handled by `normalise.py`."""
    return _torch.decompositions(DECOMPOSED.split())


@contextmanager
def packed_sequences(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """transformers looks at the values of position ids for packed sequences; not where it made them itself."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None or passes_position_ids(model, args, kwargs):
        yield
        return
    original = masking.find_packed_sequence_indices
    masking.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = original


def passes_position_ids(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The call itself gives `position_ids`."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = dict(kwargs)
    return bound.get("position_ids") is not None or dict(bound.get("kwargs", {})).get("position_ids") is not None


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What an expert layer of transformers computes, in ops that can be cut over experts; for its registry."""
    first, last = ("gate_up_proj" if self.has_gate else "up_proj"), "down_proj"

    def linear(rows: Tensor, name: str) -> Tensor:
        weight = getattr(self, name)
        rows = experts.grouped_mm(rows, weight.transpose(1, 2) if self.is_transposed else weight, top_k_index)
        return rows + experts.expert_rows(getattr(self, f"{name}_bias"), top_k_index) if self.has_bias else rows

    rows = linear(experts.to_experts(hidden_states, top_k_index, self.num_experts), first)
    rows = linear(self._apply_gate(rows) if self.has_gate else self.act_fn(rows), last)
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    rows = rows * experts.slots_to_experts(top_k_weights, top_k_index, self.num_experts)
    return experts.to_tokens(rows, top_k_index).to(hidden_states.dtype)


@contextmanager
def expert_layers() -> Iterator[None]:
    """Expert layers of transformers run as `experts_forward`, whichever implementation their config names."""
    registry: Any = sys.modules.get("transformers.integrations.moe")
    if registry is None:
        yield
        return
    kind = registry.ExpertsInterface
    original = kind.get_interface
    kind.get_interface = lambda self, implementation, default: experts_forward
    try:
        yield
    finally:
        kind.get_interface = original
