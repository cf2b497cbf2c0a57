"""The counter generator: uniform, independent across keys, and the same numbers for every piece."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.counter import MASK32, bits, dropout, uniform
from autopar.random import replay

N = 1 << 20


def numbers(seed: int, step: int, op: int, n: int = N) -> Tensor:
    """Uniform numbers in [0, 1), all 32 bits of them."""
    words = bits(torch.tensor([seed, step]), op, [n], [n], [0])
    return (words.to(torch.int64) & MASK32).double() / 2**32


def chi_square_z(counts: Tensor) -> float:
    """How many standard deviations a chi-square statistic is from its mean."""
    expected, free = counts.sum() / counts.numel(), counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - free) / math.sqrt(2 * free))


def test_uniform_by_chi_square() -> None:
    u = numbers(1, 2, 3)
    assert abs(chi_square_z(torch.histc(u, 4096, 0, 1))) < 4
    assert abs(float(u.mean()) - 0.5) < 4 / math.sqrt(12 * N)


def test_every_bit_is_fair() -> None:
    words = bits(torch.tensor([9, 0]), 1, [N], [N], [0])
    for k in range(32):
        assert abs(float(((words >> k) & 1).double().mean()) - 0.5) * 2 * math.sqrt(N) < 4.5, k


@pytest.mark.parametrize("lag", [1, 2, 3, 8, 64, 1000, 4096])
def test_neighbouring_counters_are_uncorrelated(lag: int) -> None:
    u = numbers(4, 5, 6) - 0.5
    assert abs(float((u[:-lag] * u[lag:]).mean())) * 12 * math.sqrt(N - lag) < 4


def test_pairs_fill_the_square() -> None:
    u = numbers(7, 0, 0)
    cells = (u[0::2] * 64).long() * 64 + (u[1::2] * 64).long()
    assert abs(chi_square_z(torch.bincount(cells, minlength=4096).double())) < 4


@pytest.mark.parametrize(
    "key", [(0, 0, 1), (0, 0, 2), (0, 1, 0), (1, 0, 0), (1 << 32, 0, 0), (0, 1 << 32, 0), (-1, 0, 0)]
)
def test_neighbouring_seeds_steps_and_ops_are_independent(key: tuple[int, int, int]) -> None:
    a, b = numbers(0, 0, 0) - 0.5, numbers(*key) - 0.5
    assert abs(float((a * b).mean())) * 12 * math.sqrt(N) < 4
    cells = ((a + 0.5) * 32).long() * 32 + ((b + 0.5) * 32).long()
    assert abs(chi_square_z(torch.bincount(cells, minlength=1024).double())) < 4


def test_more_than_2_to_the_31_elements_count_on() -> None:
    rng = torch.tensor([5, 6])
    low = bits(rng, 3, [1000], [1000], [0])
    assert torch.equal(low, bits(rng, 3, [1 << 33], [1000], [0]))
    assert (low == bits(rng, 3, [1 << 33], [1000], [1 << 32])).float().mean() < 0.01


def test_a_piece_draws_what_the_whole_draws_there() -> None:
    rng, op = torch.tensor([5, 6]), torch.ops.autopar.dropout
    x = torch.randn(6, 10)
    whole = dropout(x, 0.3, 4, rng)
    assert torch.equal(op(x[2:4], 0.3, 4, rng, [6, 10], [2, 10], [2, 0]), whole[2:4])
    assert torch.equal(op(x[1:4, 3:7], 0.3, 4, rng, [6, 10], [3, 4], [1, 3]), whole[1:4, 3:7])
    inner = x.view(6, 2, 5)[:, :, 1:3].reshape(6, 4)  # the inner factor of the second dim is cut
    want = whole.view(6, 2, 5)[:, :, 1:3].reshape(6, 4)
    assert torch.equal(op(inner, 0.3, 4, rng, [6, 2, 5], [6, 2, 2], [0, 0, 1]), want)
    assert op(x[:0], 0.3, 4, rng, [6, 10], [0, 10], [6, 0]).shape == (0, 10)


def test_dropout_keeps_the_mean_and_its_gradient_is_its_own_mask() -> None:
    x = torch.ones(1000, 100, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.25, 0, torch.tensor([1, 2]))
    assert set(y.unique().tolist()) == {0.0, 1 / 0.75} and abs(float(y.mean()) - 1) < 0.01
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert not dropout(x, 1.0, 0, torch.tensor([1, 2])).any()


def test_uniform_numbers_are_the_same_in_every_dtype() -> None:
    rng = torch.tensor([1, 2])
    assert torch.equal(uniform((3, 4), torch.float32, 5, rng).double(), uniform((3, 4), torch.float64, 5, rng))


def test_replay_counts_ops_and_respects_training() -> None:
    x = torch.ones(64, 64)
    with replay(1, 2):
        a, b, c = F.dropout(x, 0.5), F.dropout(x, 0.5), F.dropout(x, 0.5, training=False)
    with replay(1, 2):
        _, again = torch.nn.Dropout(0.5)(x), torch.nn.Dropout(0.5)(x)
    with replay(1, 3):
        other = F.dropout(x, 0.5)
    assert torch.equal(b, again) and torch.equal(c, x)
    assert not torch.equal(a, b) and not torch.equal(a, other)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_replay_runs_torchs_multihead_attention_without_weights(p: float) -> None:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(6, 3, dropout=p, batch_first=True), torch.randn(2, 5, 6)
    with replay(7, 0):
        without, with_ = (layer(x, x, x, need_weights=need)[0] for need in (False, True))
    assert (p == 0) == torch.allclose(without, with_)
    assert torch.allclose(layer.eval()(x, x, x, need_weights=False)[0], without) == (p == 0)


def test_a_reference_needs_no_part_of_the_compiler() -> None:
    code = (
        "import sys, autopar.random, autopar.double;"
        "bad = [m for m in sys.modules if m.startswith('autopar.') and m.split('.')[1] in"
        " ('capture', 'rules', 'planner', 'passes', 'normalise', 'axes', 'choices')];"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
