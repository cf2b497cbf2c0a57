"""From a MODEL on the command line to a module and its example inputs.

In: `package.module:function` or `hf:ClassName`, and settings.  Out: `Target.build()`.  Next: `steps.py`.

Plain torch only: the reference process imports this file, and must not know the compiler.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError, UnsupportedError


@dataclass(frozen=True)
class Built:
    """A model with one batch for it."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """What to build, as text; equal targets build equal models, in any process."""

    spec: str
    settings: tuple[tuple[str, Any], ...] = ()
    seed: int = 0
    path: tuple[str, ...] = field(default=(), compare=False)

    @staticmethod
    def parse(spec: str, settings: Mapping[str, Any] | None = None, seed: int = 0) -> Target:
        if ":" not in spec:
            raise InputError(f"{spec!r} is no model; write package.module:function or hf:ClassName")
        return Target(spec, tuple(sorted((settings or {}).items())), seed, tuple(sys.path))

    def check(self) -> None:
        """Refuse a function that is not there, or a class that cannot be given inputs, before anything is built."""
        kind, _, name = self.spec.partition(":")
        if kind == "hf":
            transformers_models().prepared(name, dict(self.settings))
        else:
            found(kind, name, dict(self.settings))

    def build(self, double: bool = False) -> Built:
        """The model and one batch, drawn from the seed; under a fake mode nothing is allocated."""
        kind, _, name = self.spec.partition(":")
        torch.manual_seed(self.seed)
        settings = dict(self.settings)
        built = hugging_face(name, settings, self.seed) if kind == "hf" else function(kind, name, settings)
        built.model.train()
        if not double:
            return built
        args, kwargs = as_double((built.args, dict(built.kwargs)))
        return Built(built.model.double(), args, kwargs)

    def __str__(self) -> str:
        return self.spec + "".join(f" {k}={v}" for k, v in self.settings)


def found(module: str, name: str, settings: dict[str, Any]) -> Callable[..., Any]:
    """The function `module:name`, which takes these settings."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        make: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"cannot find {module}:{name}: {error}") from error
    try:
        inspect.signature(make).bind(**settings)
    except TypeError as error:
        raise InputError(f"{module}:{name}: {error}\n  try: --set with one of its own arguments") from error
    return make


def function(module: str, name: str, settings: dict[str, Any]) -> Built:
    """What `module:name(**settings)` returns: (model, example inputs)."""
    make = found(module, name, settings)
    made = make(**settings)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise InputError(f"{module}:{name} must return (model, example inputs), not {type(made).__name__}")
    model, inputs = made
    args, kwargs = split_inputs(inputs)
    return Built(model, args, kwargs)


def split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as (args, kwargs): a dict is keywords, a (tuple, dict) pair is both, a tuple is positions."""
    if isinstance(inputs, dict):
        return (), inputs
    if not isinstance(inputs, (tuple, list)):
        return (inputs,), {}
    if len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
        return inputs[0], inputs[1]
    return tuple(inputs), {}


def transformers_models() -> Any:
    """The module `autopar.hf`, where there is transformers."""
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError("hf: models need transformers: pip install 'autopar[hf]'") from error
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return importlib.import_module("autopar.hf")


def hugging_face(name: str, settings: dict[str, Any], seed: int) -> Built:
    """A `transformers` class with a fresh config and random inputs."""
    model, kwargs = transformers_models().build(name, {"seed": seed, **settings})
    return Built(model, (), kwargs)


def as_double(value: Any) -> Any:
    """Every floating tensor in nested tuples, lists and dicts as float64."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: as_double(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(as_double(v) for v in value)
    return value
