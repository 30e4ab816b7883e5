"""What transformers answer, and where their heads look: against a model whose weights are set by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.encodings import Learned, NoEncoding, Rotary, Sinusoidal
from helpers.tasks.shift import Shift
from helpers.theory.dilution import target_weight
from helpers.theory.kernels import aligned_carriers, kernel, rotary_frequencies
from helpers.transformer import (
    TrainedTransformers,
    TransformerBatch,
    TransformerSettings,
    TransformerTraining,
    evaluate_transformers,
    position_accuracy,
    site,
)
from helpers.transformer.evaluation import Answers, answers, fresh_sequences
from helpers.transformer.inspection import (
    ablation,
    attention_peaks,
    cumulative_ablation,
    cumulative_patching,
    first_layer_carriers,
    fit_carriers,
    fit_offsets,
    head_order,
    head_table,
    mean_maps,
    patching,
    record,
    shift_deviations,
    target_weights,
)

OFFSET, V, WIDTH = 3, 6, 16
TASK = Shift(vocab_size=V, offset=OFFSET)
TRAINING = TransformerTraining(task=TASK, train_length=12, steps=0)


def by_hand(amplitude: float, num_heads: int = 1, seeds: tuple[int, ...] = (0, 1)) -> TransformerBatch:
    """Models whose first head is the paper's minimal head: constant queries and keys, the token as its value.

    Coordinates 0 … V − 1 of the stream hold the token, coordinate V a constant 1. The head's kernel is
    ``amplitude`` · Σ_r cos θ_r (δ − OFFSET), and what it reads outweighs the token itself in the read-out.
    """
    models = [
        TransformerSettings(Rotary(), V, WIDTH, num_heads, num_layers=1, mlp_ratio=1, seed=seed) for seed in seeds
    ]
    batch = TransformerBatch(models, dtype=torch.float64)
    p, d = {name: value.zero_() for name, value in batch.parameters.items()}, WIDTH // num_heads
    p["embedding"][:, :, :V] = torch.eye(V, dtype=torch.float64)
    p["embedding"][:, :, V] = 1.0
    level = torch.nn.functional.layer_norm(p["embedding"][0, :1], (WIDTH,))[0, V]  # the constant, once normalised
    carriers = torch.from_numpy(aligned_carriers(np.full(d // 2, amplitude), rotary_frequencies(d), OFFSET))
    p["0.qkv"][:, V, :d] = torch.view_as_real(carriers.conj() * d**0.5).flatten() / level
    p["0.qkv"][:, V, WIDTH : WIDTH + d : 2] = 1.0 / level
    p["0.qkv"][:, :V, 2 * WIDTH : 2 * WIDTH + min(V, d)] = torch.eye(V, min(V, d), dtype=torch.float64)
    p["0.out"][:] = 50 * torch.eye(WIDTH, dtype=torch.float64)
    p["read_out"][:, :V] = torch.eye(V, dtype=torch.float64)
    return batch


def as_trained(batch: TransformerBatch) -> TrainedTransformers:
    return TrainedTransformers(batch, TRAINING, torch.zeros(len(batch), 0), ["fitted"] * len(batch))


def test_a_model_that_looks_offset_steps_back_is_always_right() -> None:
    rows = evaluate_transformers([as_trained(by_hand(3.0))], [4, 12, 40], samples=50)
    assert len(rows) == 2 * 3
    assert (rows.accuracy == 1).all()
    assert (rows.exact == 1).all()
    assert (rows.in_range_accuracy == 1).all()
    assert (rows.chance == 1 / V).all()
    positions = position_accuracy([as_trained(by_hand(3.0))], 40, samples=50)
    assert sorted(positions.position.unique()) == list(range(OFFSET, 40))
    assert (positions.accuracy == 1).all()


def test_a_model_that_always_says_the_same_is_right_by_chance() -> None:
    batch = by_hand(3.0)
    batch.parameters["read_out"].zero_()  # every logit ties, so the answer is symbol 0
    found = answers(batch, TASK, 20, samples=400)
    _, labels = fresh_sequences(batch.models, TASK, 20, 400)
    assert torch.equal(found.right, labels == 0)
    error = (1 / V * (1 - 1 / V) / (400 * 17)) ** 0.5
    assert found.accuracy().tolist() == pytest.approx([1 / V] * 2, abs=5 * error)
    assert bool(found.by_position()[:, :OFFSET].isnan().all())


def test_an_untrained_model_knows_nothing() -> None:
    batch = TransformerBatch([TransformerSettings(vocab_size=V, width=16, seed=seed) for seed in range(3)])
    assert answers(batch, TASK, 16, samples=300).accuracy().tolist() == pytest.approx([1 / V] * 3, abs=0.05)


def test_shares_are_counted_over_scored_positions() -> None:
    scored = torch.tensor([[[False, True, True], [False, True, False]]])
    right = torch.tensor([[[False, True, False], [False, True, False]]])
    found = Answers(right, scored)
    assert found.accuracy().tolist() == pytest.approx([2 / 3])
    assert found.exact().tolist() == [0.5]
    assert found.by_position()[0, 1:].tolist() == [1.0, 0.0]


def test_the_number_of_threads_and_of_models_changes_no_row() -> None:
    whole = evaluate_transformers([as_trained(by_hand(0.5, seeds=(0, 1, 2)))], [30], samples=40)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        again = evaluate_transformers([as_trained(by_hand(0.5, seeds=(0, 1, 2)))], [30], samples=40)
    finally:
        torch.set_num_threads(before)
    alone = evaluate_transformers([as_trained(by_hand(0.5, seeds=(1,)))], [30], samples=40)
    assert whole.equals(again)
    assert whole[whole.seed == 1].reset_index(drop=True).equals(alone)
    assert 0.2 < whole.accuracy.mean() < 0.9


@pytest.mark.parametrize("ask", [evaluate_transformers, position_accuracy, head_table, attention_peaks])
def test_a_table_shorter_than_the_test_length_is_refused(ask) -> None:
    batch = TransformerBatch([TransformerSettings(Learned(table_length=20), vocab_size=V, width=16)])
    trained = as_trained(batch)
    given = {
        evaluate_transformers: ([trained], [10, 21]),
        position_accuracy: ([trained], 21),
        head_table: ([trained], OFFSET, 21),
        attention_peaks: (trained, 21),
    }
    with pytest.raises(ValueError, match="position=20 is not allowed: position must be below table_length=20"):
        ask(*given[ask])


def test_maps_of_the_hand_made_head_are_its_kernel() -> None:
    batch = by_hand(1.2)
    theta = rotary_frequencies(WIDTH)
    f = kernel(aligned_carriers(np.full(8, 1.2), theta, OFFSET), theta, np.arange(12))
    maps = mean_maps(batch, TASK, 12, samples=5)
    assert maps.shape == (2, 1, 1, 12, 12)
    for i, j in np.ndindex(12, 12):
        if j <= i:
            assert maps[:, 0, 0, i, j] == pytest.approx([f[i - j]] * 2, abs=1e-10)
        else:
            assert np.isnan(maps[:, 0, 0, i, j]).all()
    weights = mean_maps(batch, TASK, 12, samples=5, of="weights")
    for n in (4, 8, 12):
        assert weights[0, 0, 0, n - 1, n - 1 - OFFSET] == pytest.approx(float(target_weight(f, OFFSET, [n])[0]))
    exact = np.mean([target_weight(f, OFFSET, [n])[0] for n in range(4, 13)])
    assert target_weights(weights, OFFSET)[:, 0, 0] == pytest.approx([exact] * 2)


def test_carriers_of_the_first_layer_in_closed_form() -> None:
    expected = aligned_carriers(np.full(8, 1.2), rotary_frequencies(WIDTH), OFFSET)
    np.testing.assert_allclose(first_layer_carriers(by_hand(1.2))[:, 0], [expected] * 2, atol=1e-12)
    random = TransformerBatch([TransformerSettings(vocab_size=V, width=16, num_heads=2, seed=3)], dtype=torch.float64)
    carriers, theta = first_layer_carriers(random), rotary_frequencies(8)
    maps = mean_maps(random, Shift(vocab_size=V, offset=1), 10, samples=4000)[0, 0]
    for head in range(2):
        f = kernel(carriers[0, head], theta, np.arange(10))
        for delta in range(1, 10):
            assert np.diagonal(maps[head], -delta).mean() == pytest.approx(f[delta], abs=0.05)
    with pytest.raises(ValueError, match="encoding='none' is not allowed: encoding must be one with carriers"):
        first_layer_carriers(TransformerBatch([TransformerSettings(NoEncoding())]))


def test_a_table_row_describes_the_hand_made_head() -> None:
    row = head_table([as_trained(by_hand(3.0, seeds=(0,)))], OFFSET, length=60, samples=4).iloc[0]
    assert row.offset_share == pytest.approx(1.0, abs=1e-9)
    assert row.peak_delta == OFFSET
    theta = rotary_frequencies(WIDTH)
    f = kernel(aligned_carriers(np.full(8, 3.0), theta, OFFSET), theta, np.arange(60))
    assert row.margin == pytest.approx(f[OFFSET] - np.delete(f, OFFSET).max())
    assert row.carrier_share == pytest.approx(1.0, abs=1e-4)
    peaks = attention_peaks(as_trained(by_hand(3.0, seeds=(0,))), 20, samples=4)
    late = peaks[peaks["query"] >= OFFSET]
    assert (late.key == late["query"] - OFFSET).all()
    assert peaks[peaks["query"] < 12].mass_in_range.to_numpy() == pytest.approx(1.0)
    assert peaks[peaks["query"] == 19].mass_in_range.item() < 0.1


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 12), st.integers(0, 10**6))
def test_row_and_offset_effects_are_found_exactly(length: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    r, m = draw.normal(size=length), draw.normal(size=length)
    delta = np.subtract.outer(np.arange(length), np.arange(length))
    maps = np.where(delta >= 0, r[:, None] + m[np.abs(delta)], np.nan)
    fit = fit_offsets(maps)
    assert fit.share == pytest.approx(1.0)
    np.testing.assert_allclose(fit.offsets, m - m.mean(), atol=1e-9)
    np.testing.assert_allclose(fit.rows, r + m.mean(), atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(3, 10), st.integers(0, 10**6))
def test_the_offset_share_of_any_map_is_that_of_plain_least_squares(length: int, seed: int) -> None:
    maps = np.random.default_rng(seed).normal(size=(2, length, length))
    i, j = np.tril_indices(length)
    rows, offsets = np.eye(length)[i], np.eye(length)[i - j]
    for one, share in zip(maps, fit_offsets(maps).share, strict=True):
        values = one[i, j]
        misfits = [
            ((values - design @ np.linalg.lstsq(design, values)[0]) ** 2).sum()
            for design in (rows, np.hstack([rows, offsets]))
        ]
        assert share == pytest.approx(1 - misfits[1] / misfits[0], abs=1e-9)


def test_a_map_of_rows_alone_has_no_offset_share() -> None:
    assert np.isnan(fit_offsets(np.arange(5.0)[:, None] + np.zeros((5, 5))).share)
    with pytest.raises(ValueError, match="square in its last two axes"):
        fit_offsets(np.zeros((3, 4)))


def test_carriers_are_recovered_from_their_kernel() -> None:
    encoding, draw = Rotary(base=20.0), np.random.default_rng(0)
    theta = rotary_frequencies(8, 20.0)
    carriers = draw.normal(size=(3, 4)) + 1j * draw.normal(size=(3, 4))
    offsets = kernel(carriers, theta, np.arange(50)) + 7.0
    offsets[:, 0] = 99.0  # not read
    found, share = fit_carriers(offsets, encoding, 8)
    np.testing.assert_allclose(found, carriers, atol=1e-9)
    assert share == pytest.approx(1.0)
    assert fit_carriers(offsets, Sinusoidal(), 8) is None


def test_ablating_is_replacing_what_a_head_reads() -> None:
    model = TransformerSettings(vocab_size=V, width=16, num_heads=2, num_layers=2)
    batch = TransformerBatch([replace(model, seed=seed) for seed in (0, 1)], dtype=torch.float64)
    tokens, _ = fresh_sequences(batch.models, TASK, 10, 6)
    gone = torch.zeros(2, 2, 2, dtype=torch.bool)
    gone[0, 1, 0] = True  # head 0 of layer 1, in the first model alone
    silent = TransformerBatch(batch.models, parameters=batch.parameters, dtype=torch.float64)
    silent.parameters["1.out"] = batch.parameters["1.out"].clone()
    silent.parameters["1.out"][0, :8] = 0
    torch.testing.assert_close(batch(tokens, hooks=ablation(gone, "zero")), silent(tokens), atol=1e-12, rtol=0)
    place = site(1, "heads")
    seen = {}
    hooks = ablation(gone, "mean")
    batch(tokens, hooks={place: lambda read: seen.setdefault("read", hooks[place](read))})
    before = record(batch, tokens, [place])[place]
    assert torch.equal(seen["read"][1], before[1])
    assert torch.equal(seen["read"][0, :, 1], before[0, :, 1])
    torch.testing.assert_close(seen["read"][0, 3, 0], before[0, [0, 1, 2, 4, 5], 0].mean(0))
    with pytest.raises(ValueError, match="two or more to replace a head by its mean"):
        batch(tokens[:, :1], hooks=hooks)
    assert ablation(torch.zeros_like(gone)) == {}


def test_patching_every_head_of_a_one_layer_model_moves_all_but_the_stream() -> None:
    batch = by_hand(3.0)
    tokens, _ = fresh_sequences(batch.models, TASK, 10, 6)
    place = site(0, "heads")
    source = record(batch, tokens.roll(1, 1), [place])
    patched = batch(tokens, hooks=patching(torch.ones(2, 1, 1, dtype=torch.bool), source))
    assert torch.equal(patched.argmax(-1)[..., OFFSET:], tokens.roll(1, 1)[..., :-OFFSET])


@pytest.mark.parametrize("replacement", ["mean", "zero"])
def test_the_answer_goes_with_the_head_that_carries_it(replacement: str) -> None:
    """Two heads of which one carries the rule; the other reads nothing."""
    trained = as_trained(by_hand(8.0, num_heads=2))
    rows = cumulative_ablation(trained, OFFSET, samples=200, replacement=replacement)
    assert rows.groupby("count").accuracy.min().iloc[0] == 1.0
    assert rows[rows["count"] == 1]["head"].tolist() == [0, 0]
    assert (rows[rows["count"] >= 1].accuracy < 0.3).all()
    reverse = cumulative_ablation(trained, OFFSET, "reverse", samples=200, replacement=replacement)
    assert reverse.groupby("count").accuracy.max().tolist()[:2] == [1.0, 1.0]
    assert (reverse[reverse["count"] == 2].accuracy < 0.3).all()
    patched = cumulative_patching(trained, OFFSET, samples=200)
    whole = patched.groupby("count")[["own", "other"]].mean()
    assert whole.own.tolist() == pytest.approx([1.0, 1 / V, 1 / V], abs=0.03)
    assert whole.other.tolist() == pytest.approx([1 / V, 1.0, 1.0], abs=0.03)


def test_orders_of_heads() -> None:
    weight = np.array([[[0.1, 0.9], [0.5, 0.2]], [[0.4, 0.3], [0.2, 0.1]]])
    assert head_order(weight, [0, 1], "target weight").tolist() == [[1, 2, 3, 0], [0, 1, 2, 3]]
    assert head_order(weight, [0, 1], "reverse").tolist() == [[0, 3, 2, 1], [3, 2, 1, 0]]
    shuffled = head_order(weight, [0, 1], "random", draw=2)
    assert [sorted(row) for row in shuffled.tolist()] == [[0, 1, 2, 3]] * 2
    assert shuffled[1].tolist() == head_order(weight[1:], [1], "random", draw=2)[0].tolist()
    with pytest.raises(ValueError, match="one of target weight, reverse, random"):
        head_order(weight, [0, 1], "loudest")


def test_random_orders_are_drawn_as_often_as_asked() -> None:
    rows = cumulative_ablation(as_trained(by_hand(8.0, num_heads=2)), OFFSET, "random", samples=20, draws=3)
    assert rows.groupby(["draw", "count"]).size().tolist() == [2] * 9


def test_shifted_positions_change_nothing_for_rotary_and_much_for_sinusoidal() -> None:
    relative = TransformerBatch([TransformerSettings(vocab_size=V, width=16, seed=seed) for seed in (0, 1)])
    rows = shift_deviations(relative, [1, 1000])
    assert sorted(rows.place.unique()) == ["last layer out", "layer 0 in", "layer 1 in", "output"]
    assert rows.change.max() < 1e-9
    absolute = TransformerBatch([TransformerSettings(Sinusoidal(), vocab_size=V, width=16)])
    assert shift_deviations(absolute, [1000]).change.min() > 1e-2


def test_unknown_choices_are_named() -> None:
    with pytest.raises(ValueError, match="one of logits, weights"):
        mean_maps(by_hand(1.0), TASK, 8, of="maps")
    with pytest.raises(ValueError, match="one of mean, zero"):
        ablation(torch.ones(1, 1, 1, dtype=torch.bool), "noise")
    with pytest.raises(ValueError, match="offset=8 is not allowed: offset must be in 0 … length - 1 = 7"):
        target_weights(np.zeros((8, 8)), 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_gives_the_same_rows() -> None:
    here = by_hand(0.5, num_heads=2)
    there = TransformerBatch(here.models, "cuda", torch.float64, here.parameters)
    for ask in (
        lambda trained: evaluate_transformers([trained], [20], samples=20),
        lambda trained: head_table([trained], OFFSET, samples=20),
        lambda trained: cumulative_ablation(trained, OFFSET, samples=20),
        lambda trained: cumulative_patching(trained, OFFSET, samples=20),
    ):
        first, second = (ask(as_trained(batch)).select_dtypes("number").to_numpy(float) for batch in (here, there))
        np.testing.assert_allclose(first, second, atol=1e-6)
