"""Theory against training: dilution, accuracy and ghosts of trained heads follow from their carriers."""

import pkgutil

import numpy as np
import pytest
import torch

from helpers import evaluation, theory
from helpers.claims import load_claims
from helpers.encodings import Rotary
from helpers.evaluation import accuracy_curves, sampled_accuracy
from helpers.heads import HeadSettings
from helpers.seeding import generator
from helpers.training import Trained, TrainSettings, train

LENGTH = 1024


@pytest.fixture(scope="module")
def trained() -> Trained:
    heads = [HeadSettings(Rotary(), offset, head_dim=16, seed=seed) for offset in (3, 9) for seed in range(3)]
    (result,) = train(heads, TrainSettings(steps=400, learning_rate=0.03))
    return result.require_fitted()


@pytest.fixture(scope="module")
def predicted_kernels(trained: Trained) -> np.ndarray:
    carriers = trained.batch.carriers().numpy()
    return theory.kernel(carriers, theory.rotary_frequencies(16), np.arange(LENGTH))


def test_the_kernel_and_the_target_weight_follow_from_the_carriers(
    trained: Trained, predicted_kernels: np.ndarray
) -> None:
    np.testing.assert_allclose(predicted_kernels, trained.batch.kernel(LENGTH).numpy(), atol=1e-9)
    for length in (16, 100, LENGTH):
        attention = trained.batch.attention(length)
        for h, head in enumerate(trained.batch.heads):
            expected = theory.target_weight(predicted_kernels[h], head.offset, [length])[0]
            assert float(attention[h, length - 1 - head.offset]) == pytest.approx(expected, abs=1e-8)


def test_accuracy_is_that_of_the_predicted_kernel(trained: Trained, predicted_kernels: np.ndarray) -> None:
    for h, head in enumerate(trained.batch.heads):
        rule = torch.as_tensor(predicted_kernels[h, :256][::-1].copy()).softmax(-1)
        (a, a_error), (b, b_error) = (
            sampled_accuracy(weights, head.vocab_size, head.offset, 4000, generator(head.seed, "evaluation", path))
            for path, weights in enumerate((trained.batch.attention(256)[h], rule))
        )
        assert abs(a - b) <= 5.5 * np.hypot(a_error, b_error)


def test_ghosts_predicted_from_the_carriers_are_in_the_forward_pass(trained: Trained) -> None:
    logits = trained.batch.kernel(LENGTH)
    found = 0
    for h, head in enumerate(trained.batch.heads):
        carriers = trained.batch.carriers()[h]
        predicted = theory.ghost_offsets(carriers, theory.rotary_frequencies(16), head.offset, 16, LENGTH)
        scanned = torch.where(logits[h, 16:] >= logits[h, head.offset])[0] + 16
        assert predicted.delta.tolist() == scanned.tolist()
        found += len(scanned)
    assert found > 0, "no head has a ghost: the comparison is empty"


def test_the_accuracy_curve_of_kernels_that_counting_solves() -> None:
    perfect, silent, ghost = torch.zeros(3, 40, dtype=torch.float64)
    perfect[3] = 50.0
    ghost[[3, 20]] = 50.0
    kernels = torch.stack([perfect, silent, ghost])
    samples, symbols = 4000, 8
    sources = [generator(seed, "evaluation") for seed in range(3)]
    curves = accuracy_curves(kernels, symbols, [3, 3, 3], samples, sources)
    assert curves[:, :3].isnan().all()
    assert curves[:, 3:].isfinite().all()
    assert (curves[0, 3:] == 1).all()
    assert (curves[2, 3:20] == 1).all()
    # From δ = 20 on the ghost's token ties with the target's: right if equal, else half of the time.
    tie = 1 / symbols + (1 - 1 / symbols) / 2
    assert abs(float(curves[2, 20]) - tie) < 5.5 * (tie * (1 - tie) / samples) ** 0.5


def test_the_accuracy_curve_is_the_sampled_accuracy_at_each_length(predicted_kernels: np.ndarray) -> None:
    kernel = torch.as_tensor(predicted_kernels[:1, :300])
    curve = accuracy_curves(kernel, 16, [3], 4000, [generator(0, "evaluation", 7)])[0]
    for length in (16, 100, 300):
        weights = kernel[0, :length].flip(0).softmax(-1)
        accuracy, error = sampled_accuracy(weights, 16, 3, 4000, generator(1, "evaluation", 8))
        assert abs(float(curve[length - 1]) - accuracy) <= 5.5 * (2**0.5) * error


def test_a_head_has_the_same_curve_alone_and_in_a_batch(predicted_kernels: np.ndarray) -> None:
    kernels = torch.as_tensor(predicted_kernels[:, :64])
    offsets = [3, 3, 3, 9, 9, 9]
    together = accuracy_curves(kernels, 16, offsets, 50, [generator(h, "evaluation") for h in range(6)])
    alone = accuracy_curves(kernels[4:5], 16, [9], 50, [generator(4, "evaluation")])
    assert torch.equal(together[4:5].nan_to_num(-1), alone.nan_to_num(-1))


def test_the_curves_are_the_same_however_many_heads_fit_in_memory(
    predicted_kernels: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = torch.as_tensor(predicted_kernels[:, :64])
    curves = []
    for limit in (2**25, 2 * 64 * 50, 1):  # all heads at once, two at a time, one at a time
        monkeypatch.setattr(evaluation, "MAX_NESTED", limit)
        sources = [generator(h, "evaluation") for h in range(6)]
        curves.append(accuracy_curves(kernels, 16, [3, 3, 3, 9, 9, 9], 50, sources).nan_to_num(-1))
    assert torch.equal(curves[0], curves[1])
    assert torch.equal(curves[0], curves[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [({"samples": 0}, "samples=0"), ({"offsets": [40]}, "length=40"), ({"offsets": [3, 64]}, "length=40")],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments = {"offsets": [3], "samples": 10} | change
    kernels = torch.zeros(len(arguments["offsets"]), 40, dtype=torch.float64)
    sources = [generator(0, "evaluation")] * len(kernels)
    with pytest.raises(ValueError, match=message):
        accuracy_curves(kernels, 16, arguments["offsets"], arguments["samples"], sources)


@pytest.mark.parametrize("claim", [c for c in load_claims().values() if c.helper], ids=lambda c: c.id)
def test_the_helper_that_a_claim_names_exists(claim) -> None:
    assert callable(pkgutil.resolve_name(claim.helper))
