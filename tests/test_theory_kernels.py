"""Features, kernels and the package itself: conventions against explicit rotations, and independence of training."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import helpers.theory
from helpers.theory import (
    aligned_carriers,
    carriers_from_weights,
    difference_features,
    features,
    kernel,
    rotary_frequencies,
    weights_from_carriers,
)

finite = st.floats(-5, 5, allow_nan=False)


def test_every_public_name_exists_and_the_list_is_sorted() -> None:
    assert helpers.theory.__all__ == sorted(set(helpers.theory.__all__))
    for name in helpers.theory.__all__:
        assert getattr(helpers.theory, name) is not None


def test_theory_loads_neither_torch_nor_the_training_side() -> None:
    code = (
        "import sys, helpers.theory; own = {m for m in sys.modules if m.startswith('helpers.')};"
        "print('torch' in sys.modules, sorted(m for m in own if not m.startswith(('helpers.theory', 'helpers.valid'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False []"


def test_frequencies_are_the_rotary_ones() -> None:
    assert rotary_frequencies(8, 1e4) == pytest.approx([1, 0.1, 0.01, 0.001], rel=1e-14)
    assert rotary_frequencies(2, 123.0) == pytest.approx([1.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7,), "head_dim=7"),
        ((0,), "head_dim=0"),
        ((8.0,), "head_dim=8.0"),
        ((8, 0.0), "base=0.0"),
        ((8, float("inf")), "base=inf"),
    ],
)
def test_frequencies_name_what_is_wrong(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotary_frequencies(*arguments)


@given(arrays(np.float64, 6, elements=finite), arrays(np.float64, 3, elements=st.floats(0, 3.2)))
def test_the_three_forms_of_the_kernel_agree(weights: np.ndarray, theta: np.ndarray) -> None:
    deltas = np.arange(40)
    carriers = carriers_from_weights(weights)
    values = kernel(carriers, theta, deltas)
    assert values == pytest.approx(features(theta, deltas) @ weights, abs=1e-12)
    rotated = (carriers * np.exp(-1j * np.outer(deltas, theta))).real.sum(axis=1)
    assert values == pytest.approx(rotated, abs=1e-12)
    cosines = (np.abs(carriers) * np.cos(np.outer(deltas, theta) - np.angle(carriers))).sum(axis=1)
    assert values == pytest.approx(cosines, abs=1e-12)
    assert np.array_equal(weights_from_carriers(carriers), weights)


def test_difference_features_are_differences_of_features() -> None:
    theta = rotary_frequencies(32, 100)
    expected = features(theta, 5) - np.delete(features(theta, np.arange(16)), 5, axis=0)
    assert difference_features(theta, 5, 16) == pytest.approx(expected, abs=1e-15)


def test_difference_features_keep_their_digits_at_slow_frequencies() -> None:
    # 1 − cos x = x²/2 to a relative error of x²/12, which a difference of cosines loses at x = 1e-7.
    assert difference_features([1e-7], 0, 2)[0, 0] == pytest.approx(0.5e-14, rel=1e-12)


def test_kernels_take_batches_and_tensors() -> None:
    theta = rotary_frequencies(8)
    rng = np.random.default_rng(0)
    carriers = rng.normal(size=(2, 3, 4)) + 1j * rng.normal(size=(2, 3, 4))
    together = kernel(torch.tensor(carriers), torch.tensor(theta), torch.arange(20))
    assert together.shape == (2, 3, 20)
    assert np.array_equal(together[1, 2], kernel(carriers[1, 2], theta, np.arange(20)))


def test_aligned_carriers_peak_together() -> None:
    theta = rotary_frequencies(8)
    carriers = aligned_carriers([1.0, 2.0, 0.0, 0.5], theta, 7)
    assert kernel(carriers, theta, [7])[0] == pytest.approx(3.5, rel=1e-14)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernel([1.0], [], [0]), "frequencies.shape"),
        (lambda: kernel([1.0], [np.inf], [0]), "frequencies entry=inf"),
        (lambda: kernel([1.0, 2.0], [1.0], [0]), "carriers.shape"),
        (lambda: kernel([np.nan], [1.0], [0]), "carriers entry"),
        (lambda: kernel([1.0], [1.0], 3), "offsets.shape"),
        (lambda: carriers_from_weights([1.0, 2.0, 3.0]), "weights.shape"),
        (lambda: aligned_carriers([-1.0], [1.0], 0), "amplitudes entry=-1.0"),
        (lambda: difference_features([1.0], 4, 4), "offset=4"),
        (lambda: difference_features([1.0], True, 4), "offset=True"),
    ],
)
def test_wrong_input_is_one_line_that_names_it(call, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
