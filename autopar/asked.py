"""What a user asks of `parallelize` and `plan`, checked before anything else happens.

In: arguments of any type.  Out: those the compiler works with, or an `InputError` that tells what to write.
Next: `api.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from torch import nn

from autopar.cluster import ClusterSpec
from autopar.errors import InputError
from autopar.parsing import read_bytes, read_strategy
from autopar.pins import NONE, Pins
from autopar.pins import load as load_pins
from autopar.pins import parse as parse_pins
from autopar.plan import Plan
from autopar.precision import LOW, Precision, low
from autopar.presets import PRESETS


def kind(value: Any) -> str:
    """What was given: a, its type, and the value where that is short."""
    text, name = repr(value), type(value).__name__
    name = ("an " if name[0] in "aeiou" else "a ") + name
    return name + (f" {text}" if isinstance(value, (str, int, float)) and len(text) < 40 else "")


def model(value: Any) -> nn.Module:
    """A module, not its class."""
    if not isinstance(value, nn.Module):
        what = f"the class {value.__name__}" if isinstance(value, type) else kind(value)
        raise InputError(f"model is {what}; give an nn.Module")
    return value


def cluster(value: Any) -> ClusterSpec:
    """A cluster description."""
    if not isinstance(value, ClusterSpec):
        name = value if isinstance(value, str) and value in PRESETS else "cpu-gloo"
        raise InputError(
            f"cluster is {kind(value)}; give a ClusterSpec\n"
            f'  try: ClusterSpec.preset("{name}", devices=N), ClusterSpec.load("cluster.yaml") or ClusterSpec.detect()'
        )
    return value


def strategy(value: Any) -> Any:
    """None, or a strategy, also as it is written on the command line."""
    from autopar.strategies import Strategy

    if isinstance(value, str):
        return read_strategy(value)
    if value is not None and not isinstance(value, Strategy):
        raise InputError(
            f"strategy is {kind(value)}; write one like autopar.strategies.zero(3) or 'ddp(2) * tensor(2)'"
        )
    return value


def precision(value: Any) -> Precision | str | None:
    """None, dtypes, or a word."""
    if isinstance(value, str) and value in LOW:
        return low(value)
    if value is None or value == "float64" or isinstance(value, Precision):
        return value  # type: ignore[no-any-return]
    raise InputError(
        f"precision is {kind(value)}; give autopar.Precision(param=torch.bfloat16, reduce=torch.float32), "
        '"bf16" (or "bfloat16"), "fp16" (or "float16"), or "float64" for comparisons'
    )


def pins(value: Any) -> Pins:
    """None, pins, a mapping of the form that `autopar/pins.py` shows, or the YAML file it is in."""
    if isinstance(value, Pins):
        return value
    if isinstance(value, Mapping):
        return parse_pins(value)
    if isinstance(value, (str, os.PathLike)):
        return load_pins(value)
    if value is None:
        return NONE
    raise InputError(
        f"pins is {kind(value)}; give a mapping like {{'modules': {{'blocks.3': 'batch@data'}}}}, or a YAML file of it"
    )


def memory_bytes(value: Any) -> float | None:
    """None, a number of bytes, or one with a unit."""
    if isinstance(value, str):
        return read_bytes(value)
    if value is None or is_number(value):
        return value  # type: ignore[no-any-return]
    raise InputError(f"memory_bytes is {kind(value)}; give a number of bytes above 0, or one like '8GiB'")


def time_limit(value: Any) -> float:
    """Seconds above 0."""
    if not is_number(value):
        raise InputError(f"time_limit is {kind(value)}; give a number of seconds above 0")
    return value  # type: ignore[no-any-return]


def is_number(value: Any) -> bool:
    """A finite number above 0."""
    return counts(value, Real) and math.isfinite(value) and value > 0


def counts(value: Any, numbers: type) -> bool:
    """A number of some sort, numpy's too; True and False are none."""
    return isinstance(value, numbers) and not isinstance(value, bool)


def plan(value: Any) -> Plan | str | os.PathLike[str] | None:
    """None, a plan, or where it was saved."""
    if value is None or isinstance(value, (Plan, str, os.PathLike)):
        return value
    raise InputError(f"plan is {kind(value)}; give an autopar.Plan or the path of a file it was saved in")


def seed(value: Any) -> int:
    """A whole number of 64 bits."""
    if not counts(value, Integral) or not -(2**63) <= value < 2**63:
        raise InputError(f"seed is {kind(value)}; give a whole number of at most 64 bits")
    return int(value)


def loss_fn(value: Any) -> Callable[..., Any] | None:
    """None, a function or a module."""
    if value is None or (callable(value) and not (isinstance(value, type) and issubclass(value, nn.Module))):
        return value
    what = f"the class {value.__name__}" if isinstance(value, type) else kind(value)
    raise InputError(f"loss_fn is {what}; give a function or a module, like F.mse_loss or nn.MSELoss()")
