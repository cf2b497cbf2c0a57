"""Operators whose rules are easily wrong: means, extremes, convolutions, embeddings, statistics of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.axes import analyse
from autopar.capture import capture
from autopar.errors import UnsupportedError
from autopar.layout import Mesh
from autopar.passes import copy_views, emit
from autopar.planner.random_plan import random_plan
from autopar.verify.pool import Pool
from autopar.verify.simulate import run
from tests.harness.reference import errors, values_of
from tests.reports.harness import TINY, Made, deliver, parity, whole

MESHES = (Mesh(("a",), (2,)), Mesh(("a",), (3,)), Mesh(("a", "b"), (2, 2)))


class Of(nn.Module):
    """A forward written as a function of the module and its input."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def worst_of_plans(make: Callable[[], Made], plans: int = 8) -> float:
    """Largest error of loss, outputs and gradients under random legal plans on simulated ranks."""
    torch.manual_seed(0)
    model, args, _ = make()
    single = copy.deepcopy(model)
    graph = copy_views(capture(model, args, double=True))
    out = single(*args)
    out["loss"].backward()
    named = {name: p.grad for name, p in single.named_parameters()}
    results = {"loss": out["loss"], **{f"output[{k!r}]": v for k, v in out.items()}}
    ends = [named.get(o.name) if "gradient" in o.kind else results.get(o.name) for o in graph.outputs]
    wanted = [None if end is None else end.detach() for end in ends]
    axes, worst = analyse(graph), 0.0
    for seed in range(plans):
        program = emit(graph, axes, random_plan(graph, axes, MESHES, seed))
        values = {k: torch.ones(()).double() if k.startswith("tangent") else v for k, v in made(graph, model, args)}
        found, _ = run(program, values, [torch.ones((), dtype=torch.float64)])
        worst = max(worst, *errors(graph, found, wanted).values())
    return worst


def made(graph: Any, model: nn.Module, args: tuple[Any, ...]) -> Any:
    return values_of(graph, model, [a for a in args if isinstance(a, Tensor)]).items()


# ---- means over pieces of unequal length -----------------------------------------------------------------------------


class Mean(nn.Module):
    """The mean of what a scale leaves as it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (x * self.scale).mean()}


def mean_of_three() -> Made:
    return Mean(4).double(), (torch.arange(12).reshape(3, 4).double(),), {}


def mean_of_one() -> Made:
    return Mean(4).double(), (torch.arange(4).reshape(1, 4).double(),), {}


def mean(make: Callable[[], Made], family: str) -> float:
    ours, _, args, _ = deliver(make, family)
    return float(whole(ours(*args)["loss"]))


@pytest.mark.parametrize(
    ("make", "family", "expected"),
    [
        (mean_of_three, "ddp", 5.5),
        (mean_of_three, "zero3", 5.5),
        (mean_of_three, "auto", 5.5),
        (mean_of_one, "auto", 1.5),
    ],
)
def test_a_mean_over_unequal_pieces_is_the_mean_of_all(ranks: Pool, make: Any, family: str, expected: float) -> None:
    assert ranks.run(mean, make, family, world=2) == [expected] * 2


@pytest.mark.parametrize("make", [mean_of_three, mean_of_one])
def test_a_mean_is_the_mean_of_all_under_every_plan(make: Callable[[], Made]) -> None:
    assert worst_of_plans(make, 12) < 1e-9


def test_a_row_that_cannot_be_shared_is_refused_and_never_a_mean_of_nothing(ranks: Pool) -> None:
    for outcome in ranks.outcomes(mean, mean_of_one, "ddp", world=2):
        assert outcome.error == "UnsupportedError" and "ddp() finds nothing to cut" in outcome.message


# ---- positions in a dim that could be cut ----------------------------------------------------------------------------


def looks(m: Any, x: Tensor) -> dict[str, Tensor]:
    """Everything that looks along the last dim, in which the largest numbers stand behind."""
    y = m.up(x).sigmoid() + torch.arange(6)
    (top, at), (low, below), (two, places), (rising, order) = y.max(-1), y.min(-1), y.topk(2), y.sort(-1)
    indices = {"argmax": y.argmax(-1), "argmin": y.argmin(-1), "max": at, "min": below, "topk": places, "sort": order}
    kept = {"cumsum": y.cumsum(-1), "cumprod": y.cumprod(-1), "logsumexp": y.logsumexp(-1), "softmax": y.softmax(-1)}
    numbers = [top, low, two, rising, *kept.values(), y.median(-1)[0], y.max().view(1), y.std(-1)]
    loss = sum((n.square().mean() for n in numbers), y.argsort(-1).double().mean())
    return {"loss": loss, **indices, **kept}


def looking() -> Made:
    return Of(looks, up=nn.Linear(3, 6)).double(), (torch.randn(4, 3).double(),), {}


def test_positions_are_those_in_the_whole_dim_under_every_plan() -> None:
    assert worst_of_plans(looking) < 1e-9


@pytest.mark.parametrize(("family", "world"), [("tensor", 2), ("ddp", 2), ("auto", 2), ("ddp x tensor", 4)])
def test_extremes_and_orders_equal_one_device(ranks: Pool, family: str, world: int) -> None:
    for gaps in ranks.run(parity, looking, family, world=world):
        assert max(gaps.values()) < TINY and gaps["ranks"] == 0, gaps


# ---- places that are read and written by number ----------------------------------------------------------------------


def picks(m: Any, x: Tensor, i: Tensor) -> dict[str, Tensor]:
    """Reads and writes rows, some of them more than once."""
    y = m.up(x)
    zeros = torch.zeros_like(y)
    rows, columns = i, i % y.shape[1]
    grid = columns[:, None].expand(-1, 2).contiguous()
    parts = {
        "index": y[rows] + y[:, columns].sum() + y[rows, columns][:, None],
        "index_select": y.index_select(1, columns),
        "index_add": zeros.index_add(0, rows, y[: len(rows)], alpha=2),
        "index_put": zeros.index_put((rows, columns), y[: len(rows), 0], accumulate=True),
        "index_fill": y.index_fill(1, columns, 0.5),
        "scatter_add": zeros.scatter_add(1, grid, y[:, 2:4]),
        "scatter": zeros.scatter(1, torch.arange(2).expand(5, 2), y[:, :2]),
        "reduce": zeros.scatter_reduce(1, grid, y[:, 1:3], "amax", include_self=False),
        "gather": y.gather(1, grid),
        "one_hot": F.one_hot(columns, y.shape[1]).to(y.dtype) @ y.T,
        "where": torch.where(y > y.mean(), y, zeros),
    }
    return {"loss": sum(p.square().sum() for p in parts.values()), **parts}


def picking() -> Made:
    return Of(picks, up=nn.Linear(3, 6)).double(), (torch.randn(5, 3).double(), torch.tensor([1, 3, 3, 0, 1])), {}


def moves(m: Any, x: Tensor) -> dict[str, Tensor]:
    """Rolls, flips, triangles, windows, repeats, sums of products."""
    y = m.up(x)
    square = torch.einsum("bsi,bti->bst", y, y)
    lower = square.tril().masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(2), y.min())
    written = y.clone()
    written[:, 1:3] = x[:, :2].repeat(1, 1, 2)
    written[:, 0] = 0.5
    parts = {
        "einsum": torch.einsum("bsi,bsj->bij", y, y) + torch.einsum("bsi->i", y),
        "masked": lower.softmax(-1),
        "roll": y.roll((1, -2), (1, 2)),
        "flip": y.flip(1, 2),
        "repeat": y.repeat_interleave(3, 1) + y.repeat_interleave(torch.tensor([3, 0, 5, 4]), 1, output_size=12),
        "unfold": y.unfold(1, 2, 1),
        "windows": F.unfold(y.unsqueeze(1), 2),
        "padded": F.pad(y, (2, 1), "reflect") + F.pad(y, (2, 1), "replicate") + F.pad(y, (2, 1), "circular"),
        "written": written,
    }
    return {"loss": sum(p.square().mean() for p in parts.values()), **parts}


def moving() -> Made:
    return Of(moves, up=nn.Linear(3, 6)).double(), (torch.randn(5, 4, 3).double(),), {}


@pytest.mark.parametrize("make", [picking, moving])
def test_picked_and_moved_elements_equal_one_device_under_every_plan(make: Callable[[], Made]) -> None:
    assert worst_of_plans(make) < 1e-9


@pytest.mark.parametrize(
    ("make", "family"), [(picking, "ddp"), (picking, "tensor"), (moving, "ddp"), (moving, "tensor")]
)
def test_picked_and_moved_elements_equal_one_device(ranks: Pool, make: Any, family: str) -> None:
    for gaps in ranks.run(parity, make, family, world=2):
        assert max(gaps.values()) < TINY and gaps["ranks"] == 0, gaps


# ---- convolutions ----------------------------------------------------------------------------------------------------


def convolves(m: Any, x: Tensor) -> dict[str, Tensor]:
    y = m.second(m.first(x * m.scale.weight.view(1, 3, 1, 1)).relu())
    return {"loss": y.square().mean(), "y": y}


def convolving() -> Made:
    layers = {"first": nn.Conv2d(3, 8, 3, padding=1), "second": nn.Conv2d(8, 4, 3, stride=2, groups=2)}
    return Of(convolves, scale=nn.Linear(3, 1), **layers).double(), (torch.randn(2, 3, 8, 8).double(),), {}


def test_no_plan_cuts_a_picture_in_a_way_that_changes_its_gradient() -> None:
    assert worst_of_plans(convolving, 12) < 1e-9


@pytest.mark.parametrize(("family", "world"), [("ddp", 2), ("tensor", 2), ("zero3", 2), ("auto", 4), ("tensor", 4)])
def test_a_convolution_equals_one_device(ranks: Pool, family: str, world: int) -> None:
    for gaps in ranks.run(parity, convolving, family, world=world):
        assert max(gaps.values()) < TINY and gaps["ranks"] == 0, gaps


# ---- embeddings ------------------------------------------------------------------------------------------------------

IDS = torch.tensor([[1, 7, 2], [7, 9, 3]])


def embeds(m: Any, ids: Tensor) -> dict[str, Tensor]:
    y = m.emb(ids)
    return {"loss": y.sum(), "y": y}


def embedding(words: int, **options: Any) -> Made:
    return Of(embeds, emb=nn.Embedding(words, 4, **options)).double(), (IDS,), {}


def padded() -> Made:
    return embedding(10, padding_idx=7)


def padded_odd() -> Made:
    return embedding(11, padding_idx=7)


def padded_from_behind() -> Made:
    return embedding(10, padding_idx=-3)


def by_frequency() -> Made:
    return embedding(10, padding_idx=-3, scale_grad_by_freq=True)


def bag(mode: str, **options: Any) -> Made:
    return Of(embeds, emb=nn.EmbeddingBag(10, 4, mode=mode, padding_idx=7, **options)).double(), (IDS,), {}


def mean_bag() -> Made:
    return bag("mean")


def sum_bag() -> Made:
    return bag("sum", scale_grad_by_freq=True)


def max_bag() -> Made:
    return bag("max")


TABLES = (padded, padded_odd, padded_from_behind, by_frequency, mean_bag, sum_bag, max_bag)


@pytest.mark.parametrize("make", TABLES)
def test_a_table_equals_one_device_under_every_plan(make: Callable[[], Made]) -> None:
    assert worst_of_plans(make, 12) < 1e-9


def rows_of_gradient(make: Callable[[], Made], family: str) -> Tensor:
    ours, _, args, _ = deliver(make, family)
    ours(*args)["loss"].backward()
    return whole(ours.emb.weight.grad)


@pytest.mark.parametrize("family", ["ddp", "zero3", "auto"])
@pytest.mark.parametrize("make", [padded, padded_odd, padded_from_behind])
def test_only_the_row_of_padding_gets_no_gradient(ranks: Pool, make: Any, family: str) -> None:
    for gradient in ranks.run(rows_of_gradient, make, family, world=2):
        expected = torch.zeros_like(gradient)
        expected[[1, 2, 3, 9]] = 1.0
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("make", [by_frequency, mean_bag, max_bag])
def test_other_tables_train_as_on_one_device(ranks: Pool, make: Any) -> None:
    for gaps in ranks.run(parity, make, "zero3", world=2):
        assert max(gaps.values()) < TINY and gaps["ranks"] == 0, gaps


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}])
@pytest.mark.parametrize("make", [lambda **o: embedding(10, **o), lambda **o: bag("mean", **o)])
def test_a_table_that_is_changed_or_sparse_is_refused_with_the_line_and_a_way_out(make: Any, options: Any) -> None:
    with pytest.raises(UnsupportedError) as caught:
        capture(*make(**options)[:2])
    first, source, way = str(caught.value).split("\n")
    assert "emb.weight in place" in first or "gives a sparse tensor" in first
    assert source.startswith("  from test_operators.py:") and "y = m.emb(ids)" in source
    assert way.startswith("  try: ")


# ---- a loss of statistics over the whole batch -----------------------------------------------------------------------


class Routed(nn.Module):
    """Two experts behind a router, whose balance is a statistic of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 2), nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        chances = self.router(x).softmax(-1)
        best, chosen = chances.topk(1, -1)
        mixed = torch.stack([expert(x) for expert in self.experts], -2)
        y = best * mixed.gather(-2, chosen.unsqueeze(-1).expand(-1, -1, 6)).squeeze(-2)
        share = F.one_hot(chosen.squeeze(-1), 2).to(x.dtype).mean(0)
        balance = 2 * (share * chances.mean(0)).sum()
        return {"loss": F.cross_entropy(self.head(y), labels) + 0.01 * balance, "balance": balance}


def routed() -> Made:
    return Routed().double(), (torch.randn(10, 6).double(), torch.randint(0, 5, (10,))), {}


@pytest.mark.parametrize(
    ("family", "world"), [("ddp", 2), ("ddp", 4), ("zero2", 2), ("tensor", 2), ("ddp x tensor", 4)]
)
def test_a_balance_over_the_batch_weighs_the_same_on_any_number_of_ranks(ranks: Pool, family: str, world: int) -> None:
    for gaps in ranks.run(parity, routed, family, world=world):
        assert max(gaps.values()) < TINY and gaps["ranks"] == 0, gaps
