"""Carriers of a head against explicit rotary attention; alignment, participation, rank and fits against algebra."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from helpers.theory import (
    active_carriers,
    active_count,
    aligned_carriers,
    alignment,
    carrier_table,
    direction_cosine,
    fit_carriers,
    head_carriers,
    kernel,
    logit_matrix,
    logit_rank,
    merge_repeated,
    participation_ratio,
    peak_offset,
    rank_bound,
    rotary_frequencies,
    weights_from_carriers,
)


def random_carriers(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape) + 1j * rng.normal(size=shape)


def test_head_carriers_give_the_logits_of_rotated_queries_and_keys() -> None:
    theta = rotary_frequencies(8)
    rng = np.random.default_rng(1)
    query, key = rng.normal(size=(4, 2)), rng.normal(size=(4, 2))

    def turned(pairs: np.ndarray, position: int) -> np.ndarray:
        cos, sin = np.cos(position * theta), np.sin(position * theta)
        return np.stack([pairs[:, 0] * cos - pairs[:, 1] * sin, pairs[:, 0] * sin + pairs[:, 1] * cos], axis=1)

    carriers = head_carriers(query[:, 0] + 1j * query[:, 1], key[:, 0] + 1j * key[:, 1])
    logits = [(turned(query, 30) * turned(key, 30 - delta)).sum() / np.sqrt(8) for delta in range(20)]
    assert kernel(carriers, theta, np.arange(20)) == pytest.approx(logits, abs=1e-12)


def test_head_carriers_take_tensors_and_batches() -> None:
    queries, keys = random_carriers(3, 2, 4), random_carriers(3, 2, 4, seed=1)
    assert np.array_equal(head_carriers(torch.tensor(queries), torch.tensor(keys)), head_carriers(queries, keys))
    assert head_carriers(queries, keys).shape == (3, 2, 4)
    with pytest.raises(ValueError, match=r"keys\.shape"):
        head_carriers(queries, keys[0])
    with pytest.raises(ValueError, match=r"queries\.shape"):
        head_carriers([], [])


def test_a_fit_finds_the_carriers_and_the_constant() -> None:
    theta = rotary_frequencies(8, 100)
    carriers = random_carriers(4)
    deltas = np.arange(60)
    fit = fit_carriers(kernel(carriers, theta, deltas) + 2.5, theta, deltas, intercept=True)
    assert fit.carriers == pytest.approx(carriers, abs=1e-9)
    assert fit.intercept == pytest.approx(2.5, abs=1e-9)
    assert fit.residual < 1e-10
    assert fit.explained == pytest.approx(1.0)
    assert fit.rank == 9


def test_a_weighted_fit_solves_the_normal_equations() -> None:
    theta = [1.0, 0.3]
    rng = np.random.default_rng(2)
    deltas, values, weights = np.arange(30), rng.normal(size=30), rng.uniform(size=30)
    fit = fit_carriers(values, theta, deltas, sample_weights=weights)
    design = np.concatenate([np.cos(np.outer(deltas, theta)), np.sin(np.outer(deltas, theta))], axis=1)
    expected = np.linalg.solve(design.T * weights @ design, design.T * weights @ values)
    assert weights_from_carriers(fit.carriers) == pytest.approx(expected, abs=1e-10)
    misfit = (values - design @ expected) ** 2
    assert fit.residual == pytest.approx(np.sqrt(weights @ misfit / weights.sum()))


def test_a_fit_without_enough_information_is_the_smallest_and_says_so() -> None:
    # Repeated frequencies: the sum is known, its split is not. θ = 0: the sine says nothing.
    deltas = np.arange(20)
    fit = fit_carriers(kernel([2.0 + 1j], [1.0], deltas), [1.0, 1.0, 0.0], deltas)
    assert fit.carriers == pytest.approx([1 + 0.5j, 1 + 0.5j, 0.0], abs=1e-10)
    assert fit.rank == 3
    constant = fit_carriers(np.zeros(5), [1.0], np.arange(5))
    assert (constant.explained, constant.residual) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit_carriers([1.0, 2.0], [1.0], [0]), "kernel_values.shape"),
        (lambda: fit_carriers([], [1.0], []), "offsets.shape"),
        (lambda: fit_carriers([1.0], [1.0], [0], sample_weights=[-1.0]), "sample_weights entry=-1.0"),
        (lambda: fit_carriers([1.0], [1.0], [0], sample_weights=[0.0]), "sum of sample_weights"),
        (lambda: fit_carriers([1.0], [1.0], [0], sample_weights=[1.0, 1.0]), "sample_weights.shape"),
        (lambda: active_carriers([1.0], 1.0), "threshold=1.0"),
        (lambda: carrier_table([[1.0]], [1.0], 0), "carriers.shape"),
        (lambda: alignment([1.0], [1.0], -1), "offset=-1"),
        (lambda: logit_matrix([1.0], [1.0], 0), "length=0"),
    ],
)
def test_wrong_input_is_one_line_that_names_it(call, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_merging_keeps_the_kernel() -> None:
    carriers, theta = random_carriers(2, 4), np.array([0.5, 1.0, 0.5, 0.1])
    merged, distinct = merge_repeated(carriers, theta)
    assert distinct.tolist() == [1.0, 0.5, 0.1]
    assert kernel(merged, distinct, np.arange(30)) == pytest.approx(kernel(carriers, theta, np.arange(30)), abs=1e-12)


@given(arrays(np.float64, 4, elements=st.integers(0, 1000)), st.integers(0, 30))
def test_alignment_is_one_exactly_for_aligned_phases(amplitudes: np.ndarray, offset: int) -> None:
    theta = rotary_frequencies(8, 100)
    value = alignment(aligned_carriers(amplitudes, theta, offset), theta, offset)
    if amplitudes.any():
        assert value == pytest.approx(1.0, abs=1e-12)
    else:
        assert np.isnan(value)


@given(arrays(np.float64, 8, elements=st.integers(-500, 500)), st.integers(0, 30))
def test_alignment_never_exceeds_one_and_falls_with_the_phase_errors(weights: np.ndarray, offset: int) -> None:
    theta = rotary_frequencies(8, 100)
    carriers = weights[:4] + 1j * weights[4:]
    if not weights.any():
        return
    value = float(alignment(carriers, theta, offset))
    assert value <= 1 + 1e-12
    table = carrier_table(carriers, theta, offset)
    assert value == pytest.approx((table["share"] * np.cos(table["phase_error"])).sum(), abs=1e-9)


@pytest.mark.parametrize(
    ("amplitudes", "expected"),
    [([1, 1, 1, 1], 4.0), ([3, 0, 0, 0], 1.0), ([2, 1], 9 / 5), ([0, 0], 0.0), ([1e-200, 1e-200], 2.0)],
)
def test_participation_ratio(amplitudes: list[float], expected: float) -> None:
    assert participation_ratio(amplitudes) == pytest.approx(expected)


def test_active_carriers_are_relative_to_the_largest() -> None:
    assert active_carriers([1.0, 1e-2, 1e-4j, 0.0]).tolist() == [True, True, False, False]
    assert active_count([[1.0, 1e-2], [0.0, 0.0]]).tolist() == [2, 0]
    assert active_count([1.0, 1e-4], threshold=0.0) == 2


def test_the_table_of_a_head() -> None:
    table = carrier_table([2j, 0.0], [np.pi / 2, 0.0], 1)
    assert table["period"].tolist() == [4.0, np.inf]
    assert table["amplitude"].tolist() == [2.0, 0.0]
    assert table["share"].tolist() == [1.0, 0.0]
    assert table["phase"][0] == pytest.approx(np.pi / 2)
    assert table["phase_error"][0] == pytest.approx(0.0)
    assert table["active"].tolist() == [True, False]
    assert carrier_table([0.0], [1.0], 0)["share"].tolist() == [0.0]


def test_direction_cosine() -> None:
    carriers = random_carriers(5, 4)
    assert direction_cosine(carriers, 3 * carriers) == pytest.approx(np.ones(5))
    assert direction_cosine(carriers, 1j * carriers) == pytest.approx(np.zeros(5), abs=1e-12)
    assert np.isnan(direction_cosine([0.0], [1.0]))


def test_the_logit_matrix_depends_on_the_difference_alone() -> None:
    theta = rotary_frequencies(8)
    carriers = random_carriers(2, 4)
    matrix = logit_matrix(carriers, theta, 7)
    for i, j in np.ndindex(7, 7):
        assert matrix[:, i, j] == pytest.approx(kernel(carriers, theta, [i - j])[:, 0], abs=1e-12)


@settings(deadline=None)
@given(
    arrays(np.float64, (2, 5), elements=st.integers(-300, 300)),
    arrays(np.float64, 5, elements=st.floats(0, 3.14)),
    st.integers(1, 40),
)
def test_rank_is_at_most_twice_the_active_carriers(weights: np.ndarray, theta: np.ndarray, length: int) -> None:
    carriers = weights[0] + 1j * weights[1]
    assert logit_rank(carriers, theta, length) <= min(rank_bound(carriers), length)


def test_rank_reaches_its_bound_and_stays_there() -> None:
    theta = np.array([1.0, 2.0, 0.5])
    carriers = np.array([1.0, 2j, 0.0])
    for length in (4, 16, 64):
        assert logit_rank(carriers, theta, length) == rank_bound(carriers) == 4
    assert logit_rank([0.0], [1.0], 8) == rank_bound([0.0]) == 0
    assert logit_rank([1.0], [0.0], 8) == 1


def test_peak_offset() -> None:
    theta = rotary_frequencies(32)
    assert peak_offset(aligned_carriers(np.ones(16), theta, 7), theta, 40) == 7
    assert peak_offset(np.zeros((2, 1)), [1.0], 5).tolist() == [0, 0]
