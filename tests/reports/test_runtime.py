"""Forwards and backwards in any order, and ranks that are given different batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.random import replay
from autopar.verify.families import strategy
from autopar.verify.pool import Pool
from tests.reports.harness import TINY, Made, apart, cluster, deliver, gradients_gap, loss_of, state_gap

# ---- forwards and backwards in any order -----------------------------------------------------------------------------


class Net(nn.Module):
    """Dropout, a tie, a buffer that counts."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.emb, self.up, self.down = nn.Embedding(11, 6), nn.Linear(6, 10), nn.Linear(10, 6)
        self.drop, self.norm = nn.Dropout(dropout), nn.LayerNorm(6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        x = self.emb(ids)
        x = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return F.cross_entropy((x @ self.emb.weight.T).flatten(0, 1), ids.roll(1, 0).flatten())


def plain() -> Made:
    return Net().double(), (torch.randint(0, 11, (7, 5)),), {}


def dropping() -> Made:
    return Net(0.4).double(), (torch.randint(0, 11, (7, 5)),), {}


Call = Callable[[Tensor], Tensor]


def two_then_two(call: Call, module: nn.Module, x: Tensor, y: Tensor) -> None:
    first, second = call(x), call(y)
    first.backward()
    second.backward()


def crossed(call: Call, module: nn.Module, x: Tensor, y: Tensor) -> None:
    first, second = call(x), call(y)
    second.backward()
    first.backward()


def no_grad_between(call: Call, module: nn.Module, x: Tensor, y: Tensor) -> None:
    first = call(x)
    with torch.no_grad():
        call(y)
    with torch.inference_mode():
        call(y)
    second = call(y)
    first.backward()
    with torch.no_grad():
        call(x)
    second.backward()


def eval_then_train(call: Call, module: nn.Module, x: Tensor, y: Tensor) -> None:
    first = call(x)
    module.eval()
    with torch.no_grad():
        call(y)
    call(y).backward()
    module.train()
    call(y)
    first.backward()


def summed(call: Call, module: nn.Module, x: Tensor, y: Tensor) -> None:
    (call(x) + 3 * call(y)).backward()


def accumulated(call: Call, module: nn.Module, x: Tensor, y: Tensor) -> None:
    for batch in (x, y, x):
        (call(batch) / 3).backward()


def never(call: Call, module: nn.Module, x: Tensor, y: Tensor) -> None:
    call(x)
    call(y).backward()


ORDERS: dict[str, Callable[..., None]] = {
    f.__name__: f for f in (two_then_two, crossed, no_grad_between, eval_then_train, summed, accumulated, never)
}


def ordered(make: Any, family: str) -> dict[str, float]:
    """The largest gap of every order, with a step of the optimizer after each; modules live on from one to the next."""
    ours, single, (x,), _ = deliver(make, family)
    y = x.roll(2, 0).flip(1)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-6) for m in (ours, single)]
    drawn = 0

    def theirs(batch: Tensor) -> Tensor:
        nonlocal drawn
        with replay(0, drawn):
            drawn += single.training
            return single(batch)

    found = {}
    for name, order in ORDERS.items():
        order(ours, ours, x, y)
        order(theirs, single, x, y)
        found[name] = max(gradients_gap(ours, single), *(apart(p.grad) for p in ours.parameters()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found[name] = max(found[name], state_gap(ours, single))
    return found


@pytest.mark.parametrize(
    ("make", "family", "world"),
    [
        (dropping, "ddp", 2), (plain, "zero2", 2), (dropping, "zero3", 2), (plain, "megatron-sp", 2),
        (plain, "auto", 3), (dropping, "zero3 x megatron", 4),
    ],
)  # fmt: skip
def test_gradients_add_up_in_any_order_of_calls(ranks: Pool, make: Any, family: str, world: int) -> None:
    for gaps in ranks.run(ordered, make, family, world=world):
        assert max(gaps.values()) < 1e-10, gaps


# ---- ranks that are given different batches --------------------------------------------------------------------------


class Fed(nn.Module):
    """Takes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor, extra: Any = None, scale: float = 1.0) -> Tensor:
        h = self.b(self.a(x).relu()) * scale
        for t in extra or ():
            h = h + t
        return h.square().mean()


def fed() -> Made:
    x = torch.randn(7, 6).double()
    return Fed().double(), (x,), {"extra": [torch.randn(4).double(), torch.randn(7, 4).double()]}


def other(what: str, x: Tensor, extra: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What one rank is given instead."""
    wrong: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "shape": ((x[:5],), {"extra": [extra[0], extra[1][:5]]}),
        "rank of shape": ((x[None],), {"extra": extra}),
        "dtype": ((x.float(),), {"extra": extra}),
        "fewer leaves": ((x,), {"extra": extra[:1]}),
        "more leaves": ((x,), {"extra": [*extra, extra[0]]}),
        "none": ((x,), {"extra": None}),
        "keyword": ((), {"x": x, "extra": extra}),
        "values": ((x + 1e-9,), {"extra": extra}),
        "values deep": ((x,), {"extra": [extra[0], extra[1].flip(0)]}),
        "one bit": ((nudged(x),), {"extra": extra}),
        "constant": ((x,), {"extra": extra, "scale": 2.0}),
        "number for tensor": ((x,), {"extra": [1.5, extra[1]]}),
        "container": ((x,), {"extra": tuple(extra)}),
        "requires grad": ((x.clone().requires_grad_(),), {"extra": extra}),
        "local": ((autopar.Local(x),), {"extra": extra}),
        "dtensor": ((distributed(x),), {"extra": extra}),
        "foreign": ((x,), {"extra": [object(), extra[1]]}),
        "nan": ((torch.full_like(x, float("nan")),), {"extra": extra}),
    }
    return wrong[what]


def nudged(x: Tensor) -> Tensor:
    x = x.clone()
    x[3, 2] = torch.nextafter(x[3, 2], torch.tensor(1e9, dtype=x.dtype))
    return x


def distributed(x: Tensor) -> Tensor:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()), _init_backend=False, _rank=dist.get_rank())
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def differing(what: str, family: str, odd: int, before: int) -> str:
    """The error of this rank when another is given something else in call number `before`."""
    ours, _, args, kwargs = deliver(fed, family)
    for _ in range(before):
        loss_of(ours(*args, **kwargs)).backward()
    if dist.get_rank() == odd:
        args, kwargs = other(what, args[0], kwargs["extra"])
    started = time.monotonic()
    try:
        ours(*args, **kwargs)
    except autopar.InputError as error:
        assert time.monotonic() - started < 5
        return str(error)
    return ""


LEAF = {
    "shape": "args[0] is float64[5, 6] on rank 1 but float64[7, 6] on rank 0",
    "rank of shape": "args[0] is float64[1, 7, 6] on rank 1",
    "dtype": "args[0] is float32[7, 6] on rank 1",
    "fewer leaves": "kwargs['extra'][1] only on rank 0",
    "more leaves": "kwargs['extra'][2] only on rank 1",
    "none": "rank 1 passes 2 leaves, rank 0 passes 3",
    "keyword": "kwargs['x'] only on rank 1",
    "values": "hash of the values of args[0] is",
    "values deep": "hash of the values of kwargs['extra'][1] is",
    "one bit": "hash of the values of args[0] is",
    "constant": "kwargs['scale'] only on rank 1",
    "number for tensor": "kwargs['extra'][0] is 1.5 on rank 1 but float64[4] on rank 0",
    "container": "structure of the arguments is tuple(tuple(.), dict(tuple(., .))) on rank 1",
    "requires grad": "args[0] is float64[7, 6] requires_grad on rank 1 but float64[7, 6] on rank 0",
    "local": "args[0] is Local(float64[6]) on rank 1",
    "dtensor": "args[0] is 'DTensor(7, 6)' on rank 1",
    "foreign": "kwargs['extra'][0] is",
    "nan": "hash of the values of args[0] is",
}


@pytest.mark.parametrize("what", LEAF)
def test_another_batch_on_one_rank_is_one_error_on_all(ranks: Pool, what: str) -> None:
    found = ranks.run(differing, what, "tensor", 1, 0, world=3, timeout=60)
    assert len(set(found)) == 1 and LEAF[what] in found[0], found[0]


@pytest.mark.parametrize(("family", "world", "odd", "before"), [("zero3 x megatron", 4, 3, 2), ("auto", 2, 0, 1)])
@pytest.mark.parametrize("what", ("shape", "dtype", "fewer leaves", "values"))
def test_another_batch_is_found_in_later_calls_and_on_any_rank(
    ranks: Pool, what: str, family: str, world: int, odd: int, before: int
) -> None:
    found = ranks.run(differing, what, family, odd, before, world=world, timeout=60)
    assert len(set(found)) == 1 and "on rank" in found[0]
    if world == 4:
        assert f"rank {odd}" in found[0]


def after_an_error(family: str) -> list[float]:
    """A module whose call was refused trains on as if it had not been made."""
    ours, single, args, kwargs = deliver(fed, family)
    gaps = []
    for _ in range(2):
        try:
            wrong = other("shape", args[0], kwargs["extra"]) if dist.get_rank() else (args, kwargs)
            ours(*wrong[0], **wrong[1])
        except autopar.InputError:
            gaps.append(0.0)
        for module in (ours, single):
            loss_of(module(*args, **kwargs)).backward()
        gaps.append(gradients_gap(ours, single))
    assert len(gaps) == 4
    return gaps


@pytest.mark.parametrize("family", ("zero2", "auto"))
def test_a_refused_call_leaves_no_trace(ranks: Pool, family: str) -> None:
    assert max(map(max, ranks.run(after_an_error, family, world=2))) < TINY


def values_late() -> list[bool]:
    """Whether another batch is refused in the fourth call, by default and on request."""
    found = []
    for check in (None, True):
        ours, _, (x,), kwargs = deliver(fed, "tensor")
        ours.check_inputs = check
        for _ in range(3):
            ours(x, **kwargs)
        try:
            ours(x + dist.get_rank(), **kwargs)
            found.append(False)
        except autopar.InputError:
            found.append(True)
    return found


def test_values_are_compared_in_three_calls_by_default_and_always_on_request(ranks: Pool) -> None:
    assert all(found == [False, True] for found in ranks.run(values_late, world=2))


def lazily(what: str) -> str:
    """The very first call of a module that is not planned yet."""
    torch.manual_seed(0)
    model, args, kwargs = fed()
    ours = autopar.parallelize(model, cluster(), strategy=strategy("ddp", dist.get_world_size()))
    if dist.get_rank() == 1:
        args, kwargs = other(what, args[0], kwargs["extra"])
    try:
        ours(*args, **kwargs)
    except autopar.InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ("shape", "values", "more leaves"))
def test_the_first_call_of_all_is_compared_too(ranks: Pool, what: str) -> None:
    found = ranks.run(lazily, what, world=2)
    assert len(set(found)) == 1 and "on rank" in found[0]
