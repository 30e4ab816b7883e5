"""T14–T16: the linear head's loss against enumeration, its path against a descent loop, its limit against algebra."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from helpers.theory import (
    carriers_from_weights,
    condition_number,
    d_prime,
    expected_linear_loss,
    features,
    gradient_descent_path,
    kernel,
    largest_stable_step,
    linear_accuracy,
    linear_design,
    linear_target,
    min_norm_interpolant,
    rotary_frequencies,
    token_gram_root,
)


def enumerated_loss(scores: np.ndarray, offset: int, vocab_size: int) -> float:
    """Mean squared error over every sequence, each as likely as the next."""
    losses = []
    for tokens in itertools.product(range(vocab_size), repeat=len(scores)):
        output = np.bincount(tokens, weights=scores, minlength=vocab_size)
        output[tokens[offset]] -= 1
        losses.append(output @ output)
    return float(np.mean(losses))


@settings(deadline=None)
@given(arrays(np.float64, st.integers(1, 5), elements=st.floats(-3, 3)), st.integers(1, 4), st.data())
def test_expected_loss_is_the_mean_over_all_sequences(scores: np.ndarray, vocab_size: int, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, scores.size - 1))
    expected = enumerated_loss(scores, offset, vocab_size)
    assert expected_linear_loss(scores, offset, vocab_size) == pytest.approx(expected, abs=1e-10)


@given(arrays(np.float64, 8, elements=st.floats(-5, 5)), st.integers(1, 20), st.integers(1, 12))
def test_the_loss_is_the_square_of_the_design(weights: np.ndarray, vocab_size: int, train_length: int) -> None:
    theta = rotary_frequencies(8, 100)
    offset = train_length // 2
    residual = linear_design(theta, train_length, vocab_size) @ weights - linear_target(
        offset, train_length, vocab_size
    )
    scores = features(theta, np.arange(train_length)) @ weights
    assert residual @ residual == pytest.approx(expected_linear_loss(scores, offset, vocab_size), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("vocab_size", [1, 2, 16])
def test_the_root_squares_to_the_token_gram_matrix(vocab_size: int) -> None:
    root = token_gram_root(6, vocab_size)
    gram = (1 - 1 / vocab_size) * np.eye(6) + np.ones((6, 6)) / vocab_size
    assert root @ root == pytest.approx(gram, abs=1e-14)
    assert np.array_equal(root, root.T)


def descent(theta: np.ndarray, offset: int, train_length: int, vocab_size: int, step: float, count: int) -> np.ndarray:
    """Plain gradient descent on half of T14, its gradient written out in f."""
    phi = features(theta, np.arange(train_length))
    weights = np.zeros(phi.shape[1])
    for _ in range(count):
        error = phi @ weights
        error[offset] -= 1
        weights -= step * phi.T @ ((1 - 1 / vocab_size) * error + error.sum() / vocab_size)
    return weights


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    "theta", [rotary_frequencies(32, 1e4), rotary_frequencies(64, 100), np.linspace(0.1, 3.0, 16)], ids=str
)
def test_the_path_is_the_one_of_gradient_descent(theta: np.ndarray, share: float) -> None:
    # At 0.9 of the largest stable step the fastest direction overshoots: its factor 1 − ησ² is −0.8.
    step = share * largest_stable_step(theta, 16, 16)
    counts = [0, 1, 2, 3, 50, 3000]
    path = gradient_descent_path(theta, 5, 16, 16, step, counts)
    for count, weights in zip(counts, path, strict=True):
        assert weights == pytest.approx(descent(theta, 5, 16, 16, step, count), abs=1e-8)


def test_the_gradient_is_the_one_of_the_loss() -> None:
    theta = rotary_frequencies(8, 100)
    phi = features(theta, np.arange(6))
    point = np.random.default_rng(0).normal(size=8)
    numeric = [
        (expected_linear_loss(phi @ (point + e), 2, 5) - expected_linear_loss(phi @ (point - e), 2, 5)) / 4e-6
        for e in 1e-6 * np.eye(8)
    ]
    design, target = linear_design(theta, 6, 5), linear_target(2, 6, 5)
    assert design.T @ (design @ point - target) == pytest.approx(numeric, abs=1e-7)


def test_the_path_ends_at_the_interpolant() -> None:
    theta = np.linspace(0.1, 3.0, 16)
    step = largest_stable_step(theta, 16, 16) / 2
    weights = gradient_descent_path(theta, 5, 16, 16, step, [10**15])[0]
    limit = min_norm_interpolant(theta, 5, 16, 16)
    assert weights == pytest.approx(limit.weights, abs=1e-9)
    assert limit.loss < 1e-20
    assert limit.rank == 16


def test_huge_step_counts_stay_finite_in_an_ill_conditioned_design() -> None:
    theta = rotary_frequencies(32, 1e4)
    step = largest_stable_step(theta, 16, 16) / 2
    path = gradient_descent_path(theta, 5, 16, 16, step, [10**3, 10**9, 10**15])
    losses = expected_linear_loss(path @ features(theta, np.arange(16)).T, 5, 16)
    assert np.isfinite(path).all()
    assert (np.diff(losses) < 0).all()
    assert (np.diff(np.linalg.norm(path, axis=1)) > 0).all()


@pytest.mark.parametrize(("head_dim", "base"), [(64, 100.0), (64, 1e4)])
def test_the_interpolant_fits_and_lies_in_the_row_space(head_dim: int, base: float) -> None:
    # Both together characterise the minimum-norm solution; double precision allows for condition × 1e-16.
    theta = rotary_frequencies(head_dim, base)
    phi = features(theta, np.arange(16))
    limit = min_norm_interpolant(theta, 5, 16, 16)
    slack = condition_number(phi) * 1e-15
    assert phi @ limit.weights == pytest.approx(np.eye(16)[5], abs=100 * slack)
    basis = np.linalg.qr(phi.T)[0]
    outside = limit.weights - basis @ (basis.T @ limit.weights)
    assert np.linalg.norm(outside) < slack * np.linalg.norm(limit.weights)
    assert limit.loss < 1e-6


def test_directions_at_rounding_level_are_dropped_and_counted() -> None:
    limit = min_norm_interpolant(rotary_frequencies(32, 1e4), 5, 16, 16)
    assert limit.rank < 16
    assert limit.loss > 0.01
    assert limit.carriers.shape == (16,)
    # Repeated frequencies add nothing to the rank; the weights are shared evenly.
    double = min_norm_interpolant([1.0, 1.0, 0.5], 1, 3, 4)
    assert double.rank == 3
    assert double.carriers[0] == pytest.approx(double.carriers[1], abs=1e-10)
    assert double.loss < 1e-20


def test_one_position_is_interpolated_at_once() -> None:
    limit = min_norm_interpolant([1.0], 0, 1, 16)
    assert limit.weights == pytest.approx([1.0, 0.0])
    assert expected_linear_loss([0.0], 0, 16) == pytest.approx(1.0)


def test_conditioning_and_what_it_does_out_of_range() -> None:
    # T16: five orders of magnitude and more at base 100, d = 64; the limit is exact in range and chance beyond.
    theta = rotary_frequencies(64, 100)
    assert 1e9 < condition_number(linear_design(theta, 16, 16)) < 1e11
    scores = kernel(min_norm_interpolant(theta, 5, 16, 16).carriers, theta, np.arange(64))
    assert np.abs(scores[24:]).max() > 1e6
    accuracy = linear_accuracy(scores, 5, 16, [16, 24, 64])
    assert accuracy[0] > 0.999
    assert accuracy[1:] == pytest.approx([1 / 16, 1 / 16], abs=0.01)


def test_a_well_conditioned_head_still_decays_as_the_root_of_length() -> None:
    theta = np.random.default_rng(0).uniform(0, np.pi, size=64)
    assert condition_number(linear_design(theta, 16, 16)) < 100
    scores = kernel(min_norm_interpolant(theta, 5, 16, 16).carriers, theta, np.arange(16_384))
    assert np.abs(scores[16:]).max() < 1
    near, far = d_prime(scores, 5, 16, [1024, 16_384])
    assert near / far == pytest.approx(4.0, rel=0.1)


def test_condition_number_of_known_matrices() -> None:
    assert condition_number(np.diag([4.0, 2.0])) == pytest.approx(2.0)
    assert condition_number(np.diag([4.0, 0.0])) == np.inf


def test_the_largest_stable_step_separates_descent_from_divergence() -> None:
    theta = rotary_frequencies(8)
    limit = largest_stable_step(theta, 8, 4)
    assert np.linalg.norm(descent(theta, 2, 8, 4, 1.01 * limit, 5000)) > 1e10
    assert np.linalg.norm(descent(theta, 2, 8, 4, 0.99 * limit, 5000)) < 1e3


def test_the_path_in_scores_matches_the_kernel() -> None:
    theta = rotary_frequencies(16, 100)
    weights = gradient_descent_path(theta, 3, 8, 16, 1e-3, [100])[0]
    expected = features(theta, np.arange(20)) @ weights
    assert kernel(carriers_from_weights(weights), theta, np.arange(20)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_linear_loss(np.ones(4), 4, 16), "offset=4"),
        (lambda: expected_linear_loss(np.ones(4), 1, 0), "vocab_size=0"),
        (lambda: linear_design([1.0], 0, 16), "train_length=0"),
        (lambda: min_norm_interpolant([1.0], 3, 3, 16), "offset=3"),
        (lambda: min_norm_interpolant([1.0], 0, 3, 16, relative_cutoff=-1.0), "relative_cutoff=-1.0"),
        (lambda: gradient_descent_path([1.0], 0, 3, 16, 0.0, [1]), "step_size=0.0"),
        (lambda: gradient_descent_path([1.0], 0, 3, 16, 100.0, [1]), "descent diverges"),
        (lambda: gradient_descent_path([1.0], 0, 3, 16, 0.1, [-1]), "steps entry=-1"),
        (lambda: gradient_descent_path([1.0], 0, 3, 16, 0.1, [1.5]), "steps="),
    ],
)
def test_wrong_input_is_one_line_that_names_it(call, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
