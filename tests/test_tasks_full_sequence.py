"""The full-sequence tasks: labels against their definitions written out, and what a partial answer can reach."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.tasks import IGNORE, registry
from helpers.tasks.copy import Copy
from helpers.tasks.shift import Shift
from helpers.tasks.two_hop import TwoHop


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(task, length: int, seed: int, batch_size: int = 4) -> list[tuple[list[int], list[int]]]:
    tokens, labels = task.sample(batch_size, length, seeded(seed))
    assert tokens.shape == labels.shape == (batch_size, length)
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < task.vocab_size
    return list(zip(tokens.tolist(), labels.tolist(), strict=True))


def test_they_are_registered() -> None:
    assert {"shift", "copy", "two-hop"} <= set(registry)
    assert registry.make("shift", offset=2) == Shift(offset=2)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 20), st.integers(0, 12), st.integers(0, 12), st.integers(0, 2**31))
def test_shift_repeats_the_token_offset_steps_back(vocab_size: int, offset: int, extra: int, seed: int) -> None:
    task = Shift(vocab_size=vocab_size, offset=offset)
    for tokens, labels in rows(task, task.min_length + extra, seed):
        assert labels == [IGNORE if t < offset else tokens[t - offset] for t in range(len(tokens))]


@settings(deadline=None, max_examples=40)
@given(st.integers(3, 20), st.integers(2, 24), st.integers(0, 2**31))
def test_copy_asks_for_the_string_again(vocab_size: int, length: int, seed: int) -> None:
    size = length // 2
    for tokens, labels in rows(Copy(vocab_size=vocab_size), length, seed):
        string = tokens[:size]
        assert all(symbol < vocab_size - 1 for symbol in string)
        assert tokens == [*string, vocab_size - 1, *string][:length]
        assert labels == ([IGNORE] * size + string + [IGNORE])[:length]


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 20), st.integers(0, 6), st.integers(1, 6), st.integers(0, 10), st.integers(0, 2**31))
def test_two_hop_looks_where_the_first_token_says(
    vocab_size: int, offset: int, reach: int, extra: int, seed: int
) -> None:
    reach = min(reach, vocab_size)
    task = TwoHop(vocab_size=vocab_size, offset=offset, reach=reach)
    for tokens, labels in rows(task, task.min_length + extra, seed):
        for t, label in enumerate(labels):
            if t < offset + reach:
                assert label == IGNORE
            else:
                assert label == tokens[t - offset - 1 - tokens[t - offset] % reach]


def test_two_hop_cannot_be_answered_by_one_look() -> None:
    """A single offset is right 1/reach of the time, and by chance otherwise."""
    task = TwoHop(vocab_size=16, offset=3, reach=4)
    tokens, labels = task.sample(4000, 40, seeded())
    for further in range(1, 5):
        right = (tokens[:, 10 - 3 - further] == labels[:, 10]).float().mean()
        assert float(right) == pytest.approx(1 / 4 + 3 / 4 / 16, abs=0.03)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shift(offset=-1), "offset=-1 is not allowed: offset must be an integer ≥ 0"),
        (lambda: Copy(vocab_size=2), "vocab_size=2 is not allowed: vocab_size must be an integer ≥ 3"),
        (lambda: TwoHop(vocab_size=4, reach=5), "reach=5 is not allowed: reach must be in 1 … vocab_size = 4"),
        (lambda: TwoHop(reach=0), "reach=0"),
        (lambda: Shift(offset=5).sample(1, 5, seeded()), "length=5 is not allowed: length must be at least 6"),
    ],
)
def test_what_is_wrong_is_named(make, message: str) -> None:
    with pytest.raises(ValueError, match="is not allowed") as error:
        make()
    assert message in str(error.value)


def test_chance() -> None:
    assert Shift(vocab_size=16).chance == TwoHop(vocab_size=16).chance == 1 / 16
    assert Copy(vocab_size=16).chance == 1 / 15
