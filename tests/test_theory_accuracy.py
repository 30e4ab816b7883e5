"""T12: the forced-choice integral against closed forms and quadrature, the law against moments and an exact case."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import softmax
from scipy.stats import binom, norm

from helpers.theory import d_prime, forced_choice_accuracy, linear_accuracy, softmax_accuracy, softmax_d_prime


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 16, 1000, 50_000])
def test_chance_without_a_signal(vocab_size: int) -> None:
    assert forced_choice_accuracy(0.0, vocab_size) == pytest.approx(1 / vocab_size, abs=1e-12)


def test_two_symbols_have_a_closed_form() -> None:
    separation = np.linspace(-6, 8, 57)
    assert forced_choice_accuracy(separation, 2) == pytest.approx(norm.cdf(separation / np.sqrt(2)), abs=1e-12)


@pytest.mark.parametrize("vocab_size", [3, 16, 64, 50_000])
@pytest.mark.parametrize("separation", [-3.0, 0.1, 1.0, 2.5, 4.0, 7.0])
def test_the_integral_agrees_with_adaptive_quadrature(vocab_size: int, separation: float) -> None:
    def integrand(z: float) -> float:
        return norm.pdf(z - separation) * norm.cdf(z) ** (vocab_size - 1)

    expected, _ = quad(integrand, separation - 12, separation + 12, epsabs=1e-13, epsrel=1e-13, limit=500)
    assert forced_choice_accuracy(separation, vocab_size) == pytest.approx(expected, abs=1e-10)


@given(st.floats(-20, 20), st.floats(0, 5), st.integers(2, 200))
def test_accuracy_grows_with_the_signal_and_falls_with_the_alphabet(
    separation: float, more: float, vocab_size: int
) -> None:
    here = forced_choice_accuracy(separation, vocab_size)
    assert 0 <= here <= 1
    assert forced_choice_accuracy(separation + more, vocab_size) >= here - 1e-12
    assert forced_choice_accuracy(separation, vocab_size + 1) <= here + 1e-12


def test_extreme_signals() -> None:
    assert forced_choice_accuracy([np.inf, -np.inf, 60.0], 16) == pytest.approx([1.0, 0.0, 1.0])
    assert forced_choice_accuracy(-np.inf, 1) == pytest.approx(1.0)


def test_the_moments_behind_the_law_are_exact() -> None:
    # Over all sequences: mean b_k, variance 2 Σ b²/V and covariance Σ b²/V of S_y − S_v for v ≠ y.
    vocab_size, offset = 3, 1
    weights = np.array([0.3, 1.1, -0.4, 0.7])
    gaps = []
    for tokens in itertools.product(range(vocab_size), repeat=4):
        scores = np.bincount(tokens, weights=weights, minlength=vocab_size)
        label = tokens[offset]
        gaps.append(scores[label] - np.delete(scores, label))
    noise = (np.delete(weights, offset) ** 2).sum() / vocab_size
    assert np.mean(gaps, axis=0) == pytest.approx([weights[offset]] * 2)
    assert np.cov(np.transpose(gaps), bias=True) == pytest.approx(np.array([[2, 1], [1, 2]]) * noise)
    assert d_prime(weights, offset, vocab_size, [4])[0] == pytest.approx(weights[offset] / np.sqrt(noise))


def test_the_law_is_the_limit_of_many_equal_distractors() -> None:
    # V = 2, m = 2001 distractors of weight 1, target 40: the label wins iff 40 + Σ ± 1 > 0, a binomial tail (no ties).
    scores = np.append(40.0, np.ones(2001))
    exact = binom.sf((2001 - 40) / 2, 2001, 0.5)
    assert linear_accuracy(scores, 0, 2, [2002])[0] == pytest.approx(exact, abs=0.01)
    logits = np.append(np.log(40.0), np.zeros(2001))
    assert softmax_accuracy(logits, 0, 2, [2002]) == pytest.approx(linear_accuracy(scores, 0, 2, [2002]), abs=1e-12)


def test_softmax_weights_and_their_logits_give_one_answer() -> None:
    values = np.random.default_rng(0).normal(size=(2, 40)) * 3
    for length in (8, 40):
        weights = softmax(values[:, :length], axis=-1)
        expected = d_prime(weights, 7, 16, [length])
        assert softmax_d_prime(values, 7, 16, [length]) == pytest.approx(expected, rel=1e-12)
    assert softmax_d_prime(values + 1e4, 7, 16, [40]) == pytest.approx(softmax_d_prime(values, 7, 16, [40]), rel=1e-8)


def test_the_scale_of_the_scores_does_not_matter() -> None:
    scores = np.random.default_rng(1).normal(size=30)
    expected = d_prime(scores, 3, 16, [10, 30])
    for scale in (1e-200, 1e7, 1e200):
        assert d_prime(scale * scores, 3, 16, [10, 30]) == pytest.approx(expected)
    assert d_prime(-scores, 3, 16, [10, 30]) == pytest.approx(-expected)


def test_degenerate_weights_have_an_answer() -> None:
    assert d_prime([2.0], 0, 16, [1]).tolist() == [np.inf]
    assert d_prime([-2.0, 0.0], 0, 16, [1, 2]).tolist() == [-np.inf, -np.inf]
    assert d_prime([0.0, 0.0], 0, 16, [2]).tolist() == [0.0]
    assert softmax_d_prime([2.0], 0, 16, [1]).tolist() == [np.inf]
    assert softmax_accuracy([2.0, -np.inf], 0, 16, [1, 2]).tolist() == pytest.approx([1.0, 1.0])
    assert linear_accuracy(np.zeros(8), 3, 16, [8]) == pytest.approx([1 / 16])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: d_prime(np.ones(4), 1, 0, [4]), "vocab_size=0"),
        (lambda: d_prime(np.ones(4), 1, 16, [1]), "lengths entry=1"),
        (lambda: d_prime(np.ones(4), 4, 16, [4]), "offset=4"),
        (lambda: softmax_d_prime([np.nan], 0, 16, [1]), "kernel_values entry=nan"),
        (lambda: softmax_d_prime(np.ones(4), 1, 2.5, [4]), "vocab_size=2.5"),
        (lambda: forced_choice_accuracy(1.0, 0), "vocab_size=0"),
    ],
)
def test_wrong_input_is_one_line_that_names_it(call, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
