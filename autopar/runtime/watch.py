"""Optimizers are watched: their steps change parameters that nothing else would notice at once.

In: engines.  Out: their copies, marked stale after a step.  Next: `copies.py`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from autopar.runtime.engine import Engine

_HOOKS: list[Any] = []  # registry: the one hook that torch knows of, once there is a module
_WATCHED: weakref.WeakSet[Engine] = weakref.WeakSet()  # registry: who wants to know


def watch_optimizers(engine: Engine) -> None:
    """From now on every step of an optimizer that holds one of the engine's parameters makes its copies stale."""
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_post_hook(_stepped))
    _WATCHED.add(engine)


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for engine in list(_WATCHED):
        if engine.copies:
            ours = {id(slot.get()) for slot in engine.parameters}
            if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
                engine.parameters_changed()
