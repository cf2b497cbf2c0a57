"""Memory in which a gradient may lie: autograd adds to it in place, so nobody else may read it.

In: tensors that others hold; gradients, one by one.  Out: each gradient in memory of its own.  Next: `step.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

from torch import Tensor


class Owned:
    """Whole storages of others, and the parts of storages in which gradients lie already, in order.

    Gradients that were reduced as one bucket lie side by side in its storage.
    """

    def __init__(self, held: Iterable[Any] = ()) -> None:
        self.held = {storage(tensor) for tensor in held}
        self.parts: dict[int, list[tuple[int, int]]] = {}

    def hold(self, tensor: Tensor) -> None:
        """Others hold this one too."""
        self.held.add(storage(tensor))

    def own(self, gradient: Tensor) -> Tensor:
        """The gradient, contiguous as it came, or its copy where it shares memory."""
        if not gradient.numel():
            return gradient
        key, width = storage(gradient), gradient.element_size()
        start = int(gradient.storage_offset()) * width
        end = start + gradient.numel() * width
        taken = self.parts.setdefault(key, [])
        at = bisect_left(taken, (start, end))
        free = (at == 0 or taken[at - 1][1] <= start) and (at == len(taken) or end <= taken[at][0])
        if key in self.held or not free:
            return gradient.clone()
        taken.insert(at, (start, end))
        return gradient


def storage(tensor: Any) -> int:
    """What tells two storages apart."""
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, Tensor) else 0
