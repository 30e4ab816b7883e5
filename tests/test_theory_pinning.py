"""T4 and T5: how long the pinned row wins, against order statistics by quadrature."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from helpers.theory import (
    hard_attention_accuracy,
    pinned_half_life,
    pinned_probability,
    row_scores,
    unseen_row_shrinkage,
)


def test_shrinkage_follows_the_update() -> None:
    row = 1.0
    for _ in range(50):
        row -= 0.1 * 0.3 * row
    assert unseen_row_shrinkage(0.1, 0.3, [0, 50]) == pytest.approx([1.0, row], rel=1e-12)
    assert unseen_row_shrinkage(0.1, 0.0, 10**6) == 1.0


def test_scores_are_projections() -> None:
    rows = np.array([[3.0, 4.0], [-4.0, 3.0]])
    assert row_scores(rows, [6.0, 8.0]) == pytest.approx([5.0, 0.0])


@pytest.mark.parametrize("gamma", [-1.0, 0.0, 1.5, 4.0])
@pytest.mark.parametrize("extra", [1, 3, 40])
def test_probability_and_accuracy_agree_with_order_statistics(gamma: float, extra: int) -> None:
    sigma, train_length, offset, vocab_size = 0.5, 16, 2, 16

    # Density of the largest of `extra` fresh scores.
    def largest(z: float) -> float:
        return extra * norm.pdf(z, scale=sigma) * norm.cdf(z, scale=sigma) ** (extra - 1)

    lost, _ = quad(largest, gamma, max(gamma, 0) + 12 * sigma, epsabs=1e-13, limit=300)
    length = train_length + extra
    assert pinned_probability(gamma, sigma, train_length, [length])[0] == pytest.approx(1 - lost, abs=1e-9)
    hit = lost / extra if extra > offset else 0.0
    expected = hit + (1 - hit) / vocab_size
    found = hard_attention_accuracy(gamma, sigma, offset, train_length, vocab_size, [length])
    assert found[0] == pytest.approx(expected, abs=1e-9)


def test_the_edge_of_the_training_range() -> None:
    assert pinned_probability(0.3, 1.0, 16, [16]).tolist() == [1.0]
    lengths = np.arange(16, 24)
    accuracy = hard_attention_accuracy(-40.0, 1.0, 5, 16, 10, lengths)
    # In range exact; chance while the target row is an old one; then one fresh row of n − L is the target.
    assert accuracy == pytest.approx([1.0] + [0.1] * 5 + [0.1 + 0.9 / 6, 0.1 + 0.9 / 7])


@given(st.floats(-3, 8), st.floats(0.1, 3))
def test_half_life_is_where_the_probability_is_one_half(gamma: float, sigma: float) -> None:
    life = float(pinned_half_life(gamma, sigma))
    assert life > 0
    if np.isfinite(life):
        assert life * norm.logcdf(gamma / sigma) == pytest.approx(np.log(0.5), rel=1e-9)


def test_extremes() -> None:
    assert pinned_half_life([np.inf, 60.0], 1.0).tolist() == [np.inf, np.inf]
    assert pinned_half_life(-100.0, 1.0) < 1e-3
    # 8 standard deviations: Φ(8)^n ≈ 1 − 6.2e-16 n, lost by a power of a rounded Φ.
    assert -np.log(pinned_probability(8.0, 1.0, 16, [10**9 + 16])[0]) == pytest.approx(norm.sf(8.0) * 1e9, rel=1e-6)
    # Rows that start at zero: the pinned row wins iff its score is positive.
    assert pinned_probability([1.0, -1.0, 0.0], 0.0, 16, [16, 17]).tolist() == [[1, 1], [1, 0], [1, 0]]


def test_batches() -> None:
    table = pinned_probability(np.zeros((2, 3)), 1.0, 16, [16, 17, 18])
    assert table.shape == (2, 3, 3)
    assert table[1, 2] == pytest.approx([1.0, 0.5, 0.25])
    assert hard_attention_accuracy(np.zeros(2), 1.0, 0, 4, 2, [5, 6]).shape == (2, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pinned_probability(1.0, -1.0, 16, [17]), "sigma=-1.0"),
        (lambda: pinned_probability(1.0, 1.0, 16, [15]), "lengths entry=15"),
        (lambda: pinned_half_life(1.0, float("nan")), "sigma=nan"),
        (lambda: row_scores(np.ones((2, 2)), [0.0, 0.0]), "norm of direction=0.0"),
        (lambda: row_scores(np.ones((2, 2)), np.ones((2, 2))), "direction.shape"),
        (lambda: hard_attention_accuracy(1.0, 1.0, 16, 16, 16, [17]), "offset=16"),
        (lambda: hard_attention_accuracy(1.0, 1.0, 3, 16, 0, [17]), "vocab_size=0"),
        (lambda: unseen_row_shrinkage(-0.1, 0.1, 3), "step_size=-0.1"),
    ],
)
def test_wrong_input_is_one_line_that_names_it(call, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
