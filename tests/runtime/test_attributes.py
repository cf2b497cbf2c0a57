"""Python around the tensors: attributes that forward reads and writes, hooks, submodules, what stands before."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import strategies
from autopar.errors import AutoparError, CaptureError, InputError
from autopar.verify.pool import Pool


class Net(nn.Module):
    """Reads and writes its attributes as `case` says."""

    ema: Tensor
    table: Tensor | None

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.a, self.b, self.drop = nn.Linear(4, 6), nn.Linear(6, 3), nn.Dropout(0.0)
        self.temp, self.count, self.scales, self.mask = 1.0, 0, {"k": 1.0}, torch.ones(6, dtype=torch.float64)
        self.kept: Any = None
        self.config = SimpleNamespace(kind=None, steps=0)
        self.aux: list[Any] = []
        self.register_buffer("ema", torch.zeros(6))
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(F.gelu(self.a(x)))
        if self.case == "buffer bound anew":
            self.ema = 0.9 * self.ema + 0.1 * h.detach().mean(0)
            h = h - self.ema
        if self.case == "counter":
            self.count += 1
            h = h * self.count
        if self.case == "field of a configuration is filled" and self.config.kind is None:
            self.config.kind = "half"
        if self.case == "written before it is read":
            self.count = 2
            self.count *= 2
            h = h * self.count
        if self.case == "tensor moves on":
            self.mask = self.mask * 0.5
        h = h * getattr(self, "late", 1.0)
        if self.case == "counter in a configuration":
            self.config.steps += 1
            h = h * self.config.steps
        h = h / 2 if self.config.kind == "half" else h
        if self.case == "table in a buffer" and self.table is None:
            self.table = torch.arange(6.0).to(h.dtype).cos()
        if self.case == "table in an attribute" and (self.kept is None or len(self.kept) < 6):
            self.kept = torch.arange(6.0).to(h.dtype).sin()
        if self.case == "tensor kept":
            self.kept = h
        if self.case == "list grows":
            self.aux.append(h.mean())
        if self.case == "object changes":
            self.kept = object()
        for table in (self.table, self.kept):
            h = h if not isinstance(table, Tensor) else h * table
        return (self.b(h * self.mask) / self.temp * self.scales["k"]).square().mean()


def set_attribute(name: str, values: list[Any]) -> Callable[[Any, int], None]:
    return lambda m, i: setattr(m, name, values[i])


def rescale(m: Any, i: int) -> None:
    m.scales["k"] = 1.0 + i


def hook(m: Any, i: int) -> None:
    if i == 1:
        m.handle = m.a.register_forward_hook(lambda module, args, out: out * 2)
    if i == 2:
        m.handle.remove()


BETWEEN: dict[str, Callable[[Any, int], None]] = {
    "temperature": set_attribute("temp", [1.0, 2.0, 2.0]),
    "dropout": lambda m, i: setattr(m.drop, "p", 1.0 if i == 1 else 0.0),
    "entry of a dict": rescale,
    "tensor bound anew": lambda m, i: setattr(m, "mask", torch.full((6,), 1.0 + i, dtype=torch.float64)),
    "hooks of a submodule": hook,
    "attribute that was not there": lambda m, i: setattr(m, "late", 1.0 + i) if i else None,
    "attribute that nothing reads": set_attribute("global_step", [0, 1, 2]),
}
INSIDE = (
    "buffer bound anew",
    "counter",
    "counter in a configuration",
    "field of a configuration is filled",
    "table in a buffer",
    "table in an attribute",
    "written before it is read",
)
REFUSED = {
    "tensor kept": "keeps a tensor in its attribute kept",
    "tensor moves on": "attribute mask that follows from its own old value",
    "list grows": "keeps a tensor in its attribute aux",
    "object changes": "changes its attribute kept",
}


def made(case: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net(case).double(), torch.randn(6, 4).double()


def spread(model: nn.Module, x: Tensor) -> Any:
    cluster = autopar.ClusterSpec.preset("cpu-gloo", devices=dist.get_world_size())
    return autopar.parallelize(model, cluster, example_inputs=(x,), strategy=strategies.zero(3))


def losses(module: Any, x: Tensor, between: Callable[[Any, int], None] | None) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    out = []
    for i in range(3):
        if between:
            between(module, i)
        loss = module(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(float(loss.detach()))
    return out


def both(case: str) -> tuple[list[float], list[float], int]:
    """Losses of the plain module, those of the parallel one, and how many programs that took."""
    between = BETWEEN.get(case)
    model, x = made(case)
    plain = losses(model, x, between)
    module = spread(*made(case))
    ours = losses(module, x, between)
    return plain, ours, len(module._autopar.programs)


@pytest.mark.parametrize("case", [*BETWEEN, *INSIDE])
def test_what_forward_reads_and_writes_in_python_is_followed(case: str, ranks: Pool) -> None:
    for plain, ours, _ in ranks.run(both, case, world=2):
        assert ours == pytest.approx(plain, rel=1e-12)
        assert len(set(plain)) == 3


def test_only_what_forward_reads_asks_for_another_program(ranks: Pool) -> None:
    assert ranks.run(both, "attribute that nothing reads", world=2)[0][2] == 1
    assert ranks.run(both, "temperature", world=2)[0][2] == 2
    assert ranks.run(both, "table in an attribute", world=2)[0][2] == 1
    assert ranks.run(both, "written before it is read", world=2)[0][2] == 1


def fields(model: nn.Module) -> dict[str, set[str]]:
    """Names of all attributes, but for the one that makes a module parallel."""
    return {path: set(vars(module)) - {"_autopar"} for path, module in model.named_modules()}


def refusal(case: str) -> str:
    model, x = made(case)
    before = fields(model)
    try:
        spread(model, x)
    except CaptureError as error:
        assert fields(model) == before
        assert model.kept is None
        assert model.aux == []
        return str(error)
    return ""


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_program_can_leave_behind_is_refused_and_the_model_is_as_it_was(case: str, ranks: Pool) -> None:
    for message in ranks.run(refusal, case, world=2):
        assert REFUSED[case] in message
        assert "try: return" in message


# --- the model changed, or something stood before -----------------------------------------------------------------


def replace_module(m: Any) -> None:
    m.b = nn.Linear(6, 3).double()


def replace_parameter(m: Any) -> None:
    m.b.weight = nn.Parameter(torch.ones(3, 6).double())


def assign_data(m: Any) -> None:
    m.a.weight.data = m.a.weight.data * 2


def only_here(m: Any) -> None:
    if dist.get_rank() == 1:
        m.temp = 3.0


def buffer_here(m: Any) -> None:
    m.ema.add_(dist.get_rank())


def step_here(m: Any) -> None:
    m.rng_step = dist.get_rank()


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "submodule": (replace_module, "submodule b was added, replaced or removed"),
    "parameter": (replace_parameter, "parameter b.weight was added, replaced or removed"),
    "data": (assign_data, "parameter a.weight was assigned to through .data"),
    "attribute on one rank": (only_here, "attributes are those of programs is () on rank 1 but (0,) on rank 0"),
    "buffer on one rank": (buffer_here, "hash of the values of buffer ema"),
    "rng_step on one rank": (step_here, "rng_step is 1 on rank 1 but 0 on rank 0"),
}


def changed(name: str) -> str:
    model, x = made("")
    module = spread(model, x)
    CHANGES[name][0](module)
    try:
        module(x)
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_is_no_longer_the_one_that_was_spread_is_refused_on_all_ranks(name: str, ranks: Pool) -> None:
    for message in ranks.run(changed, name, world=2):
        assert CHANGES[name][1] in message
        assert "try:" in message


def gradient_before(model: nn.Module) -> None:
    model(torch.ones(2, 4).double()).backward()


def hook_before(model: Any) -> None:
    model.a.weight.register_hook(lambda g: g * 3)


@pytest.mark.parametrize(
    ("before", "message"), [(gradient_before, "has a gradient already"), (hook_before, "has hooks for its gradient")]
)
def test_gradients_and_hooks_from_before_are_refused(before: Callable[[Any], None], message: str) -> None:
    model, x = made("")
    before(model)
    with pytest.raises(InputError, match=message):
        autopar.parallelize(model, autopar.ClusterSpec.preset("cpu-gloo", devices=1), example_inputs=(x,))


def early_optimizer() -> str:
    model, x = made("")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    module = spread(model, x)
    module(x).backward()
    try:
        optimizer.step()
    except InputError as error:
        return str(error)
    return ""


def test_an_optimizer_from_before_is_told_of_at_its_first_step(ranks: Pool) -> None:
    for message in ranks.run(early_optimizer, world=2):
        assert re.search(r"holds a.weight from before .*\n  try: make the optimizer after parallelize", message)


def first_in_inference_mode() -> list[Any]:
    model, x = made("")
    module = spread(model, x)
    with torch.inference_mode():
        number = module(x)
    return [type(number).__name__, float(number), losses(module, x, None)]


def test_a_first_call_in_inference_mode_gives_a_plain_number_and_training_goes_on(ranks: Pool) -> None:
    model, x = made("")
    plain = losses(model, x, None)
    for kind, number, ours in ranks.run(first_in_inference_mode, world=2):
        assert kind == "Tensor"
        assert number == pytest.approx(plain[0], rel=1e-12)
        assert ours == pytest.approx(plain, rel=1e-12)
