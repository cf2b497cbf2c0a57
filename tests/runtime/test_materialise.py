"""A model on meta gets the single device's numbers, bit for bit, whatever the plan and the world."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import UnsupportedError
from autopar.runtime.materialise import Virtual
from autopar.verify.pool import Pool
from tests.runtime.nets import deliver, whole


class Layers(nn.Module):
    """Layers whose initialisations differ: draws, fills, views, attention, statistics, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(300, 64, padding_idx=3)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 300)
        self.statistics = nn.BatchNorm1d(300)
        self.down = nn.Linear(300, 64)
        self.head = nn.Linear(64, 300, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.emb(ids))
        h = h + self.down(self.up(h).relu())
        return self.head(h).square().mean()


class Own(nn.Module):
    """Parameters that only the constructor knows how to fill, and a buffer it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv", 1 / (10000 ** (torch.arange(0, 8, 2) / 8)), persistent=False)
        self.register_buffer("mask", torch.ones(200, 200).tril())
        self.square = nn.Parameter(torch.empty(200, 200))
        nn.init.orthogonal_(self.square)
        self.cut = nn.Parameter(torch.empty(200, 150))
        nn.init.trunc_normal_(self.cut, std=0.02)
        with torch.no_grad():
            self.cut[3].zero_()
            self.cut[5:7].copy_(torch.randn(2, 150))
        self.small = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ (self.square * self.mask)) @ self.cut).square().mean() + (self.inv * 2).sum()


class Twice(nn.Linear):
    """Touches its weight again after its bias, without overwriting it."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.weight.mul_(2)
            self.bias.add_(self.weight.sum())
            self.weight[1:3].add_(1)


class Root(nn.Module):
    """A model that initialises itself from the root."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Twice(20, 30), nn.Linear(30, 20)
        self.scale = nn.Parameter(torch.ones(30))

    def init_weights(self) -> None:
        for layer in (self.a, self.b):
            layer.reset_parameters()
        nn.init.normal_(self.scale)
        nn.init.normal_(self.a.weight, std=0.1)
        with torch.no_grad():
            self.a.weight.add_(self.scale[:, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x) * self.scale).square().mean()


def example(kind: type[nn.Module]) -> torch.Tensor:
    torch.manual_seed(1)
    if kind is Layers:
        return torch.randint(0, 300, (4, 6))
    return torch.randn(5, 200 if kind is Own else 20)


def materialised(kind: type[nn.Module], how: str, seed: int) -> dict[str, torch.Tensor]:
    """The whole parameters and buffers of a model that was on meta, or deferred."""
    if how == "lazy":
        with torch.device("meta"):
            model = kind()
        cluster = autopar.ClusterSpec.preset("cpu-gloo", devices=dist.get_world_size())
        ours = autopar.parallelize(model, cluster, seed=seed)
        ours(example(kind))
    elif kind is Own:
        torch.manual_seed(seed)
        with autopar.deferred():
            model = kind()
        ours, _ = deliver_only(model, example(kind), how, 0)
    else:
        with torch.device("meta"):
            model = kind()
        ours, _ = deliver_only(model, example(kind), how, seed)
    if kind is Layers:
        assert ours.head.weight is ours.emb.weight
    tensors = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    return {name: whole(tensor) for name, tensor in tensors.items()}


def deliver_only(model: nn.Module, x: torch.Tensor, how: str, seed: int) -> tuple[nn.Module, None]:
    from autopar.capture import capture
    from autopar.passes import copy_views
    from autopar.planner import random_plan
    from autopar.runtime.module import ParallelModule
    from tests.runtime.nets import meshes, zero

    graph = copy_views(capture(model, (x,)))
    plan = zero(graph, int(how[-1])) if how.startswith("zero") else random_plan(graph, None, meshes(), int(how[6:]))
    return ParallelModule(model, graph, plan, seed=seed), None


PLANS = [("zero3", 2), ("zero3", 3), ("zero3", 4), ("random1", 4), ("random2", 3), ("random3", 4), ("lazy", 2)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the ranks have it: the rounding of a QR decomposition depends on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("how", "world"), PLANS)
@pytest.mark.parametrize("kind", (Layers, Own, Root))
def test_numbers_are_the_single_devices(ranks: Pool, kind: type[nn.Module], how: str, world: int) -> None:
    if kind is Own and how == "lazy":
        pytest.skip("Own has no initialisation beside its constructor")
    if kind is Own:
        torch.manual_seed(7)
        single = kind()
    else:
        with torch.device("meta"):
            single = kind()
        autopar.initialise(single, 7)
    wanted = {**dict(single.named_parameters()), **dict(single.named_buffers())}
    for got in ranks.run(materialised, kind, how, 7, world=world):
        assert list(got) == list(wanted)
        for name, tensor in got.items():
            assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("kind", (Layers, Root))
def test_initialise_is_the_models_own_initialisation(kind: type[nn.Module]) -> None:
    with torch.device("meta"):
        ours = kind()
    autopar.initialise(ours, 3)
    if kind is Layers:
        torch.manual_seed(3)
        theirs = kind()  # constructors run in the order in which modules are initialised
    else:
        theirs = kind()
        torch.manual_seed(3)
        theirs.init_weights()
    for (name, a), (_, b) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
        assert type(a) is torch.Tensor and not isinstance(a, Virtual)


def test_a_deferred_constructor_leaves_the_generator_as_it_would() -> None:
    torch.manual_seed(5)
    theirs, after = Own(), torch.rand(3)
    torch.manual_seed(5)
    with autopar.deferred():
        ours = Own()
    assert torch.equal(torch.rand(3), after)
    autopar.initialise(ours)
    for (name, a), (_, b) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert torch.equal(ours.inv, theirs.inv)


def test_what_cannot_be_recomputed_is_named() -> None:
    with torch.device("meta"):
        model = Own()
    with pytest.raises(UnsupportedError, match=r"parameter square .*and 3 more: cut, inv, mask.*is on meta"):
        autopar.initialise(model)


class Frequencies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("inv", 1 / (10000 ** (torch.arange(0, 8, 2) / 8)), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.inv).sum()


def test_a_buffer_computed_in_the_constructor_is_named() -> None:
    with torch.device("meta"):
        model = Frequencies()
    with pytest.raises(UnsupportedError, match="buffer inv is on meta and its numbers cannot be recomputed: Freq"):
        autopar.initialise(model)


def peak() -> tuple[int, int, int]:
    """(largest number of bytes alive in whole tensors and shards while filling, local shards, largest parameter)."""
    from autopar.runtime import materialise

    seen = [0]
    alive: dict[int, int] = {}
    need = materialise.Store.need

    def watched(self: materialise.Store, *args: object) -> None:
        need(self, *args)  # type: ignore[arg-type]
        for base in self.open:
            if base.whole is not None:
                alive[id(base)] = base.whole.nbytes
        now = {id(b): b.whole.nbytes for b in self.open if b.whole is not None}
        seen[0] = max(seen[0], sum(now.values()))

    materialise.Store.need = watched  # type: ignore[method-assign]
    try:
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(64 * (i + 1), 64 * (i + 2)) for i in range(6)])
        ours, _ = deliver_only(Mean(model), torch.randn(2, 64), "zero3", 0)
    finally:
        materialise.Store.need = need  # type: ignore[method-assign]
    shards = sum(p.to_local().nbytes for p in ours.parameters())
    return seen[0], shards, max(math.prod(p.shape) * 4 for p in ours.parameters())


class Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).mean()


def test_one_parameter_is_whole_at_a_time(ranks: Pool) -> None:
    for whole_bytes, _, largest in ranks.run(peak, world=2):
        assert whole_bytes <= largest


__all__ = ["deliver"]
