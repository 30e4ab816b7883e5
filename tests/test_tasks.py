"""Tasks: the label is where the definition says, tokens are uniform, draws come from the given generator alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from helpers.tasks import IGNORE, FixedOffsetRetrieval, registry


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 30), st.integers(0, 20), st.integers(0, 20), st.integers(1, 5), st.integers(0, 2**31))
def test_the_label_is_the_token_offset_steps_before_the_last(
    v: int, offset: int, extra: int, b: int, seed: int
) -> None:
    length = offset + 1 + extra
    tokens, labels = FixedOffsetRetrieval(vocab_size=v, offset=offset).sample(b, length, seeded(seed))
    assert tokens.shape == labels.shape == (b, length)
    assert all(0 <= token < v for row in tokens.tolist() for token in row)
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert label[:-1] == [IGNORE] * (length - 1)
        assert label[-1] == row[length - 1 - offset]


def test_the_ignored_label_is_the_one_torchs_cross_entropy_skips() -> None:
    assert torch.nn.CrossEntropyLoss().ignore_index == IGNORE


def test_tokens_are_uniform_at_every_position() -> None:
    tokens, _ = FixedOffsetRetrieval(vocab_size=5, offset=2).sample(4000, 7, seeded())
    for position in range(7):
        assert chisquare(torch.bincount(tokens[:, position], minlength=5).numpy()).pvalue > 1e-6


def test_tokens_at_two_positions_are_independent() -> None:
    tokens, _ = FixedOffsetRetrieval(vocab_size=4, offset=1).sample(8000, 6, seeded())
    pairs = torch.bincount(tokens[:, 1] * 4 + tokens[:, 4], minlength=16)
    assert chisquare(pairs.numpy()).pvalue > 1e-6


def test_the_same_generator_state_gives_the_same_sample_and_no_other_stream_is_touched() -> None:
    task, before = FixedOffsetRetrieval(), torch.random.get_rng_state()
    assert torch.equal(task.sample(8, 12, seeded(1))[0], task.sample(8, 12, seeded(1))[0])
    assert not torch.equal(task.sample(8, 12, seeded(1))[0], task.sample(8, 12, seeded(2))[0])
    assert torch.equal(torch.random.get_rng_state(), before)


def test_chance_and_shortest_length() -> None:
    task = FixedOffsetRetrieval(vocab_size=16, offset=5)
    assert task.chance == 0.0625
    assert task.min_length == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 1}, "vocab_size=1 is not allowed: vocab_size must be an integer ≥ 2"),
        ({"vocab_size": 2.5}, "vocab_size=2.5 is not allowed: vocab_size must be an integer ≥ 2"),
        ({"offset": -1}, "offset=-1 is not allowed: offset must be an integer ≥ 0"),
        ({"offset": "5"}, "offset='5' is not allowed: offset must be an integer ≥ 0"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        FixedOffsetRetrieval(**settings)


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_length_with_no_target_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"^length={length} is not allowed: length must be at least 6 for .*offset=5"):
        FixedOffsetRetrieval(offset=5).sample(1, length, seeded())


def test_the_registry_knows_the_task_and_hints_at_a_misspelt_one() -> None:
    assert registry["retrieval"] is FixedOffsetRetrieval
    assert registry.make("retrieval", offset=3) == FixedOffsetRetrieval(offset=3)
    with pytest.raises(ValueError, match=r"task='retrival' is not allowed: .* \(did you mean 'retrieval'\?\)"):
        registry["retrival"]


@pytest.mark.parametrize("name", list(registry))
def test_every_registered_task_labels_what_it_samples(name: str) -> None:
    """With its default settings: scored labels are symbols, something is scored, a shorter sequence is refused."""
    task = registry.make(name)
    tokens, labels = task.sample(16, task.min_length, seeded())
    scored = labels[labels != IGNORE]
    assert task.title
    assert 0 < task.chance < 1
    assert len(scored) > 0
    assert int(scored.min()) >= 0
    assert int(scored.max()) < task.vocab_size
    assert int(tokens.max()) < task.vocab_size
    assert torch.equal(labels, task.labels(tokens))
    with pytest.raises(ValueError, match=f"length={task.min_length - 1} is not allowed"):
        task.sample(1, task.min_length - 1, seeded())
