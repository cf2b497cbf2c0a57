"""State dicts keep the model's names, and load from whole tensors and from DTensors of any layout."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import pytest
import torch

from autopar.verify.pool import Pool
from tests.runtime.nets import deliver, gap, net, parameters_gap


def round_trip(how: str, other: str) -> float:
    model, ids, labels = net()
    ours, single = deliver(model, (ids,), {"labels": labels}, how)
    ours(ids, labels=labels).loss.backward()
    torch.optim.SGD(ours.parameters(), 0.1).step()
    full = ours.full_state_dict()
    assert list(full) == list(single.state_dict()) and all(type(v) is torch.Tensor for v in full.values())
    single.load_state_dict(full)
    gaps = [parameters_gap(ours, single)]

    second, *_ = net()
    theirs, _ = deliver(second, (ids,), {"labels": labels}, other)
    theirs(ids, labels=labels)
    theirs.load_state_dict(ours.state_dict())  # DTensors of another layout
    gaps.append(parameters_gap(theirs, single))
    theirs.load_state_dict({k: v * 2 if v.is_floating_point() else v for k, v in full.items()})  # whole tensors
    single.load_state_dict({k: v * 2 if v.is_floating_point() else v for k, v in full.items()})
    gaps.append(parameters_gap(theirs, single))
    assert theirs.emb.weight is theirs.head.weight
    gaps.append(gap(theirs(ids, labels=labels).loss, single(ids, labels=labels).loss))
    return max(gaps)


@pytest.mark.parametrize(("how", "other"), [("zero1", "random1"), ("zero3", "zero2"), ("random2", "random4")])
def test_a_state_dict_goes_around(ranks: Pool, how: str, other: str) -> None:
    assert max(ranks.run(round_trip, how, other, world=4)) < 1e-12


def refused(what: str) -> None:
    model, ids, labels = net()
    ours, _ = deliver(model, (ids,), {"labels": labels}, "zero2")
    if what == "copy":
        copy.deepcopy(ours)
    elif what == "pickle":
        pickle.dumps(ours)
    elif what == "assign":
        ours.load_state_dict(ours.state_dict(), assign=True)
    elif what == "missing":
        ours.load_state_dict({"emb.weight": ours.emb.weight})


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "copy",
            "cannot be copied; load its full_state_dict() into another model\n  try: for an average of its weights",
        ),
        ("pickle", "cannot be pickled; save its state_dict()"),
        ("assign", "assign=True"),
        ("missing", "Missing key(s) in state_dict"),
    ],
)
def test_what_cannot_be_done_with_a_module_is_said(ranks: Pool, what: str, words: str) -> None:
    for outcome in ranks.outcomes(refused, what, world=2):
        assert words in outcome.message


def clipped(how: str, order: float) -> float:
    model, ids, labels = net()
    ours, single = deliver(model, (ids,), {"labels": labels}, how)
    gaps = []
    for max_norm in (0.01, 100.0):
        norms = []
        for module in (ours, single):
            module.zero_grad()
            module(ids, labels=labels).loss.backward()
        norms.append(ours.clip_grad_norm_(max_norm, order))
        norms.append(float(torch.nn.utils.clip_grad_norm_(single.parameters(), max_norm, order)))
        pairs = zip(ours.parameters(), single.parameters(), strict=True)
        gaps += [abs(norms[0] - norms[1]), *(gap(a.grad, b.grad) for a, b in pairs)]
        assert type(norms[0]) is float
    return max(gaps)


@pytest.mark.parametrize("order", (2.0, 1.0, float("inf")))
@pytest.mark.parametrize("how", ("zero3", "random1", "random5"))
def test_clipping_goes_by_the_norm_of_the_whole(ranks: Pool, how: str, order: float) -> None:
    assert max(ranks.run(clipped, how, order, world=4)) < 1e-12


ALONE = """
import autopar, torch
from autopar.models import mlp
model, args = mlp.tiny()
module = autopar.parallelize(model, autopar.ClusterSpec.preset("cpu-gloo", devices=1))
loss = module(*args)
loss.backward()
torch.optim.AdamW(module.parameters()).step()
print(int(float(module(*args).detach()) != float(loss.detach())))
"""


def test_a_single_process_needs_no_launcher() -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, env=env, timeout=120)
    assert done.stdout == "1\n", done.stderr
