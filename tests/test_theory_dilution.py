"""T10 and T11: the dilution identity against a direct softmax, the Bessel rate against long sums and the regime."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.integrate import quad
from scipy.special import softmax

from helpers.theory import (
    aligned_carriers,
    aligned_rate,
    bessel_rate,
    diluted_weight,
    dilution_regime,
    distractor_log_odds,
    empirical_rate,
    group_sparse_rule,
    half_length,
    kernel,
    log_bessel_rate,
    rotary_frequencies,
    target_weight,
    turns,
)

logits = arrays(np.float64, st.integers(1, 30), elements=st.floats(-50, 50))


@given(logits, st.data())
def test_target_weight_is_the_softmax_at_every_length(values: np.ndarray, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, values.size - 1))
    lengths = np.arange(offset + 1, values.size + 1)
    expected = [softmax(values[:n])[offset] for n in lengths]
    assert target_weight(values, offset, lengths) == pytest.approx(expected, abs=1e-12, rel=1e-9)


@given(logits, st.floats(-1e6, 1e6), st.data())
def test_a_constant_changes_nothing_and_length_only_dilutes(
    values: np.ndarray, constant: float, data: st.DataObject
) -> None:
    offset = data.draw(st.integers(0, values.size - 1))
    lengths = np.arange(offset + 1, values.size + 1)
    weights = target_weight(values, offset, lengths)
    assert target_weight(values + constant, offset, lengths) == pytest.approx(weights, abs=1e-8)
    assert (np.diff(weights) <= 1e-15).all()


def test_old_odds_are_reproduced_verbatim() -> None:
    # T2: a_δ / a_δ′ is the same at every length that has both.
    values = np.random.default_rng(0).normal(size=50)
    lengths = np.arange(8, 51)
    ratio = target_weight(values, 3, lengths) / target_weight(values, 7, lengths)
    assert ratio == pytest.approx(np.full(43, np.exp(values[3] - values[7])), rel=1e-12)


def test_large_margins_lose_no_digits() -> None:
    # 1 − a = m e^{−z} / (1 + m e^{−z}), far below what 1 − a could resolve.
    values = np.append(np.zeros(9), 800.0)
    assert distractor_log_odds(values, 9, [10])[0] == pytest.approx(np.log(9) - 800, rel=1e-14)
    assert target_weight(values, 9, [10])[0] == 1.0
    assert target_weight(-values, 9, [10])[0] == pytest.approx(np.exp(-800) / 9)


def test_edges_of_the_identity() -> None:
    assert target_weight([3.0], 0, [1]).tolist() == [1.0]
    assert distractor_log_odds([3.0], 0, [1]).tolist() == [-np.inf]
    assert target_weight(np.zeros(8), 2, range(3, 9)) == pytest.approx(1 / np.arange(3, 9))
    batch = np.random.default_rng(0).normal(size=(2, 3, 10))
    assert target_weight(batch, 4, [6, 10]).shape == (2, 3, 2)
    assert target_weight(batch, 4, [6, 10])[1, 2] == pytest.approx(target_weight(batch[1, 2], 4, [6, 10]))
    assert target_weight(batch, 4, []).shape == (2, 3, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: target_weight(np.ones(8), 3, [3]), "lengths entry=3"),
        (lambda: target_weight(np.ones(8), 3, [9]), "lengths entry=9"),
        (lambda: target_weight(np.ones(8), 3, [4.0]), "lengths="),
        (lambda: target_weight(np.ones(8), 8, [8]), "offset=8"),
        (lambda: target_weight([1.0, np.nan], 0, [1]), "kernel_values entry=nan"),
        (lambda: target_weight([], 0, [1]), "kernel_values.shape"),
        (lambda: half_length(np.ones((2, 2)), 0), "kernel_values.shape"),
        (lambda: bessel_rate([1.0], [1.0], 0, turned=[True, False]), "turned.shape"),
        (lambda: dilution_regime([[1.0]], [1.0], 8), "carriers.shape"),
        (lambda: dilution_regime([1.0], [1.0], 0), "length=0"),
        (lambda: dilution_regime([1.0], [1.0], 8, min_turns=-1.0), "min_turns=-1.0"),
        (lambda: turns([1.0], 0), "length=0"),
    ],
)
def test_wrong_input_is_one_line_that_names_it(call, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_half_length_is_the_first_length_at_one_half() -> None:
    # Constant distractors at margin z: a = 1 / (1 + (n − 1) e^{−z}), so n − 1 ≥ e^z.
    values = np.zeros(1000)
    values[4] = 5.0
    assert half_length(values, 4) == int(np.ceil(np.exp(5.0))) + 1
    assert half_length(values[:100], 4) is None
    assert half_length([0.0, 0.0, -1.0], 2) == 3
    assert half_length([1.0], 0) is None


@pytest.mark.parametrize("amplitude", [1e-3, 1.0, 30.0])
def test_one_carrier_averages_to_the_bessel_function(amplitude: float) -> None:
    # ρ = e^{−f(k)} (1/2π) ∫ e^{|c| cos x} dx.
    carriers = aligned_carriers([amplitude], [1.0], 3)
    integral, _ = quad(lambda x: np.exp(amplitude * (np.cos(x) - 1)), -np.pi, np.pi, points=[0.0], epsabs=1e-14)
    assert bessel_rate(carriers, [1.0], 3) == pytest.approx(integral / (2 * np.pi), rel=1e-10)
    values = kernel(carriers, [1.0], np.arange(200_000))
    assert empirical_rate(values, 3, [200_000])[0] == pytest.approx(integral / (2 * np.pi), rel=1e-3)


def test_the_rate_does_not_overflow_and_tends_to_its_aligned_form() -> None:
    theta = rotary_frequencies(8)
    carriers = aligned_carriers([1e5, 2e5, 3e5, 1e4], theta, 5)
    assert bessel_rate(carriers, theta, 5) == pytest.approx(float(aligned_rate(carriers)), rel=1e-4)
    assert log_bessel_rate(-carriers, theta, 5) > 1e5
    assert aligned_rate(np.zeros(3)) == 1.0
    assert aligned_rate([[1.0], [4.0]])[0] / aligned_rate([[1.0], [4.0]])[1] == pytest.approx(2.0)


def test_zero_amplitude_dilutes_like_uniform_attention() -> None:
    assert bessel_rate([0.0, 0.0], [1.0, 0.1], 3) == 1.0
    assert empirical_rate(np.zeros(64), 3, [64]) == pytest.approx([1.0])
    regime = dilution_regime([0.0, 0.0], [1.0, 0.1], 64)
    assert regime.holds(1e-9)
    assert not regime.active.any()


def test_the_predicted_weight() -> None:
    assert diluted_weight([0.1, 0.0], [10, 30]) == pytest.approx(np.array([[0.5, 0.25], [1.0, 1.0]]))


# The three figures were measured once by an independent program, and are repeated by the closed form.
@pytest.mark.parametrize(("scale", "rate"), [(5, 0.03583), (10, 0.01704), (20, 0.00836)])
def test_the_rate_of_the_group_sparse_rule(scale: int, rate: float) -> None:
    theta = rotary_frequencies(32)
    carriers = scale * group_sparse_rule(theta, 5, 16).carriers
    assert bessel_rate(carriers, theta, 5) == pytest.approx(rate, abs=6e-6)
    values = kernel(carriers, theta, np.arange(1_000_000))
    short, long = empirical_rate(values, 5, [4096, 1_000_000])
    assert long == pytest.approx(rate, abs=6e-6)
    assert short == pytest.approx(rate, rel=0.02)


GRID = [(16, 5, 32, 1e4), (16, 3, 32, 1e4), (16, 5, 32, 100.0), (32, 7, 64, 1e4), (16, 5, 16, 1e4), (16, 3, 8, 1e4)]


@pytest.mark.parametrize(("train_length", "offset", "head_dim", "base"), GRID)
def test_the_rate_is_right_wherever_its_regime_holds(
    train_length: int, offset: int, head_dim: int, base: float
) -> None:
    theta = rotary_frequencies(head_dim, base)
    rule = group_sparse_rule(theta, offset, train_length).carriers
    lengths = [64, 512, 4096, 32_768, 131_072]
    held = 0
    for scale in (2.0, 5.0, 10.0):
        measured = empirical_rate(kernel(scale * rule, theta, np.arange(lengths[-1])), offset, lengths)
        error = measured / bessel_rate(scale * rule, theta, offset) - 1
        for n, e in zip(lengths, error, strict=True):
            regime = dilution_regime(scale * rule, theta, n)
            assert abs(e) <= regime.error_bound + 1e-9
            assert e == pytest.approx(regime.predicted_error, abs=regime.tail + 1e-7)
            if regime.holds():
                held += 1
                assert abs(e) <= 0.02
    assert held >= 3


def test_a_slow_beat_breaks_the_rate_though_every_carrier_has_turned() -> None:
    # At base 100, θ_1 = 0.7499 is ¾ of θ_0 to within 1.4e-4: 3 θ_0 − 4 θ_1 takes 14,849 tokens to turn once.
    theta = rotary_frequencies(32, 100)
    carriers = 20 * group_sparse_rule(theta, 5, 16).carriers
    regime = dilution_regime(carriers, theta, 4096)
    assert regime.turns[regime.active].min() > 300
    assert regime.turned[regime.active].all()
    assert not regime.holds()
    assert np.abs(regime.slowest_beat[:3]).tolist() == [3, 4, 0]
    assert regime.beat_turns == pytest.approx(4096 * abs(3 - 4 * theta[1]) / (2 * np.pi), rel=1e-6)
    measured = empirical_rate(kernel(carriers, theta, np.arange(4096)), 5, [4096])[0]
    assert measured / bessel_rate(carriers, theta, 5) < 0.75


def test_a_rational_frequency_never_averages_out() -> None:
    # θ = 2π/4: the mean over whole periods is (e^A + 2 + e^{−A})/4, not I₀(A), however long.
    amplitude = 2.0
    carriers = aligned_carriers([amplitude], [np.pi / 2], 1)
    mean = (np.exp(amplitude) + 2 + np.exp(-amplitude)) / 4
    for length in (400, 40_000):
        regime = dilution_regime(carriers, [np.pi / 2], length)
        assert regime.predicted_error == pytest.approx(mean / np.i0(amplitude) - 1, rel=1e-6)
        assert abs(regime.slowest_beat[0]) == 4


def test_carriers_that_have_not_turned_do_not_count() -> None:
    theta = np.array([1.0, 1e-6])
    carriers = aligned_carriers([6.0, 40.0], theta, 5)
    length = 4096
    turned = dilution_regime(carriers, theta, length).turned
    assert turned.tolist() == [True, False]
    measured = empirical_rate(kernel(carriers, theta, np.arange(length)), 5, [length])[0]
    assert measured == pytest.approx(float(bessel_rate(carriers, theta, 5, turned)), rel=0.01)
    assert measured > 10 * bessel_rate(carriers, theta, 5)
    assert turns(theta, length) == pytest.approx(length * theta / (2 * np.pi))


def test_the_bound_survives_when_beats_are_left_out() -> None:
    theta = rotary_frequencies(32)
    carriers = 10 * group_sparse_rule(theta, 3, 16).carriers
    measured = empirical_rate(kernel(carriers, theta, np.arange(4096)), 3, [4096])[0]
    error = measured / bessel_rate(carriers, theta, 3) - 1
    few = dilution_regime(carriers, theta, 4096, max_terms=50)
    assert few.tail > 1
    assert abs(error - few.predicted_error) <= few.tail
    assert abs(error) <= few.error_bound
