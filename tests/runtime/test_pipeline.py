"""A pipelined module behind the calls of a training script: other batches, no labels, sums of losses, checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar import ClusterSpec, Local, Precision, parallelize
from autopar.runtime.pipeline import Action, gpipe
from autopar.strategies import pipeline
from autopar.verify.pool import Pool
from tests.runtime.nets import gap, gradients_gap, net, parameters_gap, whole

TINY = 1e-12


def delivered(model: nn.Module, **options: Any) -> Any:
    cluster = ClusterSpec.preset("cpu-gloo", devices=dist.get_world_size())
    return parallelize(model, cluster, strategy=pipeline(microbatches=3), **options)


def test_gpipe_runs_all_of_forward_before_backward() -> None:
    told = [(a.phase, a.kind, a.micro) for a in gpipe(2, differentiate=True)]
    assert told == [
        ("forward", "body", 0), ("forward", "body", 1), ("forward", "end", 0),
        ("backward", "body", 0), ("backward", "body", 1), ("backward", "end", 0),
    ]  # fmt: skip
    assert list(gpipe(1, differentiate=False)) == [Action("body", "forward", 0), Action("end", "forward")]


def other_calls() -> float:
    """Batches of other sizes, also below the number of microbatches; evaluation; training again."""
    model, ids, labels = net()
    single, _, _ = net()
    ours = delivered(model)
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=0.01)) for m in (ours, single)]
    worst = 0.0
    for rows in (6, 4, 2, 1, 6):
        losses = [module(ids[:rows], labels=labels[:rows]).loss for module, _ in pairs]
        for loss, (_, optimizer) in zip(losses, pairs, strict=True):
            loss.backward()
            optimizer.step()
        worst = max(worst, gap(*losses), gradients_gap(ours, single), parameters_gap(ours, single))
        for _, optimizer in pairs:
            optimizer.zero_grad()
        with torch.no_grad():
            ours.eval(), single.eval()
            worst = max(worst, gap(ours(ids[:rows]).logits, single(ids[:rows]).logits))
            ours.train(), single.train()
    return worst


@pytest.mark.parametrize("world", [2, 3])
def test_other_batches_and_evaluation_are_right(ranks: Pool, world: int) -> None:
    assert max(ranks.run(other_calls, world=world)) < TINY


def clipped_and_saved() -> tuple[float, float]:
    """Gap after clipping by each norm and a step; gap after loading what was saved."""
    model, ids, labels = net()
    single, _, _ = net()
    ours = delivered(model, example_inputs=((ids,), {"labels": labels}))
    start = ours.full_state_dict()
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in (ours, single)]
    worst = 0.0
    for kind in (2.0, 1.0, float("inf")):
        for module, _ in pairs:
            module(ids, labels=labels).loss.backward()
        norms = [ours.clip_grad_norm_(0.1, kind), float(nn.utils.clip_grad_norm_(single.parameters(), 0.1, kind))]
        worst = max(worst, abs(norms[0] - norms[1]), gradients_gap(ours, single))
        for _, optimizer in pairs:
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, parameters_gap(ours, single))
    ours.load_state_dict(start)
    fresh, _, _ = net()
    return worst, gap(ours(ids, labels=labels).loss, fresh(ids, labels=labels).loss)


def test_norms_and_checkpoints_are_those_of_the_whole(ranks: Pool) -> None:
    for worst, loaded in ranks.run(clipped_and_saved, world=2):
        assert worst < TINY and loaded < TINY


class Checkpointed(nn.Module):
    """Everything under one checkpoint that the cut between the stages goes through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return y.square().sum()


def recomputed() -> float:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).double()
    ours, single = delivered(Checkpointed().double()), Checkpointed().double()
    for module in (ours, single):
        module(x).backward()
    return gradients_gap(ours, single)


def test_what_is_checkpointed_across_a_cut_is_right(ranks: Pool) -> None:
    assert max(ranks.run(recomputed, world=2)) < TINY


def low() -> tuple[torch.dtype, torch.dtype, float]:
    """Stored and reduced in float32, computed in bf16: dtypes, and how far the loss is from float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    expected = float(model(x).square().mean())
    ours = delivered(model, precision=Precision(param=torch.bfloat16, reduce=torch.float32), loss_fn=square)
    loss = ours(x)
    loss.backward()
    gradient = whole(next(ours.parameters()).grad)
    return next(ours.parameters()).dtype, gradient.dtype, abs(float(loss) - expected) / expected


def square(y: Tensor) -> Tensor:
    return y.float().square().mean()


def test_precision_holds_in_a_pipeline(ranks: Pool) -> None:
    for stored, reduced, apart in ranks.run(low, world=2):
        assert (stored, reduced) == (torch.float32, torch.float32) and apart < 0.02


def lossless() -> None:
    model, ids, _ = net()
    ours = delivered(model)
    with torch.no_grad():
        assert ours(ids).loss is None
    ours(ids)


def test_a_forward_without_a_loss_is_for_evaluation(ranks: Pool) -> None:
    for outcome in ranks.outcomes(lossless, world=2):
        assert outcome.error == "UnsupportedError" and "returns no loss here" in outcome.message


def local_parts() -> None:
    model, ids, labels = net()
    ours = delivered(model)
    ours(Local(ids[:3]), labels=Local(labels[:3]))


def test_parts_of_a_batch_are_refused(ranks: Pool) -> None:
    for outcome in ranks.outcomes(local_parts, world=2):
        assert outcome.error == "UnsupportedError" and "needs the whole batch on every rank" in outcome.message
