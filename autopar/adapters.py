"""What capture knows about other libraries: torch's own decompositions that are used, and one switch of transformers.

In: the call that is traced.  Out: a decomposition table; a context.  Next: `normalise.py`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from autopar import _torch

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
