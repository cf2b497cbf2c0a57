"""From what single ops took to what a cluster file says of a device.

In: `Sample`s of one dtype.  Out: `Products`, a `Curve` per kind.  Next: `run.py`.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from autopar.calibrate.probe import Sample
from autopar.curve import Curve
from autopar.device import ANY

PLAIN = ("add", "sub", "mul", "div", "neg", "where", "relu", "threshold_backward", "_to_copy")
"""Kinds that do next to nothing but move their bytes: what is known of all others."""

WIDTH = 3.0  # sizes within this factor become one point of a curve
ROUNDS = 400


@dataclass(frozen=True)
class ProductFit:
    """flop/s of large products, m, n, k at which half of that is left, seconds to launch one, the median error."""

    flops_per_s: float
    half: tuple[float, float, float]
    launch_s: float
    error: float


def products(samples: Sequence[Sample]) -> ProductFit:
    """The least-squares fit of seconds = launch + flops / (rate x m/(m + m') x n/(n + n') x k/(k + k'))."""
    flops = torch.tensor([s.work.flops for s in samples], dtype=torch.float64)
    sizes = torch.tensor([s.work.product[1:] for s in samples if s.work.product], dtype=torch.float64)
    seconds = torch.tensor([s.seconds for s in samples], dtype=torch.float64)
    rate = math.log(float((flops / seconds).quantile(0.9)))
    start = torch.tensor([rate, math.log(1e-6), *[math.log(4.0)] * 3], dtype=torch.float64, requires_grad=True)
    found = torch.optim.LBFGS([start], max_iter=ROUNDS, line_search_fn="strong_wolfe")

    def told() -> torch.Tensor:
        known = start.exp()
        return known[1] + flops / known[0] * ((sizes + known[2:]) / sizes).prod(1)

    def loss() -> torch.Tensor:
        found.zero_grad()
        error = (told() / seconds).log().square().mean()
        error.backward()  # type: ignore[no-untyped-call]
        return error

    found.step(loss)  # type: ignore[no-untyped-call]
    best, launch, m, n, k = (float(x) for x in start.detach().exp())
    error = float((told().detach() / seconds - 1).abs().median())
    return ProductFit(best, (m, n, k), launch, error)


def curves(samples: Iterable[Sample]) -> dict[str, Curve]:
    """A curve for every kind that was met at more than one size, and one for all others."""
    kinds: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        work = sample.work
        if work.product is None or work.pieces:
            point = size_of(sample)
            kinds[work.kind].append(point)
            if work.kind in PLAIN:
                kinds[ANY].append(point)
    return {kind: curve for kind, points in sorted(kinds.items()) if len((curve := joined(points)).root) > 1}


def size_of(sample: Sample) -> tuple[float, float]:
    """Where a sample lies on the curve of its kind: bytes and seconds, or flops and seconds of one piece."""
    work = sample.work
    if work.pieces:
        return max(1.0, work.flops / work.pieces), sample.seconds / work.pieces
    return float(max(1, work.bytes)), sample.seconds


def joined(points: Iterable[tuple[float, float]]) -> Curve:
    """Points of about one size as their middle."""
    groups: list[list[tuple[float, float]]] = []
    for point in sorted(points):
        if groups and point[0] <= WIDTH * groups[-1][0][0]:
            groups[-1].append(point)
        else:
            groups.append([point])
    return Curve(
        tuple((statistics.geometric_mean(x for x, _ in g), statistics.median(s for _, s in g)) for g in groups)
    )
