"""Calls that differ between ranks are one error on all of them; calls of a new kind get a program of their own."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.errors import CaptureError
from autopar.verify.pool import Pool
from tests.runtime.nets import Net, deliver, gap, gradients_gap, net


def differ(what: str) -> float:
    model, ids, labels = net()
    ours, _ = deliver(model, (ids,), {"labels": labels}, "random1")
    odd = dist.get_rank() == 1
    started = time.monotonic()
    if odd:
        ids, labels, flags, mode = {
            "shape": (ids[:4], labels, None, True),
            "dtype": (ids.int(), labels, None, True),
            "leaves": (ids, None, None, True),
            "values": (ids, labels.roll(1), None, True),
            "flags": (ids, labels, {"double": True}, True),
            "training": (ids, labels, None, False),
        }[what]
        ours.train(mode)
    else:
        flags = {"double": False} if what == "flags" else None
    kwargs: dict[str, Any] = {} if labels is None else {"labels": labels}
    try:
        ours(ids, **kwargs, **({} if flags is None else {"flags": flags}))
    finally:
        assert time.monotonic() - started < 5
    return 0.0


WORDS = {
    "shape": "args[0] is int64[4, 5] on rank 1 but int64[6, 5] on rank 0",
    "dtype": "args[0] is int32[6, 5] on rank 1 but int64[6, 5] on rank 0",
    "leaves": "rank 1 passes 1 leaves, rank 0 passes 2 (kwargs['labels'] only on rank 0)",
    "values": "hash of the values of kwargs['labels'] is ",
    "flags": "kwargs['flags']['double'] is True on rank 1 but False on rank 0",
    "training": "training flags is",
}


@pytest.mark.parametrize("what", WORDS)
def test_ranks_that_differ_all_raise_the_same_error(ranks: Pool, what: str) -> None:
    outcomes = ranks.outcomes(differ, what, world=3)
    assert [o.error for o in outcomes] == ["InputError"] * 3
    assert len({o.message for o in outcomes}) == 1
    assert WORDS[what] in outcomes[0].message


def values_later() -> str:
    """Other values after the third forward pass by default, and are caught with check_inputs."""
    model, ids, labels = net()
    ours, _ = deliver(model, (ids,), {"labels": labels}, "random1")
    for _ in range(3):
        ours(ids, labels=labels)
    ours(ids.roll(dist.get_rank()), labels=labels)
    ours.check_inputs = True
    ours(ids.roll(dist.get_rank()), labels=labels)
    return ""


def differ_later(kind: str) -> float:
    """Ranks whose programs have begun before they hear that one of them makes another call."""
    model, ids, labels = net()
    ours, _ = deliver(model, (ids,), {"labels": labels}, kind)
    for _ in range(4):
        ours(ids, labels=labels)
    try:
        if dist.get_rank() == 1:
            ours.eval()
            ours(ids[:4], labels=labels[:4])
        else:
            ours(ids, labels=labels)
    except autopar.InputError as error:
        told = str(error)
    ours.train()
    counted = ours.rng_step
    ours(ids, labels=labels).loss.backward()
    assert ours.rng_step == counted + 1 == 5
    return float("training flags" in told or "args[0]" in told)


@pytest.mark.parametrize("kind", ["zero0", "zero3", "random1"])
def test_ranks_that_differ_later_all_raise_before_they_wait_for_each_other(ranks: Pool, kind: str) -> None:
    assert ranks.run(differ_later, kind, world=3) == [1.0] * 3


def test_values_are_compared_at_first_and_on_request(ranks: Pool) -> None:
    assert {o.error for o in ranks.outcomes(values_later, world=2)} == {"InputError"}


def other_model() -> None:
    torch.manual_seed(dist.get_rank())
    autopar.parallelize(Net(), autopar.ClusterSpec.preset("cpu-gloo", devices=2))


def test_ranks_that_start_from_other_numbers_are_told_which(ranks: Pool) -> None:
    for outcome in ranks.outcomes(other_model, world=2):
        assert outcome.error == "InputError"
        assert "parameter emb.weight differs between rank 0 and rank 1" in outcome.message


def other_size() -> None:
    autopar.parallelize(torch.nn.Linear(3, 5 + dist.get_rank()), autopar.ClusterSpec.preset("cpu-gloo", devices=2))


def test_ranks_that_start_from_other_shapes_are_told_the_shapes(ranks: Pool) -> None:
    for outcome in ranks.outcomes(other_size, world=2):
        assert outcome.error == "InputError"
        assert outcome.message == (
            "rank 0 has parameter weight [5, 3] where rank 1 has weight [6, 3]: their models differ in size\n"
            "  try: the same sizes on all ranks"
        )


def wrong_world() -> None:
    autopar.parallelize(Net(), autopar.ClusterSpec.preset("cpu-gloo", devices=4))


def test_another_number_of_processes_is_refused_before_anything_is_sent(ranks: Pool) -> None:
    for outcome in ranks.outcomes(wrong_world, world=2):
        assert outcome.error == "ClusterError"
        assert "the cluster has 4 devices, but 2 processes are running" in outcome.message


def one_wrong_cluster() -> None:
    autopar.parallelize(Net(), autopar.ClusterSpec.preset("cpu-gloo", devices=2 + dist.get_rank()))


def test_a_cluster_that_is_wrong_on_one_rank_is_one_error_on_all(ranks: Pool) -> None:
    for outcome in ranks.outcomes(one_wrong_cluster, world=2):
        assert outcome.error == "ClusterError"
        assert "the cluster has 3 devices on rank 1, but 2 processes are running" in outcome.message


class Fails(Net):
    """Cannot be captured on rank 1."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise CaptureError("something is different here")
        return super().forward(*args, **kwargs)


def fails_on_one_rank() -> None:
    torch.manual_seed(0)
    module = autopar.parallelize(Fails(), autopar.ClusterSpec.preset("cpu-gloo", devices=2))
    ids = torch.zeros(4, 5, dtype=torch.int64)
    module(ids, labels=ids)


def test_what_fails_on_one_rank_is_told_on_all(ranks: Pool) -> None:
    first, second = ranks.outcomes(fails_on_one_rank, world=2)
    assert (first.error, second.error) == ("CaptureError", "CaptureError")
    assert "capturing failed on rank 1: something is different here" in first.message


def new_kinds() -> list[float]:
    """A lazily planned module through everything that its programs are keyed by."""
    model, ids, labels = net()
    single, *_ = net()
    ours = autopar.parallelize(model, autopar.ClusterSpec.preset("cpu-gloo", devices=2), memory_bytes=3e5)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (ours, single)]
    gaps = []
    programs = []

    def both(*args: Any, backward: bool = True, **kwargs: Any) -> None:
        losses = []
        for module, optimizer in zip((ours, single), optimizers, strict=True):
            loss = module(*args, **kwargs).loss
            losses.append(loss)
            if backward:
                loss.backward()
                optimizer.step()
        gaps.append(gap(*losses))
        if backward:
            gaps.append(gradients_gap(ours, single))
        programs.append(len(ours._autopar.programs))
        for module in (ours, single):
            module.zero_grad()

    both(ids, labels=labels)
    both(ids, labels=labels)
    both(ids[:4], labels=labels[:4])
    both(ids, labels=labels, flags={"double": True})
    both(ids, labels=labels, flags={"double": False})
    for module in (ours, single):
        module.eval()
    with torch.no_grad():
        both(ids, labels=labels, backward=False)
    with torch.inference_mode():
        both(ids, labels=labels, backward=False)
    for module in (ours, single):
        module.train()
        module.frozen.requires_grad_(True)
        module.mid.requires_grad_(False)
    both(ids, labels=labels)
    assert ours.mid.weight.grad is None
    assert programs == [1, 1, 2, 3, 4, 5, 5, 6]
    return gaps


def test_a_call_of_a_new_kind_gets_a_program_under_the_same_storage(ranks: Pool) -> None:
    assert max(map(max, ranks.run(new_kinds, world=2))) < 1e-9


def parts(sizes: list[int], what: str) -> float:
    model, ids, labels = net()
    single, *_ = net()
    ours = autopar.parallelize(model, autopar.ClusterSpec.preset("cpu-gloo", devices=dist.get_world_size()))
    ids, labels = ids[: sum(sizes)], labels[: sum(sizes)]
    mine = slice(sum(sizes[: dist.get_rank()]), sum(sizes[: dist.get_rank() + 1]))
    if what == "mixed":
        loss = ours(autopar.Local(ids[mine]), labels=labels).loss
    else:
        loss = ours(autopar.Local(ids[mine]), labels=autopar.Local(labels[mine])).loss
    loss.backward()
    expected = single(ids, labels=labels).loss
    expected.backward()
    return max(gap(loss, expected), gradients_gap(ours, single))


@pytest.mark.parametrize(("sizes", "what"), [([3, 3], "all"), ([3, 2], "all"), ([2, 2, 1], "all"), ([3, 3], "mixed")])
def test_local_parts_make_the_global_batch(ranks: Pool, sizes: list[int], what: str) -> None:
    assert max(ranks.run(parts, sizes, what, world=len(sizes))) < 1e-12


def test_local_parts_of_wrong_lengths_are_refused(ranks: Pool) -> None:
    for outcome in ranks.outcomes(parts, [2, 3], "all", world=2):
        assert outcome.error == "InputError"
        assert "args[0] is Local, and its parts have [2, 3] rows: rank 0 has 2 where a global" in outcome.message


def autocast() -> list[float]:
    """The same call without and with autocast, and without again."""
    model, ids, labels = net()
    model.float()
    single, *_ = net()
    single.float()
    ours = autopar.parallelize(model, autopar.ClusterSpec.preset("cpu-gloo", devices=2))
    gaps = []
    for enabled in (False, True, False):
        losses = []
        for module in (ours, single):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                loss = module(ids, labels=labels).loss
            loss.backward()
            losses.append(loss)
        gaps.append(gap(*losses))
    assert len(ours._autopar.programs) == 2
    return [*gaps, gradients_gap(ours, single)]


def test_autocast_is_a_kind_of_call_of_its_own(ranks: Pool) -> None:
    for plain, cast, again, gradients in ranks.run(autocast, world=2):
        assert plain < 1e-6 and again < 1e-6 and cast < 0.02 and gradients < 0.1
