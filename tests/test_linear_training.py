"""Trained linear heads against T14 to T16: their loss, the exact path, what they do beyond the training range."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from helpers import theory
from helpers.encodings import Rotary
from helpers.evaluation import sampled_accuracy
from helpers.heads import HeadBatch, HeadSettings
from helpers.training import Trained, TrainingDiverged, TrainSettings, train

SETTINGS = [(16, 5, 64, 100.0), (16, 3, 32, 1e4), (8, 2, 4, 100.0), (12, 11, 16, 1e3), (6, 0, 8, 10.0)]


def linear_head(train_length: int, offset: int, head_dim: int, base: float, **others: object) -> HeadSettings:
    kind = {"parameterisation": "direct", "normalisation": "linear", "init_std": 0.0, "vocab_size": 16} | others
    return HeadSettings(Rotary(base), offset, train_length, head_dim=head_dim, **kind)


def descend(heads: list[HeadSettings], learning_rate: float, steps: int, **others: object) -> Trained:
    how = {"optimiser": "sgd", "objective": "positional", "learning_rate": learning_rate, "steps": steps} | others
    return train(heads, TrainSettings(**how))[0]


def scores_of(batch: HeadBatch, length: int) -> np.ndarray:
    return batch.kernel(length).detach().numpy()


@pytest.mark.parametrize("parameterisation", ["direct", "factored"])
def test_t14_is_the_loss_that_training_reports(parameterisation: str) -> None:
    heads = [
        linear_head(8, 3, 8, 100.0, parameterisation=parameterisation, init_std=1.0, vocab_size=5, seed=seed)
        for seed in range(4)
    ]
    reported = descend(heads, 1e-3, 1).losses[:, 0].numpy()
    expected = theory.expected_linear_loss(scores_of(HeadBatch(heads), 8), 3, 5)
    assert reported == pytest.approx(expected, rel=1e-12)


def test_t14_is_the_mean_over_every_sequence_of_a_trained_head() -> None:
    length, offset, vocab_size = 5, 2, 3
    batch = descend([linear_head(length, offset, 8, 100.0, vocab_size=vocab_size)], 0.01, 30).batch
    (scores,) = scores_of(batch, length)
    losses = []
    for tokens in itertools.product(range(vocab_size), repeat=length):  # tokens[δ] stands δ steps back
        output = np.bincount(tokens, weights=scores, minlength=vocab_size)
        output[tokens[offset]] -= 1
        losses.append(output @ output)
    assert theory.expected_linear_loss(scores, offset, vocab_size) == pytest.approx(np.mean(losses), abs=1e-12)


def test_t14_is_what_sampled_sequences_give_on_average() -> None:
    heads = [linear_head(16, 5, 32, 100.0, init_std=0.3, seed=seed) for seed in range(3)]
    frozen = descend(heads, 1e-12, 300, objective="sampled").losses.numpy()
    expected = theory.expected_linear_loss(scores_of(HeadBatch(heads), 16), 5, 16)
    error = frozen.std(axis=1, ddof=1) / np.sqrt(frozen.shape[1])
    assert (np.abs(frozen.mean(axis=1) - expected) < 4 * error).all()


@pytest.mark.parametrize(("train_length", "offset", "head_dim", "base"), SETTINGS)
@pytest.mark.parametrize("share", [0.1, 0.6, 0.95])
def test_t15_training_follows_the_closed_form(
    train_length: int, offset: int, head_dim: int, base: float, share: float
) -> None:
    counts = [0, 1, 2, 37, 500]
    step = share * theory.largest_stable_step(theory.rotary_frequencies(head_dim, base), train_length, 16)
    head = linear_head(train_length, offset, head_dim, base)
    trained = descend([head], step / 2, max(counts), snapshots=tuple(counts))  # the closed form is of half the loss
    path = theory.gradient_descent_path(
        theory.rotary_frequencies(head_dim, base), offset, train_length, 16, step, counts
    )
    for count, weights in zip(counts, path, strict=True):
        assert trained.snapshots[count]["amplitudes"][0].numpy() == pytest.approx(weights, abs=1e-8)


def test_t15_training_in_a_well_conditioned_design_ends_at_the_interpolant() -> None:
    # Three positions: a condition number of 7.6, which takes two thousand steps; at sixteen positions it is 7e9.
    head, theta = linear_head(3, 1, 4, 100.0), theory.rotary_frequencies(4, 100.0)
    needed = int(40 * theory.condition_number(theory.linear_design(theta, 3, 16)) ** 2)
    trained = descend([head], theory.largest_stable_step(theta, 3, 16) / 4, needed)
    limit = theory.min_norm_interpolant(theta, 1, 3, 16)
    assert needed < 3000
    assert trained.batch.parameters["amplitudes"][0].numpy() == pytest.approx(limit.weights, abs=1e-8)


def test_t15_a_step_beyond_the_largest_stable_one_diverges() -> None:
    head = linear_head(8, 2, 8, 100.0)
    step = 1.5 * theory.largest_stable_step(theory.rotary_frequencies(8, 100.0), 8, 16)
    with pytest.raises(TrainingDiverged, match="sgd"):
        descend([head], step / 2, 2000)


@given(arrays(np.float64, (3, 10), elements=st.floats(-5, 5)), st.integers(0, 20), st.integers(1, 40))
def test_t16_no_carriers_beat_the_ceiling(weights: np.ndarray, offset: int, vocab_size: int) -> None:
    theta = theory.rotary_frequencies(10, 100.0)
    rate = theory.linear_d_prime_rate(theory.carriers_from_weights(weights), theta, offset, vocab_size)
    assert (rate <= np.sqrt(10 * vocab_size) + 1e-9).all()


def test_t16_equal_aligned_carriers_reach_the_ceiling() -> None:
    theta = theory.rotary_frequencies(10, 100.0)
    carriers = theory.aligned_carriers(np.full(5, 0.7), theta, 4)
    assert theory.linear_d_prime_rate(carriers, theta, 4, 9) == pytest.approx(np.sqrt(10 * 9), rel=1e-12)
    assert theory.linear_d_prime_rate(np.zeros(5), theta, 4, 9) == 0.0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_t16_is_the_limit_of_d_prime(seed: int) -> None:
    source = np.random.default_rng(seed)
    theta = (np.arange(6) + source.uniform(0.1, 0.9, size=6)) * np.pi / 6.2  # distinct, away from 0 and π
    carriers = source.normal(size=6) + 1j * source.normal(size=6)
    offset, length = 7, 400_000
    at_length = theory.d_prime(theory.kernel(carriers, theta, np.arange(length)), offset, 16, [length])[0]
    rate = theory.linear_d_prime_rate(carriers, theta, offset, 16)
    assert at_length * np.sqrt(length) == pytest.approx(rate, abs=0.02)


@pytest.mark.parametrize(
    ("frequencies", "vocab_size", "message"),
    [
        ([1.0, 1.0], 16, "all different"),
        ([0.0, 1.0], 16, "in "),
        ([1.0, 3.2], 16, "in "),
        ([1.0, 2.0], 0, "vocab_size=0"),
    ],
)
def test_t16_names_what_is_wrong(frequencies: list[float], vocab_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        theory.linear_d_prime_rate([1.0, 1.0], frequencies, 3, vocab_size)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("offset", [3, 5, 9])
def test_t16_the_limit_is_right_in_range_and_at_chance_beyond(offset: int) -> None:
    theta = theory.rotary_frequencies(64, 100.0)
    limit = theory.min_norm_interpolant(theta, offset, 16, 16)
    scores = torch.from_numpy(theory.kernel(limit.carriers, theta, np.arange(64))[::-1].copy())
    for length, expected in [(16, 1.0), (24, 1 / 16), (64, 1 / 16)]:
        source = torch.Generator().manual_seed(length)
        accuracy, _ = sampled_accuracy(scores[-length:], 16, offset, 4000, source)
        assert accuracy == pytest.approx(expected, abs=4 * (15 / 256 / 4000) ** 0.5)


@pytest.mark.parametrize(("competitor", "expected"), [(50.0, 1 / 16), (-50.0, 15 / 16)])
def test_t16_one_dominant_score_hides_the_answer_or_costs_one_symbol(competitor: float, expected: float) -> None:
    source = torch.Generator().manual_seed(0)
    accuracy, _ = sampled_accuracy(torch.tensor([competitor, 1.0]), 16, 0, 20_000, source)
    assert accuracy == pytest.approx(expected, abs=4 * (15 / 256 / 20_000) ** 0.5)
    law = theory.linear_accuracy([1.0, competitor], 0, 16, [2])[0]
    assert law == pytest.approx(1 / 16, abs=0.02)
