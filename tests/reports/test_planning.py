"""A saved plan meets another call than the one it was made for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import files, strategies
from autopar.layout import Layout
from autopar.verify.pool import Pool
from tests.reports.harness import TINY, cluster, trained


class Tokens(nn.Module):
    """Positions, a sequence dim and a batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.position = nn.Embedding(13, 6), nn.Embedding(32, 6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 13)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids) + self.position.weight[: ids.shape[1]]
        return F.cross_entropy(self.down(F.gelu(self.up(h))).flatten(0, 1), ids.roll(1, 0).flatten())


def tokens() -> nn.Module:
    torch.manual_seed(0)
    return Tokens().double()


def ids(batch: int, sequence: int) -> Tensor:
    return torch.randint(0, 13, (batch, sequence), generator=torch.Generator().manual_seed(1))


@cache
def planned(devices: int, strategy: Any) -> autopar.Plan:
    """A plan for (16, 32)."""
    there = autopar.ClusterSpec.preset("cpu-gloo", devices=devices)
    return autopar.plan(tokens(), there, example_inputs=(ids(16, 32),), strategy=strategy, optimizer=torch.optim.SGD)


def saved(path: Path, devices: int = 2, strategy: Any = None) -> autopar.Plan:
    """A plan for (16, 32) in a file."""
    made = planned(devices, strategy)
    files.save(made, path)
    return made


def loaded(path: str, sizes: tuple[int, int], options: dict[str, Any]) -> tuple[float, dict[str, float], list[str]]:
    """Train at these sizes under the saved plan; (largest gap, costs, parameters' placements)."""
    model, single = tokens(), tokens()
    x = ids(*sizes)
    ours = autopar.parallelize(model, cluster(), example_inputs=(x,), plan=path, optimizer=torch.optim.SGD, **options)
    gaps = trained(ours, single, (x,), {}, steps=2)
    return max(gaps.values()), dict(ours.plan.costs), [str(p.placements) for p in ours.parameters()]


@pytest.mark.parametrize("sizes", [(32, 8), (16, 31)])
def test_a_plan_for_another_batch_or_sequence_is_refused_by_field(
    ranks: Pool, tmp_path: Path, sizes: tuple[int, int]
) -> None:
    path = tmp_path / "plan.json"
    saved(path)
    for outcome in ranks.outcomes(loaded, str(path), sizes, {}, world=2):
        assert outcome.error == "PlanError"
        assert f"inputs: args[0]: i64[16, 32] in the plan, args[0]: i64[{sizes[0]}, {sizes[1]}] here" in outcome.message
        assert 'reuse="placements"' in outcome.message


def test_the_same_sizes_load(ranks: Pool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made = saved(path, strategy=strategies.zero(2))
    for gap, costs, _ in ranks.run(loaded, str(path), (16, 32), {}, world=2):
        assert gap < TINY and costs == dict(made.costs)


@pytest.mark.parametrize(
    ("strategy", "world", "sizes"),
    [
        (None, 2, (32, 8)),
        (strategies.zero(3), 2, (7, 5)),
        (strategies.tensor(2), 2, (5, 9)),
        (strategies.ddp(2) * strategies.tensor(2), 4, (6, 7)),
    ],
)
def test_placements_are_kept_and_everything_else_is_priced_anew(
    ranks: Pool, tmp_path: Path, strategy: Any, world: int, sizes: tuple[int, int]
) -> None:
    path = tmp_path / "plan.json"
    made = saved(path, world, strategy)
    fresh = ranks.run(loaded, str(path), (16, 32), {}, world=world)
    for (gap, costs, where), (_, _, before) in zip(
        ranks.run(loaded, str(path), sizes, {"reuse": "placements"}, world=world), fresh, strict=True
    ):
        assert gap < TINY and where == before
        assert costs != dict(made.costs) and set(costs) >= {"step_s", "peak_bytes"} & set(made.costs)


def test_placements_that_leave_a_device_without_a_piece_are_not_reused(ranks: Pool, tmp_path: Path) -> None:
    """Legality is checked again: parameters of another shape are another model."""
    path = tmp_path / "plan.json"
    made = saved(path)
    files.save(replace(made, parameters={k: v for k, v in made.parameters.items() if k != "up.weight"}), path)
    for outcome in ranks.outcomes(loaded, str(path), (32, 8), {"reuse": "placements"}, world=2):
        assert outcome.error == "PlanError" and "up.weight" in outcome.message


def test_a_word_that_is_no_kind_of_reuse_is_refused(ranks: Pool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved(path)
    for outcome in ranks.outcomes(loaded, str(path), (32, 8), {"reuse": "everything"}, world=2):
        assert outcome.error == "PlanError" and '"placements"' in outcome.message


def test_a_plan_for_another_cluster_names_the_cluster(ranks: Pool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved(path, devices=4)
    for outcome in ranks.outcomes(loaded, str(path), (16, 32), {}, world=2):
        assert outcome.error == "PlanError" and "another cluster: devices 4 in the plan, 2 here" in outcome.message


def edited(plan: autopar.Plan, what: str) -> autopar.Plan:
    """The plan with one entry that is not possible."""
    node = next(name for name in plan.ops if name.startswith("mm"))
    kept = plan.parameters["up.weight"]
    if what == "role":
        return replace(plan, ops={**plan.ops, node: ("nonsense",) * len(plan.mesh.names)})
    if what == "op":
        return replace(plan, ops={name: roles for name, roles in plan.ops.items() if name != node})
    if what == "level":
        other = replace(kept, level=3, home=WHOLE, stored=ROWS)
        return replace(plan, parameters={**plan.parameters, "up.weight": other})
    narrow = Layout.whole(((5,), (6,)))
    return replace(plan, parameters={**plan.parameters, "up.weight": replace(kept, home=narrow, stored=narrow)})


WHOLE = Layout.whole(((10,), (6,)))
ROWS = WHOLE.with_cut((0, 0), ("data",))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("role", "it cannot run as ['nonsense'] on mesh(data=2)"),
        ("role", "it can run as [''], ['"),
        ("op", "the plan does not tell how %mm"),
        ("level", "parameters.up.weight: level 3 has one layout"),
        ("shape", "parameters.up.weight.home is [5, 6], but its dims are [10, 6]"),
    ],
)
def test_a_plan_edited_into_something_impossible_is_refused(ranks: Pool, tmp_path: Path, what: str, words: str) -> None:
    path = tmp_path / "plan.json"
    files.save(edited(planned(2, strategies.ddp()), what), path)
    for outcome in ranks.outcomes(loaded, str(path), (16, 32), {}, world=2):
        assert outcome.error == "PlanError" and words in outcome.message, outcome.message


def local_parts(path: str) -> None:
    x = ids(16, 32)
    half = x[8 * dist.get_rank() : 8 * dist.get_rank() + 8]
    autopar.parallelize(tokens(), cluster(), example_inputs=(autopar.Local(half),), plan=path)


def test_a_plan_for_whole_inputs_is_refused_for_parts_of_them(ranks: Pool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved(path)
    for outcome in ranks.outcomes(local_parts, str(path), world=2):
        assert outcome.error == "PlanError" and "args[0] is Local" in outcome.message


BROKEN = {
    "truncated": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "version": lambda text: text.replace('"autopar_plan": 1', '"autopar_plan": 99'),
    "nan": lambda text: text.replace('"level": 0', '"level": NaN').replace('"level": 3', '"level": NaN'),
    "nan cost": lambda text: text.replace('"costs": {', '"costs": {"step_s": NaN,'),
    "list": lambda text: "[1, 2]",
    "layout": lambda text: text.replace('"home": "[', '"home": "[x'),
    "extra": lambda text: text.replace('"ops": {', '"nothing": {}, "ops": {'),
    "pickle": lambda text: "\x80\x04" + text,
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plan_file_is_one_error_that_names_it(ranks: Pool, tmp_path: Path, how: str) -> None:
    path = tmp_path / "plan.json"
    saved(path)
    path.write_bytes(BROKEN[how](path.read_text()).encode("latin-1"))
    for outcome in ranks.outcomes(loaded, str(path), (16, 32), {}, world=2):
        assert outcome.error in ("PlanError", "UnsafeFileError"), outcome.text
        assert "plan.json" in outcome.message
