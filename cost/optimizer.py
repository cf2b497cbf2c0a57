"""What an optimizer keeps for every parameter.

In: an optimizer's class or name, a `functools.partial` of the class with its options, an optimizer that is built, or
the number itself.  Out: tensors of the parameter's size and dtype in its state.  Next: `memory.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer

from autopar.errors import PlanError

STATE_COPIES: Mapping[str, float] = {
    "AdamW": 2, "Adam": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "SGD": 0, "Adagrad": 1, "RMSprop": 1, "ASGD": 1,
    "Adadelta": 2, "Rprop": 2,
}  # fmt: skip
"""Parameter-sized tensors in the state, with no option on."""

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "SGD": ("momentum",), "Adam": ("amsgrad",), "AdamW": ("amsgrad",), "RMSprop": ("momentum", "centered"),
}  # fmt: skip
"""Options each of which adds one more."""

ASSUMED: Mapping[str, Mapping[str, Any]] = {"SGD": {"momentum": True}}
"""Options of an optimizer of which only the class is known: what takes more."""


def state_copies(optimizer: Any) -> float:
    """Parameter-sized tensors in the state of an optimizer. Raises PlanError for one that is not known."""
    if isinstance(optimizer, (int, float)):
        return float(optimizer)
    name, options = told(optimizer)
    if name not in STATE_COPIES:
        raise PlanError(
            f"the state of the optimizer {name} is not known: nothing tells its optimizer_state_bytes_per_param\n"
            "  try: optimizer=N, the number of tensors of the parameter's size in its state, which is "
            "optimizer_state_bytes_per_param over the bytes of a stored parameter (AdamW in float32: 8 / 4 = 2)"
        )
    return STATE_COPIES[name] + sum(bool(options.get(option)) for option in OPTIONS.get(name, ()))


def told(optimizer: Any) -> tuple[str, dict[str, Any]]:
    """(name, options that matter) of an optimizer."""
    if isinstance(optimizer, Optimizer):
        name = type(optimizer).__name__
        groups = [optimizer.defaults, *optimizer.param_groups]
        return name, {o: any(group.get(o) for group in groups) for o in OPTIONS.get(name, ())}
    if isinstance(optimizer, partial):
        name = told(optimizer.func)[0]
        return name, {o: bool(optimizer.keywords.get(o)) for o in OPTIONS.get(name, ())}
    name = getattr(optimizer, "__name__", str(optimizer))
    return name, dict(ASSUMED.get(name, {}))


def optimizer_text(optimizer: Any) -> str:
    """An optimizer with the options that matter, "SGD(momentum)"."""
    if isinstance(optimizer, (int, float)):
        return str(optimizer)
    name, options = told(optimizer)
    chosen = ", ".join(option for option, on in options.items() if on)
    return name if isinstance(optimizer, (str, type)) else f"{name}({chosen})"
