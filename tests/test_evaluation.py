"""Evaluation: accuracies that probability alone gives, within exact binomial bounds; rows that say what they hold."""

from collections import Counter
from itertools import product
from math import factorial, prod

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from helpers.encodings import Learned, NoEncoding, Rotary
from helpers.evaluation import accuracies, accuracy_curves, correct, describe, evaluate, measure, sampled_accuracy
from helpers.heads import HeadBatch, HeadSettings
from helpers.seeding import generator
from helpers.training import TrainSettings, train

SAMPLES = 4000
FALSE_ALARM = 1e-6  # the probability that a true accuracy is rejected, by the exact binomial test


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_accuracy(measured: float, expected: float, samples: int = SAMPLES) -> None:
    right = round(measured * samples)
    assert measured * samples == pytest.approx(right, abs=1e-6)
    assert binomtest(right, samples, min(1.0, expected)).pvalue > FALSE_ALARM, (measured, expected)


def by_enumeration(weights: list[float], vocab_size: int, offset: int) -> float:
    """The accuracy over all V^n sequences: the symbol with the largest mass, the smaller one of a tie."""
    n = len(weights)
    right = 0
    for tokens in product(range(vocab_size), repeat=n):
        mass = [sum(w for w, x in zip(weights, tokens, strict=True) if x == v) for v in range(vocab_size)]
        right += mass.index(max(mass)) == tokens[n - 1 - offset]
    return right / vocab_size**n


def compositions(total: int, parts: int):
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def largest_count(vocab_size: int, length: int) -> float:
    """E[max_v N_v]/n for N multinomial, summed over all counts."""
    expected = 0.0
    for counts in compositions(length, vocab_size):
        ways = factorial(length) // prod(map(factorial, counts))
        expected += ways * max(counts)
    return expected / vocab_size**length / length


def one_hot(length: int, position: int) -> torch.Tensor:
    return torch.eye(length, dtype=torch.float64)[position]


# Accuracy from probability alone


@pytest.mark.parametrize(("length", "offset"), [(6, 5), (16, 5), (48, 0), (512, 17)])
def test_a_perfect_head_is_always_right(length: int, offset: int) -> None:
    weights = one_hot(length, length - 1 - offset)
    assert sampled_accuracy(weights, 16, offset, 500, seeded()) == (1.0, pytest.approx(0.0, abs=0.003))


def test_more_than_half_of_the_weight_on_the_answer_suffices() -> None:
    weights = torch.full((9,), 0.499 / 8, dtype=torch.float64)
    weights[3] = 0.501
    assert sampled_accuracy(weights, 2, 5, 500, seeded())[0] == 1.0


@pytest.mark.parametrize("vocab_size", [2, 5, 16])
@pytest.mark.parametrize("position", [0, 11, 47])
def test_a_head_pinned_to_another_position_is_at_chance(vocab_size: int, position: int) -> None:
    accuracy, _ = sampled_accuracy(one_hot(48, position), vocab_size, 5, SAMPLES, seeded(position))
    assert_accuracy(accuracy, 1 / vocab_size)


@pytest.mark.parametrize(("vocab_size", "length"), [(2, 3), (3, 6), (4, 9), (6, 7)])
def test_equal_weights_are_right_as_often_as_the_largest_count(vocab_size: int, length: int) -> None:
    """Given the counts, the most frequent symbol is the answer with probability max_v N_v / n, however ties go."""
    expected = largest_count(vocab_size, length)
    if vocab_size**length < 3000:
        assert by_enumeration([1.0] * length, vocab_size, 1) == pytest.approx(expected, rel=1e-12)
    equal = torch.full((length,), 1 / length, dtype=torch.float64)
    for offset in (0, length - 1):
        assert_accuracy(sampled_accuracy(equal, vocab_size, offset, SAMPLES, seeded(offset))[0], expected)


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize(
    "weights", [[0.4, 0.35, 0.25, 0.0], [0.1, 0.2, 0.3, 0.4], [0.45, 0.05, 0.25, 0.25], [1.5, -0.8, 0.4, -0.1]]
)
def test_any_weights_or_scores_are_right_as_often_as_over_all_sequences(weights: list[float], offset: int) -> None:
    expected = by_enumeration(weights, 3, offset)
    sampled, _ = sampled_accuracy(torch.tensor(weights, dtype=torch.float64), 3, offset, SAMPLES, seeded())
    assert_accuracy(sampled, expected)


def test_correct_is_the_verdict_on_each_sequence() -> None:
    weights = torch.tensor([0.2, 0.45, 0.35], dtype=torch.float64)
    verdicts = correct(weights, 4, 1, 200, seeded(3))
    tokens = torch.randint(4, (200, 3), generator=seeded(3)).tolist()
    assert verdicts.dtype == torch.bool
    for verdict, sequence in zip(verdicts.tolist(), tokens, strict=True):
        mass = Counter()
        for weight, token in zip(weights.tolist(), sequence, strict=True):
            mass[token] += weight
        assert verdict == (mass.most_common(1)[0][0] == sequence[1])


def test_sequences_drawn_in_parts_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.full((10,), 0.1, dtype=torch.float64)
    whole = correct(weights, 4, 2, 105, seeded())
    monkeypatch.setattr("helpers.evaluation.MAX_ELEMENTS", 200)
    assert torch.equal(correct(weights, 4, 2, 105, seeded()), whole)


def test_the_standard_error_is_that_of_a_proportion() -> None:
    accuracy, error = sampled_accuracy(one_hot(20, 3), 4, 5, 10_000, seeded())
    assert error == pytest.approx((accuracy * (1 - accuracy) / 10_000) ** 0.5, rel=1e-3)
    _, at_one = sampled_accuracy(one_hot(20, 14), 4, 5, 100, seeded())
    assert 0.5 / 100 < at_one < 2 / 100, "one wrong of a hundred would not have been surprising"


def test_weights_that_are_not_finite_have_no_accuracy() -> None:
    for bad in (torch.nan, torch.inf):
        assert np.isnan(sampled_accuracy(torch.tensor([0.5, bad, 0.5]), 4, 1, 10, seeded())).all()


@pytest.mark.parametrize(
    ("length", "offset", "samples", "message"),
    [
        (5, 5, 10, "length=5 is not allowed: length must be greater than offset=5"),
        (1, 5, 10, "length=1 is not allowed: length must be greater than offset=5"),
        (9, 5, 0, "samples=0 is not allowed: samples must be an integer ≥ 1"),
        (9, 5, 2.5, "samples=2.5 is not allowed: samples must be an integer ≥ 1"),
    ],
)
def test_lengths_without_an_answer_and_no_samples_are_refused(length, offset, samples, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        sampled_accuracy(torch.ones(length), 4, offset, samples, seeded())


# Accuracy at every length in one pass


def test_the_curve_of_a_kernel_has_at_each_length_the_accuracy_over_all_sequences() -> None:
    kernels = torch.tensor([[0.3, 1.2, -0.5, 0.9, 1.4], [2.0, 0.1, 0.7, 0.0, -1.0]], dtype=torch.float64)
    offsets = (1, 2)
    curves = accuracy_curves(kernels, 3, offsets, SAMPLES, [seeded(1), seeded(2)])
    for h, offset in enumerate(offsets):
        assert np.isnan(curves[h, :offset]).all()
        for n in range(offset + 1, 6):
            weights = kernels[h, :n].flip(0).exp().tolist()
            assert_accuracy(float(curves[h, n - 1]), by_enumeration(weights, 3, offset))


def test_the_curve_of_equal_weights_is_that_of_the_largest_count() -> None:
    (curve,) = accuracy_curves(torch.zeros(1, 8, dtype=torch.float64), 4, [2], SAMPLES, [seeded(5)])
    for n in range(3, 9):
        assert_accuracy(float(curve[n - 1]), largest_count(4, n))


def test_a_heads_curve_does_not_depend_on_the_heads_beside_it() -> None:
    kernels = torch.randn(3, 12, generator=seeded(), dtype=torch.float64)
    together = accuracy_curves(kernels, 5, [1, 4, 2], 300, [seeded(s) for s in range(3)])
    alone = accuracy_curves(kernels[1:2], 5, [4], 300, [seeded(1)])
    torch.testing.assert_close(alone[0], together[1], rtol=0, atol=0, equal_nan=True)


# Rows


def untrained(*heads: HeadSettings):
    return train(heads, TrainSettings(steps=0))


def test_an_untrained_head_without_an_encoding_has_the_accuracy_of_counting() -> None:
    rows = evaluate(untrained(equal_head(seed=1), equal_head(seed=2)), [4, 6, 9], SAMPLES)
    for row in rows.itertuples():
        assert_accuracy(row.accuracy, largest_count(4, row.length))
        assert row.target_weight == pytest.approx(1 / row.length)
        assert row.mass_in_range == pytest.approx(min(1.0, 6 / row.length))
        assert row.in_range_accuracy == rows.query(f"seed == {row.seed} and length == 6").accuracy.item()


def equal_head(seed: int) -> HeadSettings:
    return HeadSettings(NoEncoding(), offset=3, train_length=6, vocab_size=4, head_dim=4, seed=seed)


def pinned_batch(position: int, offsets: tuple[int, ...]) -> HeadBatch:
    """Learned heads that put all weight on one position, whatever the query."""
    heads = [HeadSettings(Learned(64), head_dim=4, offset=o, vocab_size=5, seed=s) for s, o in enumerate(offsets)]
    batch = HeadBatch(heads)
    table = torch.zeros_like(batch.parameters["table"])
    table[:, position, 0] = 1e4
    eye = torch.eye(4, dtype=torch.float64).expand(len(heads), 4, 4)
    query = torch.eye(4, dtype=torch.float64)[0].expand(len(heads), 4)
    batch.parameters = {"table": table, "w_query": eye, "w_key": eye, "shared_query": query}
    return batch


def test_a_head_pinned_to_the_training_target_is_right_at_that_length_alone() -> None:
    """T5: all weight on L − 1 − k = 10 answers at n = 16 = L and nowhere else."""
    batch = pinned_batch(10, (5, 5, 5))
    for length in (12, 16, 17, 48):
        for row in measure(batch, length, SAMPLES):
            assert row["peak_position"] == 10
            assert row["peak_delta"] == length - 11
            assert row["mass_in_range"] == pytest.approx(1.0)
            assert row["target_weight"] == pytest.approx(float(length == 16), abs=1e-12)
            if length == 16:
                assert row["accuracy"] == 1.0
            else:
                assert_accuracy(row["accuracy"], 1 / 5)


def test_each_head_is_judged_by_its_own_offset() -> None:
    batch = pinned_batch(10, (5, 3, 5))
    assert [accuracy == 1.0 for accuracy, _ in accuracies(batch, 16, 500)] == [True, False, True]


def test_weight_outside_the_training_range_is_not_counted_inside() -> None:
    (row,) = measure(pinned_batch(30, (5,)), 48, 10)
    assert row["mass_in_range"] == pytest.approx(0.0, abs=1e-12)
    assert row["peak_delta"] == 17


def test_there_is_one_row_a_head_and_length_that_says_which() -> None:
    heads = [HeadSettings(Rotary(), offset=k, seed=s) for k in (3, 5) for s in (0, 1)]
    heads.append(HeadSettings(NoEncoding(), seed=7))
    rows = evaluate(train(heads, TrainSettings(steps=2)), [16, 20, 48], samples=50)
    assert len(rows) == 5 * 3
    assert not rows.duplicated(["encoding", "offset", "seed", "length"]).any()
    for head in heads:
        mine = rows[(rows.encoding == head.encoding.name) & (rows.offset == head.offset) & (rows.seed == head.seed)]
        assert list(mine.length) == [16, 20, 48]
        assert (mine[list(describe(head))] == list(describe(head).values())).all(axis=None)
    expected = {"accuracy", "standard_error", "target_weight", "peak_position", "peak_delta", "mass_in_range"}
    assert set(rows) == {*describe(heads[0]), *expected, "status", "loss", "length", "in_range_accuracy"}
    assert (rows.peak_position + rows.peak_delta == rows.length - 1).all()


def test_target_weight_is_the_weight_of_the_answers_key() -> None:
    """T10: a_k(n) = 1 / (1 + Σ_{δ≠k} e^{f(δ) − f(k)}) from the head's own carriers."""
    (trained,) = train([HeadSettings(head_dim=8, seed=seed) for seed in range(3)], TrainSettings(steps=20))
    carriers = trained.batch.carriers().numpy()
    theta = 1e4 ** (-2 * np.arange(4) / 8)
    rows = evaluate([trained], [40], samples=10)
    for h in range(3):
        f = (carriers[h] * np.exp(-1j * np.outer(np.arange(40), theta))).real.sum(-1)
        odds = np.exp(np.delete(f, 5) - f[5]).sum()
        assert rows.target_weight[h] == pytest.approx(1 / (1 + odds), rel=1e-10)


def test_a_row_does_not_depend_on_the_heads_or_lengths_beside_it() -> None:
    (several,) = train([HeadSettings(seed=s) for s in range(4)], TrainSettings(steps=5))
    (alone,) = train([HeadSettings(seed=2)], TrainSettings(steps=5))
    many, few = evaluate([several], [16, 32, 64], 200), evaluate([alone], [64], 200)
    mine = many[(many.seed == 2) & (many.length == 64)].reset_index(drop=True)
    assert mine.equals(few)


def test_test_sequences_come_from_the_evaluation_stream_of_seed_and_length() -> None:
    (trained,) = untrained(equal_head(seed=4))
    equal = torch.full((9,), 1 / 9, dtype=torch.float64)
    expected = sampled_accuracy(equal, 4, 3, 300, generator(4, "evaluation", 9))
    assert accuracies(trained.batch, 9, 300) == [expected]


def test_a_length_too_short_or_beyond_the_table_is_named() -> None:
    trained = untrained(HeadSettings(Learned(table_length=20), offset=5))
    with pytest.raises(ValueError, match=r"^length=5 is not allowed: length must be greater than offset=5$"):
        evaluate(trained, [5], 10)
    with pytest.raises(ValueError, match=r"^length=0 is not allowed: length must be an integer ≥ 1$"):
        evaluate(trained, [0], 10)
    with pytest.raises(ValueError, match=r"^position=20 is not allowed: position must be below table_length=20$"):
        evaluate(trained, [21], 10)


def test_a_head_that_diverged_has_a_row_without_an_accuracy() -> None:
    bad = HeadSettings(normalisation="linear", init_std=1e160)
    trained = train([bad], TrainSettings(steps=3, on_failure="report"))
    (row,) = evaluate(trained, [20], 10).itertuples()
    assert row.status == "diverged"
    assert np.isnan(row.accuracy)
    assert np.isnan(row.standard_error)
