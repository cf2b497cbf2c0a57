"""Memory in which a gradient may lie: autograd adds to it in place, so nobody else may read it.

In: tensors that others hold; gradients, one by one.  Out: each gradient in memory of its own.  Next: `step.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class Owned:
    """Whole storages of others, and the parts of storages in which gradients lie already.

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
        start = int(gradient.storage_offset()) * gradient.element_size()
        part, key = (start, start + gradient.numel() * gradient.element_size()), storage(gradient)
        taken = self.parts.setdefault(key, [])
        if gradient.numel() and (key in self.held or any(part[0] < b and a < part[1] for a, b in taken)):
            return gradient.clone()
        taken.append(part)
        return gradient


def storage(tensor: Any) -> int:
    """What tells two storages apart."""
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, Tensor) else 0
