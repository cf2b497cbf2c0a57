"""Every algorithm carried out, by simulation and by gloo: the values it leaves, and the seconds of its formula."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.algorithms import ALGORITHMS, Algorithm
from autopar.cost.comm import candidates
from autopar.cost.network import Network, after
from autopar.cost.schedules import SWITCH, Schedule, schedule
from autopar.cost.trees import first_chunk_steps, timetable
from autopar.links import Link, way
from autopar.verify.pool import Pool

EVERY = [algorithm for kind in ALGORITHMS.values() for algorithm in kind]


def names(algorithm: Algorithm) -> str:
    return f"{algorithm.collective} {algorithm.name}"


def terms(kind: str, plan: Schedule, seed: int = 0) -> numpy.ndarray:
    """What every device holds before: whole numbers, only what is its own where the others are to come."""
    n, own = plan.devices, plan.pieces // plan.devices
    values = numpy.random.default_rng(seed).integers(1, 1000, (n, plan.pieces))
    if kind in ("all_gather", "all_to_all"):
        mine = numpy.arange(plan.pieces) // own == numpy.arange(n)[:, None]
        return values * mine
    return values


def wanted(kind: str, before: numpy.ndarray, held: numpy.ndarray) -> bool:
    """Whether the devices hold what the collective promises."""
    n, pieces = before.shape
    owner = numpy.arange(pieces) // (pieces // n)
    if kind in ("all_reduce", "all_gather"):
        return bool((held == before.sum(0)).all())
    if kind == "reduce_scatter":
        return bool((held[owner, numpy.arange(pieces)] == before.sum(0)).all())
    if kind == "all_to_all":
        return bool((held[numpy.arange(pieces) % n, numpy.arange(pieces)] == before.sum(0)).all())
    if kind == "broadcast":
        return bool((held == before[0]).all())
    return bool((held[-1] == before[0]).all())


def sizes_of(algorithm: Algorithm) -> Iterator[tuple[int, ...]]:
    """Groups of one, two and three levels on which there is such an algorithm, powers of two or not."""
    for sizes in (
        (2,),
        (3,),
        (4,),
        (5,),
        (7,),
        (8,),
        (12,),
        (2, 3),
        (3, 2),
        (4, 2),
        (2, 8),
        (5, 3),
        (2, 3, 2),
        (4, 2, 2),
    ):
        if algorithm.exists(sizes):
            yield sizes


@pytest.mark.parametrize("algorithm", EVERY, ids=names)
def test_every_device_holds_the_result(algorithm: Algorithm) -> None:
    tried = 0
    for sizes in sizes_of(algorithm):
        for chunks in (1, 3) if algorithm.chunked else (1,):
            plan = schedule(algorithm, sizes, chunks)
            before = terms(algorithm.collective, plan)
            assert wanted(algorithm.collective, before, after(plan, before)), (sizes, chunks)
            tried += 1
    assert tried > 2


Drawn = tuple[tuple[Link, ...], int, int]


@st.composite
def networks(draw: st.DrawFn, *, tame: bool) -> Drawn:
    """One to three levels, and stride and size of the groups.

    Tame: a level alone is slower than the one inside shared, and links are shared by devices of one inner block only.
    """
    counts = draw(st.lists(st.integers(2, 5), min_size=1, max_size=3).filter(lambda x: math.prod(x) <= 30))
    links, inside, latency, bandwidth = [], 1, 1e-6, 1e11
    for count in counts:
        block = inside if tame else inside * count
        shared = draw(st.sampled_from([d for d in range(1, block + 1) if block % d == 0]))
        latency *= draw(st.floats(1.0 if tame else 0.1, 9.0))
        bandwidth *= draw(st.floats(0.02, 1.0 if tame else 9.0))
        start, adds = draw(st.sampled_from([(0.0, None), (4e-5, None), (0.0, 3e11)]))
        link = Link(
            devices=inside * count,
            latency_s=latency,
            bytes_per_s=bandwidth,
            shared_by=shared,
            start_s=start,
            in_network_bytes_per_s=adds,
        )
        links.append(link)
        inside *= count
        bandwidth /= shared if tame else 1
    spans = [(i, j) for j in range(len(counts) + 1) for i in range(j)]
    stride, size = draw(st.sampled_from([(math.prod(counts[:i]), math.prod(counts[i:j])) for i, j in spans]))
    return tuple(links), stride, size


def priced_and_simulated(network: Drawn, count: float, chunks: int) -> Iterator[tuple[str, float, float]]:
    """(algorithm, seconds of the formula, of the simulation) of every algorithm, all groups at a time."""
    links, stride, size = network
    devices = links[-1].devices
    topology = way(links, stride, size, devices)
    assert topology.devices == size
    groups = [[first + i * stride for i in range(size)] for first in range(devices) if first // stride % size == 0]
    sizes = tuple(level.devices for level in topology.levels)
    for kind in ALGORITHMS:
        for candidate in candidates(kind, topology):
            c = chunks if candidate.algorithm.chunked else 1
            simulated = Network(links).seconds(schedule(candidate.algorithm, sizes, c), count, groups)
            yield names(candidate.algorithm), candidate.seconds(count, c), simulated


@settings(deadline=None, max_examples=60)
@given(networks(tame=True), st.floats(0, 1e9), st.sampled_from([1, 3]))
def test_simulated_seconds_equal_the_closed_form(network: Drawn, count: float, chunks: int) -> None:
    for name, priced, simulated in priced_and_simulated(network, count, chunks):
        assert simulated == pytest.approx(priced, rel=1e-9), name


@settings(deadline=None, max_examples=60)
@given(networks(tame=False), st.floats(0, 1e9), st.sampled_from([1, 3]))
def test_on_any_network_the_closed_form_is_no_less_than_what_is_simulated(
    network: Drawn, count: float, chunks: int
) -> None:
    for name, priced, simulated in priced_and_simulated(network, count, chunks):
        if name != "all_to_all pairwise":  # takes the mean of the devices that send out of a block
            assert simulated <= priced * (1 + 1e-9), name


def test_in_two_trees_no_device_sends_or_receives_twice_in_a_step() -> None:
    for n in range(2, 130):
        edges = timetable(n)
        assert len(edges) == 2 * (n - 1)
        assert len({(e.parent, e.step % 2) for e in edges}) == len(edges)
        assert len({(e.child, e.step % 2) for e in edges}) == len(edges)
        assert max(e.step for e in edges) <= 2 * math.ceil(math.log2(n)) + 1
    assert [first_chunk_steps(n) for n in (1, 2, 3, 4, 8, 64)] == [0, 1, 3, 4, 5, 12]


# --- for real ---------------------------------------------------------------------------------------------------------


def carried_out(algorithm: Algorithm, sizes: tuple[int, ...], chunks: int) -> list[list[float]]:
    """This rank's pieces after it sent and received what the schedule says; each piece is 3 numbers."""
    rank, plan = dist.get_rank(), schedule(algorithm, sizes, chunks)
    held = torch.tensor(terms(algorithm.collective, plan)[rank], dtype=torch.float64)
    for step in plan.steps:
        work = [dist.isend(held[list(m.pieces)], m.target) for m in step if m.source == rank]
        for message in (m for m in step if m.target == rank):
            came = torch.empty(len(message.pieces), dtype=torch.float64)
            dist.recv(came, message.source)
            held[list(message.pieces)] = came + message.add * held[list(message.pieces)]
        for sent in work:
            sent.wait()
    return held.tolist()


REAL = [a for a in EVERY if a.outer != "in_network"]  # gloo has no switch that adds


@pytest.mark.parametrize("algorithm", REAL, ids=names)
def test_gloo_ranks_that_follow_a_schedule_get_the_result(ranks: Pool, algorithm: Algorithm) -> None:
    for sizes in [s for s in ((3,), (4,), (2, 2)) if algorithm.exists(s)]:
        plan = schedule(algorithm, sizes, 2 if algorithm.chunked else 1)
        assert all(SWITCH not in (m.source, m.target) for step in plan.steps for m in step)
        held = ranks.run(carried_out, algorithm, sizes, 2 if algorithm.chunked else 1, world=math.prod(sizes))
        before = terms(algorithm.collective, plan)
        assert wanted(algorithm.collective, before, numpy.array(held)), sizes
