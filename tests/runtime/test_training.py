"""The delivered module does what the single device's module does, however backward is called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autopar.errors import UnsupportedError
from autopar.verify.pool import Pool
from tests.runtime.nets import Net, Out, deliver, gap, gradients_gap, net, parameters_gap

HOW = ("zero0", "zero1", "zero2", "zero3", "random1", "random2", "random3", "pipeline")
TINY = 1e-12


def plain_backward(module: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> None:
    module(ids, labels=labels).loss.backward()


def scaled(module: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> None:
    (module(ids, labels=labels).loss * 0.5).backward()


def accumulated(module: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> None:
    for shift in range(3):
        module(ids.roll(shift), labels=labels).loss.backward()


def two_then_two(module: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> None:
    first = module(ids, labels=labels).loss
    with torch.no_grad():
        module(ids.roll(2), labels=labels)
    second = module(ids.roll(1), labels=labels).loss
    first.backward()
    second.backward()


def summed(module: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> None:
    (module(ids, labels=labels).loss + 3 * module(ids.roll(1), labels=labels).loss).backward()


def twice(module: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> None:
    loss = module(ids, labels=labels).loss
    loss.backward(retain_graph=True)
    loss.backward()


BACKWARDS: dict[str, Callable[..., None]] = {
    f.__name__: f for f in (plain_backward, scaled, accumulated, two_then_two, summed, twice)
}


def train(how: str, backward: str) -> list[float]:
    model, ids, labels = net()
    ours, single = deliver(model, (ids,), {"labels": labels}, how)
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=0.01)) for m in (ours, single)]
    gaps = []
    for _ in range(2):
        for module, _ in pairs:
            BACKWARDS[backward](module, ids, labels)
        gaps.append(gradients_gap(ours, single))
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
        gaps.append(parameters_gap(ours, single))
    assert ours.frozen.weight.grad is None and ours.unused.weight.grad is None
    assert ours.emb.weight is ours.head.weight
    return gaps


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("backward", BACKWARDS)
def test_gradients_and_parameters_are_the_single_devices(ranks: Pool, how: str, backward: str) -> None:
    for gaps in ranks.run(train, how, backward, world=2):
        assert max(gaps) < TINY


def structure(how: str) -> None:
    model, ids, labels = net()
    names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    buffers = [n for n, _ in model.named_buffers(remove_duplicate=False)]
    keys = list(model.state_dict())
    ours, single = deliver(model, (ids,), {"labels": labels}, how)
    assert isinstance(ours, Net) and ours.config is model.config and ours.greet() == "hello"
    assert [n for n, _ in ours.named_parameters(remove_duplicate=False)] == names
    assert [n for n, _ in ours.named_buffers(remove_duplicate=False)] == buffers
    assert list(ours.state_dict()) == keys
    got, wanted = ours(ids, labels=labels), single(ids, labels=labels)
    assert type(got) is Out and list(got.extra) == ["none", "ids", "three"]
    assert got.extra["none"] is None and got.extra["three"] == 3 and torch.equal(got.extra["ids"].full_tensor(), ids)
    assert type(got.loss) is torch.Tensor and got.loss.grad_fn is not None
    assert gap(got.logits, wanted.logits) < TINY and gap(got.loss, wanted.loss) < TINY
    assert int(ours.calls) == int(single.calls) == 1 and ours.cache is ours.cache2


@pytest.mark.parametrize("how", ("zero2", "random1", "pipeline"))
def test_types_names_and_attributes_are_the_models_own(ranks: Pool, how: str) -> None:
    ranks.run(structure, how, world=2)


def refused(what: str) -> None:
    model, ids, labels = net()
    ours, _ = deliver(model, (ids,), {"labels": labels}, "random1")
    out = ours(ids, labels=labels)
    if what == "output":
        (out.loss + out.logits.sum().full_tensor()).backward()
    elif what == "create_graph":
        out.loss.backward(create_graph=True)
    elif what == "again":
        out.loss.backward()
        out.loss.backward()
    elif what == "changed":
        step = next(iter(ours._autopar.programs.values()))
        out.loss.grad_fn.saved[0].add_(1)
        assert step.program.saved
        out.loss.backward()


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("output", "UnsupportedError", "a gradient reached output.logits"),
        ("create_graph", "UnsupportedError", "create_graph=True"),
        ("again", "RuntimeError", "backward through the graph a second time"),
        ("changed", "RuntimeError", "changed by an in-place operation"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(ranks: Pool, what: str, error: str, words: str) -> None:
    for outcome in ranks.outcomes(refused, what, world=2):
        assert outcome.error == error and words in outcome.message
    assert issubclass(UnsupportedError, ValueError)


class Plain(torch.nn.Module):
    """No loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 6), torch.nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.a(x)
        return self.b(h.relu()), h


def without_loss(how: str) -> float:
    torch.manual_seed(0)
    x = torch.randn(6, 4).double().requires_grad_()
    model = Plain().double()
    ours, single = deliver(model, (x,), {}, how)
    for module in (ours, single):
        y, h = module(x)
        (y.square().mean() + (h * 2).sum()).backward()
        (module(x)[0].sum() * 3).backward()
        module.seen, x.grad = x.grad, None
    return max(gradients_gap(ours, single), gap(ours.seen, single.seen))


@pytest.mark.parametrize("how", ("zero3", "random1", "random2"))
def test_a_model_without_a_loss_takes_gradients_at_all_its_outputs(ranks: Pool, how: str) -> None:
    assert max(ranks.run(without_loss, how, world=2)) < TINY
