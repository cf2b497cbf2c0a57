"""Random numbers that do not depend on the cut, and heads that do not divide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import strategies
from autopar.models.llama import Attention, Rotary
from autopar.random import replay
from autopar.verify.families import strategy
from autopar.verify.pool import Pool
from tests.reports.harness import ON_FOUR, ON_TWO, TINY, Made, cluster, deliver, parity, whole

# ---- dropout ---------------------------------------------------------------------------------------------------------


class Drops(nn.Module):
    """Draws before, between and after layers, on activations that are cut in different ways."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up, self.down = nn.Linear(width, 12), nn.Linear(12, width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask = self.drop(x * self.scale)
        hidden = self.drop(self.up(mask).relu())
        noise = torch.rand_like(hidden) + torch.randn_like(hidden)
        out = self.down(hidden * noise)
        return {"loss": out.square().mean() + mask.mean(), "mask": mask, "hidden": hidden, "noise": noise}


def drops() -> Made:
    return Drops(6).double(), (torch.ones(7, 5, 6).double(),), {}


def drops_even() -> Made:
    return Drops(8).double(), (torch.ones(8, 8).double(),), {}


def masks(make: Any, family: str, steps: int) -> list[dict[str, Tensor]]:
    """The whole masks and noises of a few steps."""
    ours, _, args, kwargs = deliver(make, family)
    return [{k: whole(v) for k, v in ours(*args, **kwargs).items() if k != "loss"} for _ in range(steps)]


@pytest.mark.parametrize("make", (drops, drops_even))
def test_masks_are_bit_equal_on_one_two_and_four_ranks(ranks: Pool, make: Any) -> None:
    torch.manual_seed(0)
    model, args, _ = make()
    expected = []
    for step in range(2):
        with replay(0, step):
            expected.append(model(*args))
    for family, world in (("ddp", 1), ("ddp", 2), ("tensor", 2), ("zero2", 4), ("ddp x tensor", 4), ("megatron-sp", 2)):
        for got in ranks.run(masks, make, family, 2, world=world):
            for step, tensors in enumerate(got):
                for name in ("mask", "noise"):
                    assert torch.equal(tensors[name], expected[step][name].detach()), (family, world, step, name)
                assert torch.equal(tensors["hidden"] == 0, expected[step]["hidden"] == 0), (family, world, step)


def test_masks_differ_between_rows_places_and_steps(ranks: Pool) -> None:
    first, second = ranks.run(masks, drops, "ddp", 2, world=2)[0]
    for kind in ("mask", "noise"):
        assert not torch.equal(first[kind], second[kind])
        assert not any(torch.equal(first[kind][0], row) for row in first[kind][1:])
    kept = torch.stack([first["mask"] != 0, second["mask"] != 0]).double().mean()
    assert 0.3 < float(kept) < 0.7


@pytest.mark.parametrize(("family", "world"), [*ON_TWO, *ON_FOUR])
def test_training_with_dropout_equals_one_device(ranks: Pool, family: str, world: int) -> None:
    for gaps in ranks.run(parity, drops, family, random=True, world=world):
        assert max(gaps.values()) < TINY and gaps["ranks"] == 0, gaps


# ---- initialisation --------------------------------------------------------------------------------------------------


class Layer(Drops):
    """All of it can be initialised again."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def initial(family: str, seed: int) -> list[Tensor]:
    with torch.device("meta"):
        model = Layer(6)
    forced = strategy(family, dist.get_world_size())
    ours = autopar.parallelize(model, cluster(), example_inputs=(torch.ones(7, 5, 6),), strategy=forced, seed=seed)
    return [whole(p) for p in ours.parameters()]


def test_initial_numbers_are_bit_equal_on_one_two_and_four_ranks(ranks: Pool) -> None:
    with torch.device("meta"):
        single = Layer(6)
    autopar.initialise(single, 3)
    for family, world in (("ddp", 1), ("zero3", 2), ("tensor", 2), ("zero3 x megatron", 4)):
        for got in ranks.run(initial, family, 3, world=world):
            assert all(map(torch.equal, got, single.parameters())), (family, world)


# ---- heads that do not divide ----------------------------------------------------------------------------------------


class Grouped(nn.Module):
    """A block around attention with grouped queries."""

    def __init__(self, heads: int, kv_heads: int, width: int) -> None:
        super().__init__()
        d = heads * width
        self.emb, self.norm = nn.Embedding(13, d), nn.LayerNorm(d)
        self.rotary, self.attention = Rotary(width), Attention(d, heads, kv_heads, width)
        self.head = nn.Linear(d, 13)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        x = x + self.attention(self.norm(x), *self.rotary(ids.shape[1]))
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.roll(1).flatten())


class ByHand(nn.Module):
    """The same kind of attention written out with views, as many models do."""

    def __init__(self, heads: int, kv_heads: int, width: int) -> None:
        super().__init__()
        self.sizes = heads, kv_heads, width
        d = heads * width
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, kv_heads * width), nn.Linear(d, kv_heads * width)
        self.out = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        heads, kv_heads, width = self.sizes
        b, s, _ = x.shape
        q = self.q(x).view(b, s, heads, width).transpose(1, 2)
        k = self.k(x).view(b, s, kv_heads, width).transpose(1, 2).repeat_interleave(heads // kv_heads, 1)
        v = self.v(x).view(b, s, kv_heads, width).transpose(1, 2).repeat_interleave(heads // kv_heads, 1)
        scores = (q @ k.transpose(-2, -1)) / width**0.5
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(b, s, heads * width)).square().mean()


def grouped() -> Made:
    return Grouped(6, 2, 4).double(), (torch.randint(0, 13, (7, 5)),), {}


def three_heads() -> Made:
    return Grouped(3, 3, 4).double(), (torch.randint(0, 13, (7, 5)),), {}


def by_hand() -> Made:
    return ByHand(6, 2, 4).double(), (torch.randn(7, 5, 24).double(),), {}


def by_hand_three() -> Made:
    return ByHand(3, 3, 4).double(), (torch.randn(7, 5, 12).double(),), {}


HEADS = [
    (grouped, "auto", 4),
    (grouped, "ddp x tensor", 4),
    (grouped, "zero3 x megatron", 4),
    (grouped, "tensor", 2),
    (grouped, "auto", 3),
    (three_heads, "auto", 2),
    (three_heads, "tensor", 2),
    (three_heads, "megatron", 2),
    (three_heads, "tensor", 3),
    (by_hand, "auto", 4),
    (by_hand, "tensor", 2),
    (by_hand, "tensor", 4),
    (by_hand_three, "tensor", 2),
    (by_hand_three, "megatron-sp", 2),
    (by_hand_three, "auto", 4),
]


@pytest.mark.parametrize(("make", "family", "world"), HEADS)
def test_heads_that_do_not_divide_match_one_device(ranks: Pool, make: Any, family: str, world: int) -> None:
    for gaps in ranks.run(parity, make, family, world=world, steps=2):
        assert max(gaps.values()) < TINY and gaps["ranks"] == 0, gaps


def test_a_forced_degree_above_the_kv_heads_is_one_line_with_both_numbers() -> None:
    torch.manual_seed(0)
    model, args, _ = grouped()
    four = autopar.ClusterSpec.preset("cpu-gloo", devices=4)
    for forced in (strategies.tensor(4), strategies.megatron(4), strategies.megatron(4, sp=True)):
        with pytest.raises(autopar.UnsupportedError) as caught:
            autopar.plan(model, four, example_inputs=args, strategy=forced)
        first, source = str(caught.value).split("\n")
        assert "2 KV heads cannot be cut over 4 devices" in first and "use at most 2" in first
        assert source.startswith("  from llama.py:")


@pytest.mark.parametrize(("make", "heads"), [(grouped, "2 KV heads"), (three_heads, "3 KV heads")])
def test_a_forced_degree_is_refused_on_all_ranks_before_any_program(ranks: Pool, make: Any, heads: str) -> None:
    for outcome in ranks.outcomes(deliver, make, "tensor", world=4):
        assert outcome.error == "UnsupportedError"
        assert f"{heads} cannot be cut over 4 devices" in outcome.message
        assert outcome.seconds < 10
