"""Training sets of transformers: against a plain torch loop, a seed alone as in its set, what did not work is named."""

from dataclasses import replace
from threading import Barrier, Event

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.encodings import Learned, NoEncoding, Rotary, ShiftedLearned
from helpers.seeding import generator
from helpers.tasks import IGNORE
from helpers.tasks.copy import Copy
from helpers.tasks.shift import Shift
from helpers.training import NotFitted, TrainingDiverged
from helpers.transformer import TransformerBatch, TransformerSettings, TransformerTraining, train_transformers
from helpers.transformer.parts import in_parts
from helpers.transformer.training import clip_gradients, draw, model_losses

SMALL = TransformerSettings(vocab_size=5, width=16, num_heads=2, num_layers=1)
TASK = Shift(vocab_size=5, offset=2)
QUICK = TransformerTraining(task=TASK, train_length=8, steps=12, batch_size=4, warmup=4)


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)


def seeds(*numbers: int, **changes) -> list[TransformerSettings]:
    return [replace(SMALL, seed=number, **changes) for number in numbers]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_length": 2}, "train_length=2 is not allowed: train_length must be at least 3"),
        ({"steps": -1}, "steps=-1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"warmup": 1.5}, "warmup=1.5"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 is not allowed: learning_rate must be a number > 0"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"clip": 0}, "clip=0"),
        ({"lengths": "all"}, "one of fixed, mixed"),
        ({"on_failure": "ignore"}, "one of raise, report"),
        ({"task": "shift"}, "task='shift'"),
    ],
)
def test_a_wrong_setting_is_named(changes, message: str) -> None:
    with pytest.raises(ValueError, match="is not allowed") as error:
        replace(QUICK, **changes)
    assert message in str(error.value)


def test_a_task_with_another_alphabet_is_refused() -> None:
    with pytest.raises(ValueError, match=r"task\.vocab_size=16 is not allowed"):
        train_transformers(seeds(0), replace(QUICK, task=Shift(vocab_size=16)))


def test_a_table_shorter_than_the_training_length_is_refused() -> None:
    with pytest.raises(ValueError, match="position=7 is not allowed: position must be below table_length=7"):
        train_transformers(seeds(0, encoding=Learned(table_length=7)), QUICK)


def test_the_learning_rate_rises_linearly_then_falls_as_half_a_cosine_to_a_tenth() -> None:
    training = TransformerTraining(steps=110, warmup=10, learning_rate=0.02)
    rates = [training.rate(step) for step in range(111)]
    assert rates[:10] == pytest.approx([0.002 * (step + 1) for step in range(10)])
    assert rates[10] == pytest.approx(0.02)
    assert rates[60] == pytest.approx((0.02 + 0.002) / 2)
    assert rates[110] == pytest.approx(0.002)


def test_equals_a_plain_loop_over_one_model() -> None:
    """The same draws, torch's own loss and AdamW, one model in float64."""
    model, training = seeds(3)[0], replace(QUICK, weight_decay=0.1, clip=0.5)
    trained = train_transformers([model], training, dtype=torch.float64)
    batch = TransformerBatch([model], dtype=torch.float64)
    parameters = [p.requires_grad_(True) for p in batch.parameters.values()]
    optimiser = torch.optim.AdamW(parameters, weight_decay=0.1)
    sequences = Shift(vocab_size=5, offset=2).sample(12 * 4, 8, generator(3, "data"))
    for step in range(12):
        tokens, labels = (part[4 * step : 4 * step + 4] for part in sequences)
        loss = F.cross_entropy(batch(tokens[None])[0].flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        assert float(trained.losses[0, step]) == pytest.approx(loss.item(), abs=1e-10)
        optimiser.zero_grad()
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in parameters]).norm().item()
        for parameter in parameters:
            parameter.grad *= min(1.0, 0.5 / norm)
        optimiser.param_groups[0]["lr"] = training.rate(step)
        optimiser.step()
    for name, value in batch.parameters.items():
        torch.testing.assert_close(trained.batch.parameters[name], value.detach(), atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("encoding", [Rotary(), Learned(table_length=8), ShiftedLearned(table_length=20)])
@pytest.mark.parametrize("lengths", ["fixed", "mixed"])
def test_a_seed_alone_trains_as_in_its_set(threads: int, encoding, lengths: str) -> None:
    training = replace(QUICK, lengths=lengths)
    models = seeds(4, 0, 7, 2, encoding=encoding)
    together = train_transformers(models, training, dtype=torch.float64)
    for m, model in enumerate(models):
        alone = train_transformers([model], training, dtype=torch.float64)
        torch.testing.assert_close(alone.losses[0], together.losses[m], atol=1e-10, rtol=1e-10)
        for name, value in alone.batch.parameters.items():
            torch.testing.assert_close(value[0], together.batch.parameters[name][m], atol=1e-8, rtol=1e-8)


def test_mixed_lengths_cover_the_whole_range_and_score_no_padding() -> None:
    task = Copy(vocab_size=5)
    training = TransformerTraining(task=task, train_length=9, steps=200, batch_size=3, lengths="mixed")
    draws = draw(seeds(0, 1), training, [generator(s, "data") for s in (0, 1)], 200)
    separators = (draws.tokens == 4).float().argmax(-1)
    assert bool((separators == separators[..., :1]).all())  # one length a batch
    lengths = set()
    for step in range(200):
        for m in range(2):
            scored = draws.labels[step, m] != IGNORE
            size = int(separators[step, m, 0])
            assert bool((scored == ((torch.arange(9) >= size) & (torch.arange(9) < 2 * size))).all())
            lengths.add(size)
    assert lengths == {1, 2, 3, 4}


def test_positions_are_shared_when_the_models_agree() -> None:
    sources = [generator(s, "data") for s in (0, 1)]
    assert draw(seeds(0, 1), QUICK, sources, 3).positions.shape == (3, 1, 8)
    shifted = draw(seeds(0, 1, encoding=ShiftedLearned(table_length=99)), QUICK, sources, 3).positions
    assert shifted.shape == (3, 2, 8)


def test_losses_average_over_scored_positions() -> None:
    logits = torch.zeros(2, 3, 4, 5)
    labels = torch.full((2, 3, 4), IGNORE)
    labels[0, :, 2:], labels[1, 0, 3] = 1, 4
    logits[1, 0, 3, 4] = 2.0
    expected = torch.tensor([5.0, (4 + torch.e**2) / torch.e**2]).log()
    torch.testing.assert_close(model_losses(logits, labels), expected)


def test_each_model_is_clipped_by_its_own_norm() -> None:
    parameters = [torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 1, 2, requires_grad=True)]
    parameters[0].grad = torch.tensor([[3.0, 0, 0], [0.1, 0, 0]])
    parameters[1].grad = torch.tensor([[[0.0, 4.0]], [[0.2, 0.2]]])
    clip_gradients(parameters, 1.0)
    torch.testing.assert_close(parameters[0].grad, torch.tensor([[0.6, 0, 0], [0.1, 0, 0]]))
    torch.testing.assert_close(parameters[1].grad, torch.tensor([[[0.0, 0.8]], [[0.2, 0.2]]]))


def test_a_model_that_did_not_fit_is_named() -> None:
    trained = train_transformers(seeds(0, 6, encoding=NoEncoding()), QUICK)
    assert trained.status == ["not fitted", "not fitted"]
    with pytest.raises(NotFitted, match=r"none seed=0 \(not fitted, loss 1\..*; none seed=6 \(not fitted"):
        trained.require_fitted()


def test_one_that_fits_says_so() -> None:
    trained = train_transformers(seeds(0, 1), replace(QUICK, steps=400, batch_size=16, learning_rate=0.01))
    assert trained.require_fitted() is trained
    assert trained.status == ["fitted", "fitted"]
    assert bool((trained.final_loss() < 0.1).all())
    assert not any(p.requires_grad for p in trained.batch.parameters.values())


def test_divergence_is_raised_or_reported(threads: int) -> None:
    """With steps this long the logits overflow."""
    wild = replace(QUICK, learning_rate=1e30, warmup=0)
    with pytest.raises(
        TrainingDiverged, match=r"training diverged at step \d+ with learning_rate=1e\+30: rotary seed="
    ):
        train_transformers(seeds(0, 1, 2), wild)
    trained = train_transformers(seeds(0, 1, 2), replace(wild, on_failure="report"))
    assert trained.status == ["diverged"] * 3
    assert not any(bool(value.isnan().any()) for value in trained.batch.parameters.values())


def test_an_error_in_one_part_stops_the_others(threads: int) -> None:
    stopped, start = [], Barrier(threads)

    def work(part: TransformerBatch, stop: Event) -> None:
        start.wait(timeout=60)
        if part.models[0].seed == 0:
            raise RuntimeError("no more")
        stopped.append(stop.wait(timeout=60))

    with pytest.raises(RuntimeError, match="no more"):
        in_parts(TransformerBatch(seeds(0, 1, 2)), work)
    assert stopped == [True] * (threads - 1)


@pytest.mark.parametrize("most", [None, 1, 2, 3, 100])
def test_parts_are_bounded_even_and_in_order(threads: int, most: int | None) -> None:
    batch, names = TransformerBatch(seeds(*range(7))), torch.arange(7)

    def work(part: TransformerBatch, stop: Event, own: Tensor) -> list[int]:
        assert [model.seed for model in part.models] == own.tolist()
        assert torch.equal(part.parameters["0.up"], batch.parameters["0.up"][own])
        return own.tolist()

    parts = in_parts(batch, work, names, most=most)
    assert [seed for part in parts for seed in part] == list(range(7))
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= (most or 7)
    assert len(parts) == 7 or len(parts) % threads == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_trains_the_same_models() -> None:
    results = [train_transformers(seeds(0, 1), QUICK, device, torch.float64) for device in ("cpu", "cuda")]
    torch.testing.assert_close(results[0].losses, results[1].losses, atol=1e-8, rtol=1e-8)
