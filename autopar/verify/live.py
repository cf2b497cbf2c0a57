"""How many bytes of tensors are alive while something runs.

In: tensors that are there before.  Out: `LiveBytes`, a mode that keeps the peak.  Next: `rank.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from autopar._torch import DispatchMode, tensors_in


class LiveBytes(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts every storage once, from the op that makes it until it is freed; `peak` is the largest sum.

    Storages of `held` tensors count from the start.
    """

    def __init__(self, held: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.seen: set[int] = set()
        self.held = list(held)
        for tensor in self.held:
            self.count(tensor)

    def count(self, tensor: Tensor) -> None:
        if hasattr(tensor, "__tensor_flatten__"):  # around others: a DTensor, a collective that goes on
            inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            for part in inner:
                if isinstance(part, Tensor):
                    self.count(part)
            return
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # of a fake tensor, with which DTensor asks what an op would give
            return
        key, size = storage.data_ptr(), storage.nbytes()
        if key and key not in self.seen:
            self.seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.free, key, size)

    def free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self.count(tensor)
        return out
