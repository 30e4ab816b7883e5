"""Chance and the uniform head, against enumeration, closed forms and sampling."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from helpers.chance import uniform_accuracy, uniform_loss


@pytest.mark.parametrize(("vocab_size", "length"), [(2, 1), (2, 6), (3, 5), (4, 6), (5, 4), (7, 1)])
def test_the_uniform_head_equals_enumeration_of_every_sequence(vocab_size: int, length: int) -> None:
    sequences = list(itertools.product(range(vocab_size), repeat=length))
    largest = sum(max(Counter(sequence).values()) for sequence in sequences)
    assert uniform_accuracy(vocab_size, length) == pytest.approx(largest / len(sequences) / length, abs=1e-12)
    losses = [
        -math.log(sequence.count(sequence[0]) / length) for sequence in sequences
    ]  # the answer may stand anywhere
    assert uniform_loss(vocab_size, length) == pytest.approx(np.mean(losses), abs=1e-12)


@pytest.mark.parametrize("length", [2, 10, 64, 500])
def test_two_symbols_are_a_random_walk(length: int) -> None:
    # E|S_n| of a simple random walk with n even steps is n C(n, n/2) / 2^n, and max = (n + |S_n|)/2.
    expected = 0.5 + 0.5 * math.comb(length, length // 2) / 2**length
    assert uniform_accuracy(2, length) == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("length", [16, 48, 512])
def test_sixteen_symbols_agree_with_sampling(length: int) -> None:
    rng = np.random.default_rng(0)
    counts = rng.multinomial(length, [1 / 16] * 16, size=20_000)
    largest = counts.max(axis=1) / length
    assert abs(uniform_accuracy(16, length) - largest.mean()) < 4 * largest.std() / 20_000**0.5


def test_one_symbol_is_always_right_and_long_sequences_tend_to_chance() -> None:
    assert uniform_accuracy(1, 5) == pytest.approx(1.0)
    assert uniform_loss(1, 5) == pytest.approx(0.0, abs=1e-12)
    falling = [uniform_accuracy(16, n) for n in (4, 16, 64, 256, 1024)]
    assert falling == sorted(falling, reverse=True)
    assert 1 / 16 < falling[-1] < 1 / 16 + 0.02
    assert uniform_loss(16, 1024) == pytest.approx(math.log(16), abs=0.01)


@pytest.mark.parametrize(
    ("vocab_size", "length", "named"), [(0, 4, "vocab_size=0"), (4, 0, "length=0"), (4, 2.5, "2.5")]
)
def test_impossible_sizes_are_named(vocab_size: int, length: int, named: str) -> None:
    for function in (uniform_accuracy, uniform_loss):
        with pytest.raises(ValueError, match=named):
            function(vocab_size, length)
