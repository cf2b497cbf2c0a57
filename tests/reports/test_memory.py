"""What a plan says stays on a rank, and what a rank holds: every byte of storage, by kind."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.cost.memory import memory
from autopar.cost.optimizer import STATE_COPIES, state_copies
from autopar.models import mlp
from autopar.verify.pool import Pool
from tests.reports.harness import cluster

# ---- estimates leave out parts, count others twice, assume half precision --------------------------------------------

SIZES = {"b": 6, "d": 10, "f": 34, "g": 22, "o": 7}  # cut in two, only the bias of 7 has a larger first piece
OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.01),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.01),
}
STRATEGIES = ("ddp()", "zero(1)", "zero(2)", "zero(3)")


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind tensors, each counted once."""
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def kinds(strategy: str, name: str, precision: str | None) -> tuple[dict[str, int], dict[str, int], int]:
    """Bytes that stay by kind, predicted and measured between backward and the optimizer; bytes of step counters."""
    torch.manual_seed(0)
    model, batch = mlp.build(**SIZES)
    options = {"strategy": strategy, "optimizer": OPTIMIZERS[name], "precision": precision}
    module: Any = autopar.parallelize(model, cluster(), example_inputs=batch, **options)
    optimizer = OPTIMIZERS[name](module.parameters())
    module(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    module(*batch).backward()
    (step,) = module._autopar.programs.values()
    held = memory(step.program, OPTIMIZERS[name])
    predicted = {k: held.persistent[k] for k in ("parameters", "copies", "optimizer", "buffers")}
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)]
    measured = {
        "parameters": storage_bytes(module.parameters()),
        "copies": storage_bytes(t for group in module._autopar.copies.values() for t in group.values),
        "optimizer": storage_bytes(t for t in state if t.dim()),
        "buffers": storage_bytes(module.buffers()),
        "gradients": storage_bytes(p.grad for p in module.parameters() if p.grad is not None),
    }
    return {**predicted, "gradients": held.gradients}, measured, storage_bytes(t for t in state if not t.dim())


@pytest.mark.parametrize("precision", (None, "bf16"))
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_stays_is_what_was_predicted(ranks: Pool, strategy: str, name: str, precision: str | None) -> None:
    """Within 1 % of all of it, beside the padding: AdamW's step counters, 4 bytes for each of 6 parameters."""
    found = ranks.run(kinds, strategy, name, precision, world=2)
    predicted, measured, counters = found[0]
    assert predicted == measured, "the first rank, which holds the larger piece of everything"
    assert counters == (4 * 6 if name == "AdamW" else 0)
    total = sum(predicted.values())
    for _, other, _ in found:
        assert sum(other.values()) <= total


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shards_are_half_of_everything_and_what_is_padded_is_told(ranks: Pool, strategy: str) -> None:
    predicted, _, _ = ranks.run(kinds, strategy, "AdamW", None, world=2)[0]
    whole = 4 * sum(p.numel() for p in mlp.build(**SIZES)[0].parameters())
    padding = 4 * (4 - 7 / 2)  # of the bias of 7; its weight [7, 22] is cut along 22
    part = (whole / 2 + padding) if strategy != "ddp()" else whole
    assert predicted["parameters"] == part
    assert predicted["optimizer"] == 2 * part
    assert predicted["copies"] == (0 if strategy in ("ddp()", "zero(3)") else whole + 2 * padding)
    assert predicted["gradients"] == part


# ---- an optimizer of unknown size ------------------------------------------------------------------------------------


class Shampoo(torch.optim.SGD):
    """Of a name that nobody knows."""


def test_an_unknown_optimizer_is_asked_for_its_size_and_nothing_is_assumed() -> None:
    model, batch = mlp.build(**SIZES)
    two = autopar.ClusterSpec.preset("cpu-gloo", devices=2)
    with pytest.raises(autopar.PlanError) as error:
        autopar.plan(model, two, example_inputs=batch, optimizer=Shampoo)
    assert str(error.value) == (
        "the state of the optimizer Shampoo is not known: nothing tells its optimizer_state_bytes_per_param\n"
        "  try: optimizer=N, the number of tensors of the parameter's size in its state, which is "
        "optimizer_state_bytes_per_param over the bytes of a stored parameter (AdamW in float32: 8 / 4 = 2)"
    )
    told = autopar.plan(model, two, example_inputs=batch, optimizer=1.5, strategy="ddp()")
    assert told.costs["optimizer_bytes"] == 1.5 * told.costs["parameters_bytes"]


@pytest.mark.parametrize("name", STATE_COPIES)
def test_the_state_of_every_known_optimizer_is_what_it_makes(name: str) -> None:
    weight = nn.Parameter(torch.randn(3, 5))
    optimizer = getattr(torch.optim, name)([weight], lr=0.1)
    weight.grad = torch.randn(3, 5)
    optimizer.step()
    made = sum(t.shape == weight.shape for t in optimizer.state[weight].values() if isinstance(t, Tensor))
    assert state_copies(optimizer) == state_copies(partial(type(optimizer), lr=0.1)) == made
