"""Trained learned-absolute heads against T4 and T5: rows without gradient, the pinned arg-max, its lifetime."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from helpers.encodings import Learned, Rotary, ShiftedLearned
from helpers.evaluation import evaluate
from helpers.heads import HeadBatch, HeadSettings
from helpers.training import LENGTHS, OPTIMISERS, TrainSettings, train

OFFSET, TRAIN_LENGTH = 2, 8
PINNED = TRAIN_LENGTH - 1 - OFFSET


def heads(count: int, encoding: Learned, query: str = "shared", width: int = 8) -> list[HeadSettings]:
    common = {"encoding": encoding, "offset": OFFSET, "train_length": TRAIN_LENGTH, "head_dim": width, "query": query}
    return [HeadSettings(**common, seed=seed) for seed in range(count)]


def initial_table(batch: HeadBatch) -> torch.Tensor:
    return HeadBatch(batch.heads).parameters["table"]


@pytest.fixture(scope="module")
def shared() -> HeadBatch:
    settings = TrainSettings(steps=150, learning_rate=0.02)
    return train(heads(24, Learned(table_length=64)), settings)[0].require_fitted().batch


def test_the_query_direction_is_a_unit_vector_that_gives_the_logits(shared: HeadBatch) -> None:
    p, direction = shared.parameters, shared.query_direction()
    assert torch.allclose(direction.norm(dim=-1), torch.ones(len(shared), dtype=torch.float64))
    for h in range(len(shared)):
        pulled = p["w_key"][h].T @ (p["w_query"][h] @ p["shared_query"][h])
        by_hand = (p["table"][h, :20] @ direction[h]) * pulled.norm() / 8**0.5
        assert torch.allclose(shared.kernel(20)[h].flip(-1), by_hand, atol=1e-10)


@pytest.mark.parametrize("settings", [{"encoding": Rotary()}, {"encoding": Learned(8), "query": "positional"}])
def test_only_a_shared_query_over_rows_has_a_direction(settings: dict) -> None:
    batch = HeadBatch([HeadSettings(**settings, offset=OFFSET, train_length=TRAIN_LENGTH)])
    with pytest.raises(ValueError, match="query="):
        batch.query_direction()


def test_selected_heads_are_copies_in_the_order_asked_for(shared: HeadBatch) -> None:
    chosen = shared.select([3, 0, 3])
    assert [head.seed for head in chosen.heads] == [3, 0, 3]
    assert chosen.offsets.tolist() == [OFFSET] * 3
    assert torch.equal(chosen.attention(12), shared.attention(12)[[3, 0, 3]])
    before = shared.parameters["table"].clone()
    chosen.parameters["table"].zero_()
    assert torch.equal(shared.parameters["table"], before)
    with pytest.raises(ValueError, match="at least one head"):
        shared.select([])


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("query", ["shared", "positional"])
def test_t4_unseen_rows_keep_every_bit_and_seen_rows_move(optimiser: str, lengths: str, query: str) -> None:
    settings = TrainSettings(optimiser=optimiser, lengths=lengths, steps=30, on_failure="report")
    batch = train(heads(2, Learned(table_length=20), query), settings)[0].batch
    trained, start = batch.parameters["table"], initial_table(batch)
    assert torch.equal(trained[:, TRAIN_LENGTH:].view(torch.int64), start[:, TRAIN_LENGTH:].view(torch.int64))
    assert bool((trained[:, :TRAIN_LENGTH] != start[:, :TRAIN_LENGTH]).any(-1).all())


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_t4_decoupled_weight_decay_shrinks_unseen_rows_by_its_factor(optimiser: str) -> None:
    settings = TrainSettings(optimiser=optimiser, steps=50, learning_rate=0.02, weight_decay=0.5)
    batch = train(heads(2, Learned(table_length=20)), settings)[0].batch
    expected = (1 - 0.02 * 0.5) ** 50 * initial_table(batch)
    assert torch.allclose(batch.parameters["table"][:, TRAIN_LENGTH:], expected[:, TRAIN_LENGTH:], rtol=1e-12, atol=0)


def test_t5_the_trained_head_stays_at_its_training_target_and_at_chance(shared: HeadBatch) -> None:
    for length in (TRAIN_LENGTH + 1, TRAIN_LENGTH + 20):
        weights = shared.attention(length)
        sure = weights[:, PINNED] > 0.5  # the hypothesis of T5 (2)
        assert int(sure.sum()) >= 12
        source = torch.Generator().manual_seed(length)
        tokens = torch.randint(16, (4000, length), generator=source)
        for row in weights[sure]:
            mass = torch.zeros(4000, 16, dtype=torch.float64).scatter_add_(1, tokens, row.expand(4000, -1))
            assert torch.equal(mass.argmax(-1), tokens[:, PINNED])
        accuracy = (tokens[:, PINNED] == tokens[:, length - 1 - OFFSET]).double().mean()
        assert abs(float(accuracy) - 1 / 16) < 4 * (15 / 256 / 4000) ** 0.5


def test_t5_lifetime_under_fresh_unseen_rows(shared: HeadBatch) -> None:
    """Redrawing the unseen rows of one head, pinned for P(n) = Φ(γ/σ)^(n−L) of the draws, σ = 1."""
    draws, lengths = 500, (9, 12, 24, 64)
    gamma = (shared.parameters["table"][:, PINNED] * shared.query_direction()).sum(-1)
    head = int(gamma.argmin())
    copies = shared.select([head] * draws)
    unseen = copies.parameters["table"][:, TRAIN_LENGTH:]
    unseen.copy_(torch.randn(unseen.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    for length in lengths:
        expected = norm.cdf(float(gamma[head])) ** (length - TRAIN_LENGTH)
        share = float((copies.attention(length).argmax(-1) == PINNED).double().mean())
        assert abs(share - expected) < 4 * ((expected * (1 - expected) + 1 / draws) / draws) ** 0.5


def test_a_shared_query_misses_mixed_lengths_by_at_least_the_proved_amount() -> None:
    """No table fits: over k + 1 = 3 consecutive lengths the target weights add up to at most 1, so over 6 to 2."""
    trained = train(heads(4, Learned(table_length=8)), TrainSettings(steps=200, lengths="mixed"))[0]
    lengths = range(OFFSET + 1, TRAIN_LENGTH + 1)
    target = torch.stack([trained.batch.attention(n)[:, n - 1 - OFFSET] for n in lengths])
    assert bool((target[:3].sum(0) <= 1 + 1e-12).all())
    assert bool((target[3:].sum(0) <= 1 + 1e-12).all())
    floor = -np.log(1 / 3 + (1 - 1 / 3) / 16)
    assert float(trained.losses[:, -100:].mean()) > floor - 0.1
    assert trained.status == ["not fitted"] * 4


def test_random_shifts_train_every_row_and_carry_over_to_the_end_of_the_table() -> None:
    settings = TrainSettings(steps=800, learning_rate=0.01)
    trained = train(heads(3, ShiftedLearned(table_length=24), "positional", width=24), settings)
    table = trained[0].batch.parameters["table"]
    assert bool((table != initial_table(trained[0].batch)).any(-1).all())
    rows = evaluate(trained, [TRAIN_LENGTH, 12, 24], samples=500)
    assert rows.accuracy.min() > 0.95
    with pytest.raises(ValueError, match="position=24 is not allowed: position must be below table_length=24"):
        trained[0].batch.attention(25)
