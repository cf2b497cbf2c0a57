"""Published figures of memory, from emitted programs; the whole of them is benchmarks/published_memory.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.mark.parametrize("devices", (1, 4, 64))
def test_model_states_are_those_of_the_zero_paper(devices: int) -> None:
    """2P + 2P + KP, 2P + 2P + KP/N, 2P + (2+K)P/N, (2+2+K)P/N with K = 12, exactly."""
    from published_memory import states

    k, n = 12, devices
    assert [states(level, n).paper_bytes() for level in range(4)] == [
        2 + 2 + k,
        2 + 2 + k / n,
        2 + (2 + k) / n,
        (2 + 2 + k) / n,
    ]


def test_our_recipe_keeps_gradients_in_float32_where_the_paper_has_16_bits() -> None:
    from published_memory import states

    for level, gradients in enumerate((1, 1, 1 / 4, 1 / 4)):
        found = states(level, 4)
        assert found.gradients == gradients
        assert found.bytes - found.paper_bytes() == 2 * gradients


@pytest.mark.parametrize("way", ("no parallelism", "tensor", "tensor and sequence", "tensor, selective", "full"))
def test_activations_of_a_layer_are_those_of_the_formula(way: str) -> None:
    from published_memory import BOUND, SEQUENCE, WAYS, Shape, layer

    shape = Shape("small", h=768, layers=1, a=12, b=2, t=4, p=1, m=1)
    formula = WAYS[way].formula(shape.t, 5 * shape.a * SEQUENCE / shape.h)
    assert layer(shape, way)[0] / shape.unit == pytest.approx(formula, rel=BOUND)


def test_the_figures_of_a_published_model_come_out() -> None:
    from published_memory import BOUND, figure_1_rows, figure_7_rows, read

    lines = [line for line in read("activation_memory.csv") if line["model"] == "22B"]
    rows = [*figure_1_rows(lines), *figure_7_rows(lines)]
    assert len(rows) == 7
    assert all(abs(row.error) <= BOUND for row in rows)
