"""The training loop that the reference and the ranks both run, and what it writes down.

In: a module, its inputs, an optimizer.  Out: every loss, output, gradient, parameter and buffer of every step, by name,
handed to whoever keeps or compares them.  Next: `reference.py`, `rank.py`.

Plain torch only: the reference process imports this file, and must not know the compiler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

Record = dict[str, torch.Tensor]  # "optimizer/step/kind/name" -> whole tensor
See = Callable[[str, torch.Tensor], None]  # the same key, the tensor as it is now

RATES = {"sgd": 0.05, "adamw": 1e-3}


def make_optimizer(name: str, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """The two optimizers of the harness; eps is large because of gradients that are mathematically zero."""
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=RATES[name], momentum=0.9)
    return torch.optim.AdamW(parameters, lr=RATES[name], eps=1e-6)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested tuples, lists, dicts and dataclasses, with a path."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from leaves(entry, f"{name}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for index, entry in enumerate(value):
            yield from leaves(entry, f"{name}[{index}]")
    elif dataclasses.is_dataclass(value):
        for entry in dataclasses.fields(value):
            yield from leaves(getattr(value, entry.name), f"{name}.{entry.name}")


def loss_of(outputs: list[tuple[str, torch.Tensor]]) -> tuple[str, torch.Tensor]:
    """The scalar that backward starts from: the first one that needs a gradient, or the mean square of all outputs."""
    for name, leaf in outputs:
        if leaf.dim() == 0 and leaf.requires_grad:
            return name, leaf
    squares = [leaf.square().mean() for _, leaf in outputs if leaf.requires_grad]
    return "", torch.stack(squares).sum()


def batch_of(step: int, value: Any, size: int) -> Any:
    """The example inputs with their first dim rolled by `step`, so that no two steps get the same ones."""
    if isinstance(value, torch.Tensor):
        return value.roll(step, 0) if value.dim() and value.shape[0] == size else value
    if isinstance(value, Mapping):
        return {key: batch_of(step, entry, size) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(batch_of(step, entry, size) for entry in value)
    return value


def train(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    optimizer: str,
    *,
    steps: int,
    see: See,
    during: Callable[[str], AbstractContextManager[Any]] = lambda phase: nullcontext(),
    after: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
) -> None:
    """Train `module` and show everything that happens.

    see      called with every tensor that the module hands out, in the same order on all ranks
    during   context for each "forward" and "backward", for whoever counts
    after    called with the optimizer after each of its steps, while gradients are still there
    """
    torch_optimizer = make_optimizer(optimizer, module.parameters())
    first = next((leaf for _, leaf in leaves((args, kwargs)) if leaf.dim()), torch.zeros(1))

    for step in range(steps):

        def show(kind: str, name: str, tensor: torch.Tensor, step: int = step) -> None:
            see(f"{optimizer}/{step}/{kind}/{name}", tensor)

        now_args, now_kwargs = batch_of(step, (tuple(args), dict(kwargs)), first.shape[0])
        with during("forward"):
            outputs = list(leaves(module(*now_args, **now_kwargs)))
        loss_name, loss = loss_of(outputs)
        show("loss", loss_name, loss)
        for name, leaf in outputs:
            if name != loss_name:
                show("outputs", name, leaf)
        with during("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                show("gradients", name, parameter.grad)
        torch_optimizer.step()
        after(torch_optimizer)
        torch_optimizer.zero_grad()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            show("parameters", name, parameter)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            show("buffers", name, buffer)
