"""Optimizers are watched: their steps change parameters that nothing else would notice at once.

In: engines.  Out: their copies, marked stale after a step; an error where an optimizer holds parameters from before the
model was made parallel.  Next: `copies.py`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.errors import InputError
from autopar.runtime.engine import Engine
from autopar.runtime.parameters import LEFT

_HOOKS: list[Any] = []  # registry: the hooks that torch knows of, once there is a module
_WATCHED: weakref.WeakSet[Engine] = weakref.WeakSet()  # registry: who wants to know


def watch_optimizers(engine: Engine) -> None:
    """From now on every step of an optimizer that holds one of the engine's parameters makes its copies stale."""
    if not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_steps))
        _HOOKS.append(register_optimizer_step_post_hook(_stepped))
    _WATCHED.add(engine)


def _steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if name := vars(parameter).get(LEFT):
            raise InputError(
                f"the optimizer holds {name} from before the model was made parallel; a step would change nothing\n"
                "  try: make the optimizer after parallelize, from the parameters of the module that it returns"
            )


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for engine in list(_WATCHED):
        if engine.copies:
            ours = {id(slot.get()) for slot in engine.parameters}
            if any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
                engine.parameters_changed()
