"""Training batches of heads: steps and losses from the formulas, each head as if alone, failures said by name."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import binom

import helpers.heads
import helpers.training
from helpers.encodings import Learned, NoEncoding, Rotary, ShiftedLearned, Sinusoidal
from helpers.heads import HeadBatch, HeadSettings, initial_parameters
from helpers.seeding import generator
from helpers.training import (
    CHUNK,
    LENGTHS,
    OBJECTIVES,
    OPTIMISERS,
    NotFitted,
    Trained,
    TrainingDiverged,
    TrainSettings,
    draw,
    head_losses,
    softplus,
    train,
)

TABLE = Learned(table_length=40)
DIRECT = HeadSettings(parameterisation="direct", head_dim=8, train_length=6, offset=2)
POSITIONAL = TrainSettings(objective="positional", fit_loss=100.0)


def features(head: HeadSettings, length: int) -> np.ndarray:
    """φ(δ), δ = 0 … length − 1, from its definition."""
    theta = np.array([head.encoding.base ** (-2 * r / head.head_dim) for r in range(head.head_dim // 2)])
    phase = np.outer(np.arange(length), theta)
    return np.concatenate([np.cos(phase), np.sin(phase)], axis=1)


def positional_loss_and_gradient(head: HeadSettings, w: np.ndarray) -> tuple[float, np.ndarray]:
    """−log a_k and its gradient Φᵀ(a − e_k) in the direct parameters."""
    phi = features(head, head.train_length)
    kernel = phi @ w
    weights = np.exp(kernel - kernel.max())
    weights /= weights.sum()
    return -np.log(weights[head.offset]), phi.T @ (weights - np.eye(head.train_length)[head.offset])


def one_draw(batch: HeadBatch, training: TrainSettings, steps: int = 3):
    return draw(batch, training, [generator(h.seed, "data") for h in batch.heads], steps, torch.float64)


def assert_same_bits(one: Trained, h: int, other: Trained, o: int) -> None:
    for name, value in one.batch.parameters.items():
        assert torch.equal(value[h], other.batch.parameters[name][o]), name
    torch.testing.assert_close(one.losses[h], other.losses[o], rtol=0, atol=0, equal_nan=True)
    assert one.status[h] == other.status[o]


# Steps, computed by hand


def by_hand(head: HeadSettings, training: TrainSettings) -> np.ndarray:
    """The direct parameters after training on the positional loss: each optimiser's textbook rule, in numpy."""
    w = initial_parameters(head)["amplitudes"].numpy().copy()
    rate, first, second = training.learning_rate, 0.0, 0.0
    for step in range(1, training.steps + 1):
        loss, gradient = positional_loss_and_gradient(head, w)
        w = w * (1 - rate * training.weight_decay)
        if training.optimiser == "sgd":
            w = w - rate * gradient
        elif training.optimiser == "ngd":
            w = w - rate * gradient / np.linalg.norm(gradient)
        elif training.optimiser == "polyak":
            w = w - rate * loss * gradient / np.linalg.norm(gradient) ** 2
        else:
            first = 0.9 * first + 0.1 * gradient
            second = 0.999 * second + 0.001 * gradient**2
            corrected = np.sqrt(second / (1 - 0.999**step)) + 1e-8
            w = w - rate * first / (1 - 0.9**step) / corrected
    return w


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_each_optimiser_takes_the_textbook_step_for_each_head(optimiser: str, steps: int, weight_decay: float) -> None:
    heads = [replace(DIRECT, seed=seed, offset=seed % 4, init_std=0.5 + seed) for seed in range(5)]
    training = replace(POSITIONAL, optimiser=optimiser, steps=steps, learning_rate=0.3, weight_decay=weight_decay)
    (trained,) = train(heads, training)
    for h, head in enumerate(heads):
        ours = trained.batch.parameters["amplitudes"][h].numpy()
        np.testing.assert_allclose(ours, by_hand(head, training), rtol=1e-9, atol=1e-11)


def factored_loss(head: HeadSettings, weights: dict[str, np.ndarray]) -> float:
    """−log a_k from THEORY's formulas for the logits, with the weights of one head."""
    width, positions = head.head_dim, np.arange(head.train_length)
    if "query" in weights:
        query, key = (weights[name][0::2] + 1j * weights[name][1::2] for name in ("query", "key"))
        theta = 1e4 ** (-2 * np.arange(width // 2) / width)
        logits = (query * key.conj() * np.exp(1j * np.outer(positions[::-1], theta))).real.sum(-1)
    else:
        rows = weights["table"][positions] if "table" in weights else sinusoids(positions, width)
        logits = rows @ weights["w_key"].T @ weights["w_query"] @ weights.get("shared_query", rows[-1])
    logits = logits / width**0.5
    return np.log(np.exp(logits - logits[-1 - head.offset]).sum())


def sinusoids(positions: np.ndarray, width: int) -> np.ndarray:
    phase = np.outer(positions, [1e4 ** (-2 * (j // 2) / width) for j in range(width)])
    return np.where(np.arange(width) % 2 == 0, np.sin(phase), np.cos(phase))


@pytest.mark.parametrize("query", ["shared", "positional"])
@pytest.mark.parametrize("encoding", [Rotary(), TABLE, Sinusoidal()], ids=["rotary", "learned", "sinusoidal"])
def test_a_plain_step_goes_down_the_slope_of_the_formula(encoding, query: str) -> None:
    """The step of 1 of gradient descent is minus the gradient: its part along a direction, by central differences."""
    heads = [HeadSettings(encoding, head_dim=8, offset=o, train_length=7, query=query, seed=o) for o in (1, 4)]
    (trained,) = train(heads, replace(POSITIONAL, optimiser="sgd", learning_rate=1.0, steps=1))
    for h, head in enumerate(heads):
        before = {name: value.numpy() for name, value in initial_parameters(head).items()}
        assert trained.losses[h, 0].item() == pytest.approx(factored_loss(head, before), rel=1e-12)
        rng = np.random.default_rng(h)
        way = {name: rng.standard_normal(value.shape) for name, value in before.items()}
        up, down = ({n: v + s * 1e-5 * way[n] for n, v in before.items()} for s in (1, -1))
        slope = (factored_loss(head, up) - factored_loss(head, down)) / 2e-5
        step = {name: trained.batch.parameters[name][h].numpy() - value for name, value in before.items()}
        assert -sum((step[name] * way[name]).sum() for name in way) == pytest.approx(slope, rel=1e-7)


@pytest.mark.parametrize("encoding", [Rotary(), TABLE], ids=["rotary", "learned"])
def test_a_normalised_step_has_the_length_of_the_learning_rate_over_all_of_a_heads_weights(encoding) -> None:
    heads = [HeadSettings(encoding, seed=seed) for seed in range(3)]
    (trained,) = train(heads, TrainSettings(optimiser="ngd", learning_rate=0.25, steps=1))
    for h, head in enumerate(heads):
        before = initial_parameters(head)
        moved = sum((trained.batch.parameters[name][h] - value).square().sum() for name, value in before.items())
        assert float(moved.sqrt()) == pytest.approx(0.25, rel=1e-9)


@pytest.mark.parametrize(("optimiser", "dtype"), product(("ngd", "polyak"), (torch.float32, torch.float64)))
def test_steps_stay_defined_when_the_loss_has_underflowed(optimiser: str, dtype: torch.dtype) -> None:
    """At these rates margins pass 104 (745), where the loss of float32 (float64) is exactly 0."""
    training = replace(POSITIONAL, optimiser=optimiser, steps=150, learning_rate=40.0)
    (trained,) = train([DIRECT], training, dtype=dtype)
    assert float(trained.losses[0, -1]) == 0.0
    assert bool(trained.batch.parameters["amplitudes"].isfinite().all())
    (sampled,) = train([DIRECT], replace(training, objective="sampled"), dtype=dtype)
    assert sampled.status == ["fitted"]


def test_a_head_with_nothing_to_learn_does_not_move() -> None:
    """A single key has weight 1: no loss, no gradient, for any rule that divides by one."""
    for optimiser, objective, lengths in product(OPTIMISERS, OBJECTIVES, LENGTHS):
        training = TrainSettings(optimiser=optimiser, objective=objective, lengths=lengths, steps=5, batch_size=4)
        (trained,) = train([HeadSettings(offset=0, train_length=1)], training)
        assert torch.equal(trained.batch.parameters["key"][0], initial_parameters(HeadSettings())["key"])
        assert float(trained.losses.abs().max()) < 1e-300


# Losses


@pytest.mark.parametrize("margin", [-50.0, 1.0, 50.0, 200.0, 700.0])
def test_the_positional_loss_and_its_gradient_are_exact_at_any_margin(margin: float) -> None:
    """−log a_k = log(1 + Σ e^{−z}), to a relative 1e-12, where 1 − a_k itself is far below rounding."""
    head = replace(DIRECT, head_dim=16)
    phi, k = features(head, head.train_length), head.offset
    aligned = phi[k]  # f(δ) = Σ_r cos θ_r(δ − k) has its only maximum at k
    z = np.delete(phi[k] @ aligned - phi @ aligned, k)
    scale = margin / z.min()
    batch = HeadBatch([head])
    batch.parameters["amplitudes"] = torch.from_numpy(scale * aligned)[None].requires_grad_()
    loss, surrogate = head_losses(batch, POSITIONAL, one_draw(batch, POSITIONAL), 0)

    odds = np.exp(-scale * z)
    np.testing.assert_allclose(loss.item(), np.log1p(odds.sum()), rtol=1e-10)
    np.testing.assert_allclose(surrogate.item(), np.log(odds.sum()), rtol=1e-12)
    slopes = np.delete(phi, k, 0) - phi[k]
    for value, share in ((loss, odds / (1 + odds.sum())), (surrogate, odds / odds.sum())):
        (gradient,) = torch.autograd.grad(value.sum(), batch.parameters["amplitudes"], retain_graph=True)
        expected = share @ slopes
        assert np.linalg.norm(gradient[0].numpy() - expected) <= 1e-10 * np.linalg.norm(expected)


@pytest.mark.parametrize(("encoding", "lengths"), product([Rotary(), TABLE, Sinusoidal(), NoEncoding()], LENGTHS))
def test_the_sampled_loss_is_minus_log_p_of_the_label_over_the_drawn_sequences(encoding, lengths: str) -> None:
    training = TrainSettings(lengths=lengths, batch_size=6)
    heads = [HeadSettings(encoding, head_dim=8, train_length=7, offset=o, vocab_size=3, seed=o) for o in (0, 2, 4)]
    batch = HeadBatch(heads)
    draws = one_draw(batch, training)
    for step in range(3):
        loss, _ = head_losses(batch, training, draws, step)
        for h, head in enumerate(heads):
            n = int(draws.lengths[h, step])
            logits = batch.logits(torch.arange(7)[None], torch.tensor([n - 1] * 3))[h, :n].numpy()
            weights = np.exp(logits) / np.exp(logits).sum()
            losses = [
                -np.log(sum(a for a, x in zip(weights, tokens, strict=True) if x == tokens[n - 1 - head.offset]))
                for tokens in draws.tokens[h, step, :, :n].tolist()
            ]
            np.testing.assert_allclose(loss[h].item(), np.mean(losses), rtol=0, atol=1e-12)


@pytest.mark.parametrize("margin", [-600.0, -60.0, 60.0, 600.0])
def test_the_sampled_loss_and_its_gradient_are_exact_at_any_margin(margin: float) -> None:
    """Two keys, the label's with the margin z: the loss is log(1 + e^{−z}), its slope in z −1/(1 + e^z)."""
    head = HeadSettings(Rotary(), train_length=2, offset=1, vocab_size=2, head_dim=2, parameterisation="direct")
    batch = HeadBatch([head])
    wave = features(head, 2)  # f(0) = w_0, f(1) = w·φ(1)
    direction = wave[1] - wave[0]
    w = torch.from_numpy(margin * direction / (direction @ direction))[None].requires_grad_()
    batch.parameters["amplitudes"] = w
    training = TrainSettings(batch_size=64)
    draws = one_draw(batch, training, steps=1)
    differ = (draws.tokens[0, 0, :, 0] != draws.tokens[0, 0, :, 1]).double().mean().item()  # else p(y) = 1
    loss, _ = head_losses(batch, training, draws, 0)
    (gradient,) = torch.autograd.grad(loss.sum(), w)
    np.testing.assert_allclose(loss.item(), differ * np.logaddexp(0, -margin), rtol=1e-12)
    np.testing.assert_allclose(gradient[0], -differ * direction / (1 + np.exp(margin)), rtol=1e-11)


def test_the_sampled_loss_tends_to_minus_log_of_the_target_weight_for_many_symbols() -> None:
    """With V = 10⁹ a token repeats within a sequence with probability below 1e-6: p(y) is the target's weight."""
    head = HeadSettings(vocab_size=10**9, seed=3)
    batch = HeadBatch([head])
    loss, _ = head_losses(batch, TrainSettings(), one_draw(batch, TrainSettings()), 0)
    exact, _ = head_losses(batch, POSITIONAL, one_draw(batch, POSITIONAL), 0)
    torch.testing.assert_close(loss, exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("vocab_size", "length"), [(2, 4), (3, 4), (5, 3)])
def test_the_positional_loss_of_a_linear_head_is_its_expectation(vocab_size: int, length: int) -> None:
    """T14 against the mean of ‖Σ_j f_j e_{x_j} − e_y‖² over all V^L sequences."""
    head = HeadSettings(
        train_length=length, offset=1, vocab_size=vocab_size, head_dim=8, normalisation="linear", seed=5
    )
    batch = HeadBatch([head])
    scores = batch.attention(length)[0].numpy()
    errors = []
    for tokens in product(range(vocab_size), repeat=length):
        error = np.zeros(vocab_size)
        np.add.at(error, list(tokens), scores)
        error[tokens[length - 2]] -= 1
        errors.append(error @ error)
    training = replace(POSITIONAL)
    loss, _ = head_losses(batch, training, one_draw(batch, training), 0)
    np.testing.assert_allclose(loss.item(), np.mean(errors), rtol=1e-12)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_sampled_loss_of_a_linear_head_is_its_squared_error(lengths: str) -> None:
    head = HeadSettings(train_length=6, offset=2, vocab_size=4, head_dim=8, normalisation="linear")
    batch, training = HeadBatch([head]), TrainSettings(lengths=lengths, batch_size=5)
    draws = one_draw(batch, training)
    for step in range(3):
        n = int(draws.lengths[0, step])
        scores = batch.logits(torch.arange(6)[None], torch.tensor([n - 1]))[0, :n].numpy()
        errors = []
        for tokens in draws.tokens[0, step, :, :n].numpy():
            error = np.bincount(tokens, weights=scores, minlength=4) - np.eye(4)[tokens[n - 3]]
            errors.append(error @ error)
        loss, _ = head_losses(batch, training, draws, step)
        np.testing.assert_allclose(loss.item(), np.mean(errors), rtol=1e-12)


def test_softplus_is_exact_on_both_sides_with_the_right_slope_at_zero() -> None:
    x = torch.tensor([-800.0, -700.0, -40.0, -1.0, 0.0, 1.0, 40.0, 1e6], dtype=torch.float64, requires_grad=True)
    value = softplus(x)
    np.testing.assert_allclose(value.detach(), np.logaddexp(0, x.detach()), rtol=1e-15)
    (slope,) = torch.autograd.grad(value.sum(), x)
    np.testing.assert_allclose(slope, 1 / (1 + np.exp(-np.clip(x.detach(), -705, None))), rtol=1e-12, atol=1e-305)


# A seed alone is the same seed in a batch


def variants():
    for encoding, query in product(
        [Rotary(), TABLE, ShiftedLearned(table_length=40), Sinusoidal(), NoEncoding()], (0, 1)
    ):
        absolute = encoding.rows(torch.zeros(1, 1, dtype=torch.long), {"table": torch.zeros(1, 40, 6)}, 6) is not None
        if absolute or not query:
            yield {"encoding": encoding, "query": ("shared", "positional")[query]}
    yield {"encoding": Rotary(pairs="half")}
    yield {"encoding": Rotary(), "parameterisation": "direct"}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("variant", variants(), ids=lambda v: "-".join(getattr(x, "name", x) for x in v.values()))
def test_a_head_alone_is_bit_for_bit_that_head_in_a_batch(variant, optimiser: str, lengths: str) -> None:
    for normalisation, objective in product(("softmax", "linear"), OBJECTIVES):
        heads = [
            HeadSettings(**variant, normalisation=normalisation, head_dim=6, train_length=5, offset=1 + s % 3, seed=s)
            for s in range(5)
        ]
        training = TrainSettings(
            optimiser=optimiser, lengths=lengths, objective=objective, steps=4, batch_size=5, learning_rate=0.05,
            weight_decay=0.01, on_failure="report",
        )  # fmt: skip
        (together,), (alone,) = train(heads, training), train([heads[3]], training)
        assert_same_bits(alone, 0, together, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("encoding", [Rotary(), TABLE], ids=["rotary", "learned"])
def test_the_order_and_number_of_heads_change_no_bit(encoding, dtype: torch.dtype) -> None:
    heads = [HeadSettings(encoding, offset=1 + seed % 7, seed=seed) for seed in range(33)]
    training = TrainSettings(steps=40, batch_size=16, lengths="mixed", weight_decay=0.1)
    (forward,), (backward,) = train(heads, training, dtype=dtype), train(heads[::-1], training, dtype=dtype)
    (few,) = train(heads[4:7], training, dtype=dtype)
    for h in range(33):
        assert_same_bits(forward, h, backward, 32 - h)
    for h in range(3):
        assert_same_bits(few, h, forward, 4 + h)


def test_heads_of_other_structures_change_no_bit() -> None:
    heads = [HeadSettings(seed=1), HeadSettings(NoEncoding(), seed=1), HeadSettings(seed=2)]
    mixed, (alone,) = train(heads, TrainSettings(steps=5)), train([heads[2]], TrainSettings(steps=5))
    assert [t.batch.heads for t in mixed] == [(heads[0], heads[2]), (heads[1],)]
    assert_same_bits(alone, 0, mixed[0], 1)


def test_torchs_global_generator_and_the_number_of_later_steps_do_not_matter() -> None:
    """A run of 40 steps is the start of a run of 70, whatever the chunks in which data are drawn."""
    head = HeadSettings(ShiftedLearned(table_length=40))
    short = TrainSettings(steps=CHUNK + 8, lengths="mixed")
    (one,) = train([head], short)
    torch.manual_seed(123)
    (two,) = train([head], replace(short, steps=2 * CHUNK + 6, snapshots=(CHUNK + 8,)))
    assert torch.equal(one.losses[0], two.losses[0, : CHUNK + 8])
    for name, value in two.snapshots[CHUNK + 8].items():
        assert torch.equal(value, one.batch.parameters[name])


# Data


def test_data_and_model_are_separate_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another data seed leaves the initial weights, another model seed the data."""
    head, training = HeadSettings(seed=4), TrainSettings(steps=1, snapshots=(0,))
    (plain,) = train([head], training)
    data = one_draw(HeadBatch([head]), training).tokens

    with monkeypatch.context() as patch:
        patch.setattr(helpers.training, "generator", lambda seed, stream: generator(seed + 1000, stream))
        (other_data,) = train([head], training)
    assert torch.equal(other_data.snapshots[0]["query"], plain.snapshots[0]["query"])
    assert not torch.equal(other_data.losses, plain.losses)

    monkeypatch.setattr(helpers.heads, "generator", lambda seed, stream: generator(seed + 1000, stream))
    moved = HeadBatch([head])
    assert not torch.equal(moved.parameters["query"], plain.snapshots[0]["query"])
    assert torch.equal(one_draw(moved, training).tokens, data)


def test_encodings_of_one_seed_see_the_same_sequences() -> None:
    heads = [HeadSettings(encoding, seed=6) for encoding in (Rotary(), TABLE, Sinusoidal(), NoEncoding())]
    tokens = [one_draw(HeadBatch([head]), TrainSettings()).tokens for head in heads]
    assert all(torch.equal(tokens[0], other) for other in tokens[1:])
    other_seed = one_draw(HeadBatch([HeadSettings(seed=7)]), TrainSettings()).tokens
    assert not torch.equal(tokens[0], other_seed)


def test_lengths_are_fixed_or_all_of_offset_plus_one_to_the_training_length() -> None:
    """400 draws over 5 lengths miss one with probability 5 · (4/5)^400 < 1e-37."""
    heads = [HeadSettings(offset=3, train_length=8, seed=seed) for seed in range(2)]
    fixed = one_draw(HeadBatch(heads), TrainSettings(batch_size=1), steps=400).lengths
    mixed = one_draw(HeadBatch(heads), TrainSettings(batch_size=1, lengths="mixed"), steps=400).lengths
    assert fixed.unique().tolist() == [8]
    assert [row.unique().tolist() for row in mixed] == [[4, 5, 6, 7, 8]] * 2
    assert not torch.equal(mixed[0], mixed[1])


def test_matches_mark_the_keys_that_hold_the_label() -> None:
    heads = [HeadSettings(offset=o, train_length=6, vocab_size=2, seed=o) for o in (1, 4)]
    draws = one_draw(HeadBatch(heads), TrainSettings(batch_size=4, lengths="mixed"))
    for h, step, b in product(range(2), range(3), range(4)):
        tokens = draws.tokens[h, step, b].tolist()
        label = tokens[int(draws.lengths[h, step]) - 1 - heads[h].offset]
        assert draws.matches[h, step, b].tolist() == [float(token == label) for token in tokens]


# Unseen rows (T4)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("query", ["shared", "positional"])
def test_rows_beyond_the_training_length_keep_every_bit(optimiser: str, query: str) -> None:
    heads = [HeadSettings(TABLE, query=query, seed=seed) for seed in range(3)]
    for lengths in LENGTHS:
        (trained,) = train(heads, TrainSettings(optimiser=optimiser, steps=40, lengths=lengths, snapshots=(0,)))
        before, after = trained.snapshots[0]["table"], trained.batch.parameters["table"]
        assert torch.equal(before[:, 16:], after[:, 16:])
        assert bool((before[:, :16] != after[:, :16]).any(-1).all()), "every row in range moved"


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_decoupled_decay_shrinks_unseen_rows_by_its_power_and_turns_none(optimiser: str) -> None:
    training = TrainSettings(optimiser=optimiser, steps=50, learning_rate=0.02, weight_decay=0.5, snapshots=(0,))
    (trained,) = train([HeadSettings(TABLE)], training)
    unseen, first = trained.batch.parameters["table"][:, 16:], trained.snapshots[0]["table"][:, 16:]
    torch.testing.assert_close(unseen, first * (1 - 0.02 * 0.5) ** 50, rtol=1e-12, atol=0)


def test_random_shifts_train_every_row() -> None:
    """60 steps draw 25 starts for 16 rows: row 0 is missed with probability (24/25)^60 = 0.09, so ask for most rows."""
    (trained,) = train([HeadSettings(ShiftedLearned(table_length=40))], TrainSettings(steps=60, snapshots=(0,)))
    moved = (trained.batch.parameters["table"] != trained.snapshots[0]["table"]).any(-1)
    assert int(moved.sum()) >= 34
    assert bool(moved[0, 16:24].all()), "rows that are beyond the training length without a shift"


# What a run reports


def test_losses_snapshots_and_status_are_kept() -> None:
    training = TrainSettings(steps=40, snapshots=(0, 3, 40), fit_loss=50.0)
    (trained,) = train([HeadSettings(seed=seed) for seed in range(2)], training)
    assert trained.losses.shape == (2, 40)
    assert bool(trained.losses.isfinite().all())
    assert sorted(trained.snapshots) == [0, 3, 40]
    assert trained.status == ["fitted", "fitted"]
    assert trained.require_fitted() is trained
    torch.testing.assert_close(trained.final_loss(), trained.losses[:, -CHUNK:].mean(1))
    assert torch.equal(trained.at(40).parameters["key"], trained.batch.parameters["key"])
    assert torch.equal(trained.at(0).parameters["key"], HeadBatch(trained.batch.heads).parameters["key"])
    assert not trained.batch.parameters["key"].requires_grad
    (three,) = train(trained.batch.heads, TrainSettings(steps=3))
    assert torch.equal(trained.at(3).attention(9), three.batch.attention(9))
    with pytest.raises(ValueError, match=r"^step=7 is not allowed: step must be one of the snapshots \[0, 3, 40\]$"):
        trained.at(7)


def test_the_recorded_loss_is_the_one_before_the_step() -> None:
    training = TrainSettings(steps=2)
    (trained,) = train([HeadSettings()], training)
    batch = HeadBatch([HeadSettings()])
    loss, _ = head_losses(batch, training, one_draw(batch, training, CHUNK), 0)
    assert torch.equal(trained.losses[:, 0], loss)


def test_no_steps_leave_an_untrained_head() -> None:
    (trained,) = train([HeadSettings()], TrainSettings(steps=0, snapshots=(0,)))
    assert trained.status == ["not fitted"]
    assert torch.equal(trained.batch.parameters["query"][0], initial_parameters(HeadSettings())["query"])


def test_heads_that_do_not_fit_are_named_with_their_loss() -> None:
    heads = [HeadSettings(NoEncoding(), seed=5), HeadSettings(seed=6, offset=3)]
    settings = TrainSettings(steps=200, learning_rate=0.05)
    none, rotary = train(heads, settings)
    rotary.require_fitted()
    assert none.status == ["not fitted"]
    message = rf"did not fit their .*: none seed=5 offset=5 \(not fitted, loss {float(none.final_loss()):.3g}\)$"
    with pytest.raises(NotFitted, match=message):
        none.require_fitted()


def test_the_loss_of_equal_weights_is_the_one_counting_gives() -> None:
    """p(y) = (1 + B)/n with B ~ Binomial(n − 1, 1/V); the mean of 12,800 losses, to 6 standard errors."""
    n, v, steps = 16, 16, 200
    (trained,) = train([HeadSettings(NoEncoding(), train_length=n, vocab_size=v)], TrainSettings(steps=steps))
    others = np.arange(n)
    chances, losses = binom.pmf(others, n - 1, 1 / v), -np.log((1 + others) / n)
    mean = chances @ losses
    error = np.sqrt(chances @ (losses - mean) ** 2 / (steps * 64))
    assert abs(float(trained.losses.mean()) - mean) < 6 * error


ABSURD = TrainSettings(optimiser="sgd", learning_rate=1e200, steps=20)
LINEAR = HeadSettings(normalisation="linear")


def test_a_loss_that_is_not_finite_stops_training_and_is_named() -> None:
    message = (
        r"^training diverged at step \d+ with sgd, learning_rate=1e\+200: "
        r"rotary seed=7 offset=4 loss=(nan|inf); rotary seed=8 offset=5 loss=(nan|inf)$"
    )
    with pytest.raises(TrainingDiverged, match=message):
        train([replace(LINEAR, seed=7, offset=4), replace(LINEAR, seed=8)], ABSURD)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_diverging_head_is_reported_and_its_neighbours_keep_every_bit(optimiser: str, objective: str) -> None:
    """A head whose initial weights overflow stands between two that train."""
    healthy = [replace(LINEAR, seed=seed) for seed in (1, 2)]
    bad = replace(LINEAR, seed=3, init_std=1e160)
    training = TrainSettings(
        optimiser=optimiser, objective=objective, steps=40, learning_rate=1e-3, batch_size=8, on_failure="report",
        snapshots=(10,),
    )  # fmt: skip
    (together,), (alone,) = train([healthy[0], bad, healthy[1]], training), train(healthy, training)
    assert together.status[1] == "diverged"
    for h, t in ((0, 0), (1, 2)):
        assert_same_bits(alone, h, together, t)
        assert torch.equal(alone.snapshots[10]["query"][h], together.snapshots[10]["query"][t])
    kept = together.batch.parameters["query"][1]
    assert torch.equal(kept, initial_parameters(bad)["query"]), "as it was when its loss stopped being finite"
    with pytest.raises(NotFitted, match=r"rotary seed=3 offset=5 \(diverged, loss (inf|nan)\)"):
        together.require_fitted()


def test_divergence_in_the_last_step_is_not_missed() -> None:
    (reported,) = train([LINEAR], replace(ABSURD, steps=1, learning_rate=1e308, on_failure="report"))
    assert bool(reported.losses.isfinite().all())
    assert reported.status == ["diverged"]
    with pytest.raises(TrainingDiverged, match="diverged at step 1 with sgd"):
        train([LINEAR], replace(ABSURD, steps=1, learning_rate=1e308))


def test_all_heads_may_diverge_when_only_reporting() -> None:
    (trained,) = train([LINEAR, replace(LINEAR, seed=1)], replace(ABSURD, on_failure="report"))
    assert trained.status == ["diverged", "diverged"]


# Wrong settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimiser": "adamw"}, r"optimiser='adamw' .* one of adam, sgd, ngd, polyak \(did you mean 'adam'\?\)"),
        ({"optimiser": "lbfgs"}, "optimiser='lbfgs' is not allowed: optimiser must be one of adam, sgd, ngd, polyak"),
        ({"lengths": "random"}, "lengths='random' is not allowed: lengths must be one of fixed, mixed"),
        ({"objective": "mse"}, "objective='mse' is not allowed: objective must be one of sampled, positional"),
        ({"on_failure": "ignore"}, "on_failure='ignore' is not allowed: on_failure must be one of raise, report"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 is not allowed: learning_rate must be a number > 0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan is not allowed: learning_rate must be a number > 0"),
        ({"steps": -1}, "steps=-1 is not allowed: steps must be an integer ≥ 0"),
        ({"steps": 1e3}, "steps=1000.0 is not allowed: steps must be an integer ≥ 0"),
        ({"batch_size": 0}, "batch_size=0 is not allowed: batch_size must be an integer ≥ 1"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 is not allowed: weight_decay must be a number ≥ 0"),
        ({"steps": 5, "snapshots": (0, 6, -1)}, r"snapshots=\[6, -1\] is not allowed: .* steps in 0 … 5"),
    ],
)
def test_wrong_settings_are_one_line_that_names_them(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$") as error:
        TrainSettings(**settings)
    assert "\n" not in str(error.value)


def test_a_wrong_device_and_a_training_length_beyond_the_table_are_named() -> None:
    with pytest.raises(ValueError, match=r"^device='gpu' is not allowed: device must be one of auto, cpu"):
        train([HeadSettings()], TrainSettings(steps=1), device="gpu")
    with pytest.raises(ValueError, match=r"^position=15 is not allowed: position must be below table_length=12$"):
        train([HeadSettings(Learned(table_length=12))], TrainSettings(steps=1))
    with pytest.raises(ValueError, match=r"^length=16 is not allowed: length must be at most table_length=12$"):
        train([HeadSettings(ShiftedLearned(table_length=12))], TrainSettings(steps=1))


# Devices


def test_auto_trains_on_a_machine_with_nothing_but_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    (auto,), (cpu,) = (train([HeadSettings()], TrainSettings(steps=3), device=device) for device in ("auto", "cpu"))
    assert auto.batch.device == torch.device("cpu")
    assert_same_bits(auto, 0, cpu, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("encoding", [Rotary(), TABLE, Sinusoidal()], ids=["rotary", "learned", "sinusoidal"])
def test_cuda_agrees_with_the_cpu(encoding) -> None:
    heads = [HeadSettings(encoding, seed=seed) for seed in range(3)]
    (cuda,), (cpu,) = (train(heads, TrainSettings(steps=20), device=device) for device in ("auto", "cpu"))
    assert cuda.batch.device.type == "cuda"
    torch.testing.assert_close(cuda.losses, cpu.losses, rtol=1e-8, atol=1e-8)
    for name, value in cpu.batch.parameters.items():
        torch.testing.assert_close(cuda.batch.parameters[name].cpu(), value, rtol=1e-6, atol=1e-6)
