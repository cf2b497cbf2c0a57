"""Branches on values, types of the user's own, tied tensors, buffers that only a constructor computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.verify.pool import Pool
from tests.graphs import run_graph
from tests.reports.harness import (
    TINY,
    Made,
    cluster,
    deliver,
    gap,
    gradients_gap,
    outputs_gap,
    state_gap,
    trained,
    whole,
)

# ---- a branch on the values of an intermediate -----------------------------------------------------------------------


class Branch(nn.Module):
    """Takes one of two layers, as the numbers say."""

    def __init__(self) -> None:
        super().__init__()
        self.b, self.c = nn.Linear(5, 7), nn.Linear(5, 7)

    def forward(self, h: Tensor) -> Tensor:
        return self.b(h) if h.mean().item() > 0 else self.c(h)


class Branching(nn.Module):
    """A branch between layers that can be cut."""

    def __init__(self, how: str = "item") -> None:
        super().__init__()
        self.how = how
        self.a, self.branch, self.d = nn.Linear(3, 5), Branch(), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.how == "bool" and (h > 1e9).any():
            return h
        if self.how == "nonzero" and h.nonzero().shape[0] > 3:
            return h
        if self.how == "tolist" and sum(h.flatten().tolist()) > 0:
            return h
        if self.how == "mask":
            return h[h > 0].sum()
        return self.d(self.branch(h)).square().mean()


@pytest.mark.parametrize("how", ("nonzero", "mask"))
def test_a_shape_that_values_decide_is_one_error_with_the_line_and_a_mask_as_way_out(how: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Branching(how), (torch.randn(6, 3),))
    first, source, ways = str(caught.value).split("\n")
    assert "data-dependent shape" in first
    assert "from test_tracing.py:" in source and "Branch" in source
    assert all(way in ways for way in ("autopar.opaque(module)", "torch.where(mask, y, 0).sum() / mask.sum()"))
    assert "torch.cond" not in ways


class Masked(nn.Module):
    def forward(self, y: torch.Tensor) -> torch.Tensor:
        mask = y > 0
        return torch.where(mask, y, 0).sum() / mask.sum()


def test_a_mean_under_a_mask_is_captured_as_the_way_out_says() -> None:
    y = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    results = run_graph(capture(Masked(), (y,)), Masked(), (y,), {})
    assert torch.allclose(results["loss", "loss"], y[y > 0].mean(), rtol=1e-12)


@pytest.mark.parametrize("how", ("item", "bool", "tolist"))
def test_a_branch_on_values_is_one_error_with_the_line_and_the_ways_out(how: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Branching(how), (torch.randn(6, 3),))
    first, source, ways = str(caught.value).split("\n")
    assert "data-dependent branch" in first
    assert "from test_tracing.py:" in source and "Branch" in source
    assert all(way in ways for way in ("autopar.opaque(module)", "torch.cond", "a static value"))


def branching() -> Made:
    model = Branching().double()
    autopar.opaque(model.branch)
    return model, (torch.randn(6, 3).double(),), {}


def both_branches(family: str) -> list[float]:
    """Gaps for inputs that take the one branch and the other, seen in this order and in the other."""
    ours, single, (x,), _ = deliver(branching, family)
    gaps, taken = [], set()
    for shift in (5.0, -5.0, 5.0):
        with torch.no_grad():
            taken.add(bool(single.a(x + shift).mean() > 0))
        for module in (ours, single):
            module.zero_grad()
        losses = [m(x + shift) for m in (ours, single)]
        for loss in losses:
            loss.backward()
        gaps += [gap(*losses), gradients_gap(ours, single)]
    assert taken == {True, False}
    return gaps


@pytest.mark.parametrize(("family", "world"), [("ddp", 2), ("zero3", 2), ("tensor", 2), ("auto", 3), ("hsdp", 4)])
def test_an_opaque_module_takes_the_branch_that_the_values_say(ranks: Pool, family: str, world: int) -> None:
    assert max(map(max, ranks.run(both_branches, family, world=world))) < TINY


# ---- arguments and results of the user's own types -------------------------------------------------------------------


@dataclass
class Out:
    """What the model returns."""

    loss: Tensor | None
    logits: Tensor
    extra: Any = None


class Structured(nn.Module):
    """Keywords only, nests in, a dataclass out."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, *, ids: Tensor, labels: Tensor | None = None, flags: dict[str, Any]) -> Out:
        first, nothing, (second,) = flags["a"]
        h = self.emb(ids) * first + second
        logits = self.head(h)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Out(loss, logits, {"z": nothing, "a": (h.sum(-1), [None, 3], "word"), "m": flags["a"][1]})


def structured(labels: bool = True) -> Made:
    model = Structured().double()
    ids = torch.randint(0, 11, (7, 5))
    flags = {"a": [torch.randn(5, 6).double(), None, (torch.randn(6).double(),)]}
    return model, (), {"ids": ids, "labels": ids.roll(1) if labels else None, "flags": flags}


def structures(family: str) -> list[float]:
    ours, single, _, kwargs = deliver(structured, family)
    got, wanted = ours(**kwargs), single(**kwargs)
    assert type(got) is Out and list(got.extra) == ["z", "a", "m"]
    assert got.extra["z"] is None and got.extra["m"] is None and got.extra["a"][1:] == ([None, 3], "word")
    gaps = [outputs_gap(got, wanted)]
    without = {**kwargs, "labels": None}
    for call in (without, {k: v for k, v in kwargs.items() if k != "labels"}):
        got, wanted = ours(**call), single(**call)
        assert type(got) is Out and got.loss is None
        gaps.append(outputs_gap(got, wanted))
    return [*gaps, *trained(ours, single, (), kwargs, steps=2).values()]


@pytest.mark.parametrize(("family", "world"), [("zero2", 2), ("megatron", 2), ("auto", 2), ("ddp x tensor", 4)])
def test_a_dataclass_comes_back_with_its_type_nones_and_key_order(ranks: Pool, family: str, world: int) -> None:
    assert max(map(max, ranks.run(structures, family, world=world))) < TINY


class Handle:
    """A type that nobody can rebuild."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Returns(nn.Module):
    """Returns what it is told to."""

    def __init__(self, wrap: bool) -> None:
        super().__init__()
        self.layer, self.wrap = nn.Linear(3, 5), wrap

    def forward(self, x: Any) -> Any:
        h = self.layer(x.tensor if isinstance(x, Handle) else x)
        return {"h": Handle(h)} if self.wrap else h.sum()


def test_a_type_that_cannot_be_rebuilt_is_named() -> None:
    with pytest.raises(CaptureError, match=r"output\['h'\] is a tests.reports.test_tracing.Handle"):
        capture(Returns(True), (torch.randn(2, 3),))
    with pytest.raises(CaptureError, match=r"args\[0\] is a tests.reports.test_tracing.Handle"):
        capture(Returns(False), (Handle(torch.randn(2, 3)),))


# ---- one tensor under two names --------------------------------------------------------------------------------------


class Rope(nn.Module):
    def __init__(self, cache: Tensor) -> None:
        super().__init__()
        self.register_buffer("cache", cache)


class Tied(nn.Module):
    """A weight under two names, a buffer under two, one of them in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        cache = torch.randn(5, 6).double()
        self.emb = nn.Embedding(7, 6).double()
        self.rope = Rope(cache)
        self.register_buffer("cache2", cache)
        self.mid = nn.Linear(6, 6).double()
        self.head = nn.Linear(6, 7, bias=False).double()
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.mid(self.emb(ids) + self.rope.cache) * self.cache2)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def tied() -> Made:
    return Tied(), (torch.randint(0, 7, (7, 5)),), {}


def names(module: nn.Module) -> list[list[str]]:
    return [
        list(module.state_dict()),
        [n for n, _ in module.named_parameters(remove_duplicate=False)],
        [n for n, _ in module.named_buffers(remove_duplicate=False)],
        [n for n, _ in module.named_parameters()],
    ]


def ties(family: str) -> float:
    ours, single, args, kwargs = deliver(tied, family)

    def check() -> None:
        assert names(ours) == names(single)
        assert ours.emb.weight is ours.head.weight and ours.rope.cache is ours.cache2

    check()
    optimizer = torch.optim.AdamW(ours.parameters())
    assert len(optimizer.param_groups[0]["params"]) == len(list(single.parameters())) == 3
    state = {name: tensor.clone() + 1 for name, tensor in single.state_dict().items()}
    state["head.weight"] = state["emb.weight"]
    for module in (ours, single):
        module.load_state_dict(state)
    check()
    gaps = trained(ours, single, args, kwargs)
    check()
    full = ours.full_state_dict()
    assert list(full) == list(single.state_dict())
    assert torch.equal(full["emb.weight"], full["head.weight"])
    return max(*gaps.values(), state_gap(ours, single))


@pytest.mark.parametrize(
    ("family", "world"),
    [("zero1", 2), ("zero3", 2), ("fsdp-keep", 3), ("megatron", 2), ("auto", 2), ("zero3 x megatron", 4), ("zero3", 4)],
)
def test_tied_tensors_keep_their_names_and_stay_tied(ranks: Pool, family: str, world: int) -> None:
    assert max(ranks.run(ties, family, world=world)) < TINY


# ---- buffers that only the constructor computes ----------------------------------------------------------------------


class Frequencies(nn.Module):
    """Not saved, and computed in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.register_buffer("inv", 1 / (10000 ** (torch.arange(0, 8, 2) / 8)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.inv).square().mean()


class Recomputed(Frequencies):
    """Tells how its buffer is computed."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.inv.copy_(1 / (10000 ** (torch.arange(0, 8, 2, device=self.inv.device) / 8)))


def frequencies(kind: type[Frequencies], how: str) -> tuple[list[float], str]:
    """The buffer after materialising a model that was on meta or deferred, and the error if there is one."""
    torch.manual_seed(0)
    with torch.device("meta") if how == "meta" else autopar.deferred():
        model = kind()
    x = torch.randn(6, 4)
    try:
        ours = autopar.parallelize(model, cluster(), example_inputs=(x,))
        ours(x).backward()
    except autopar.UnsupportedError as error:
        return [], str(error)
    assert all(bool(whole(p).isfinite().all()) for p in ours.parameters())
    return whole(ours.inv).tolist(), ""


@pytest.mark.parametrize(
    ("kind", "how"), [(Frequencies, "meta"), (Frequencies, "deferred"), (Recomputed, "meta"), (Recomputed, "deferred")]
)
@pytest.mark.parametrize("world", (2, 3))
def test_a_computed_buffer_is_right_or_named(ranks: Pool, kind: type[Frequencies], how: str, world: int) -> None:
    expected = (1 / (10000 ** (torch.arange(0, 8, 2) / 8))).tolist()
    for values, error in ranks.run(frequencies, kind, how, world=world):
        if kind is Frequencies and how == "meta":
            assert "buffer inv is on meta and its numbers cannot be recomputed" in error
        else:
            assert not error and values == expected
