"""Trained rotary heads against T6–T9: the rule each parameterisation takes, its rank, its alignment; optimisers."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.linalg import orth
from scipy.special import expit, logsumexp

from helpers.encodings import Rotary
from helpers.heads import HeadBatch, HeadSettings
from helpers.theory import (
    RuleSetting,
    active_carriers,
    alignment,
    difference_features,
    direction_cosine,
    group_sparse_rule,
    hard_margin,
    hard_margin_rule,
    kernel,
    kkt_report,
    l2_rule,
    logit_matrix,
    logit_rank,
    margins,
    normalised_margin,
    participation_ratio,
    rival_rules,
    weights_from_carriers,
)
from helpers.training import Trained, TrainSettings, train

MAIN = RuleSetting(16, 5, 32, 1e4)
CLOSE = RuleSetting(16, 5, 32, 100.0)  # where two rules nearly tie
NARROW = RuleSetting(16, 3, 8, 1e4)  # where the rule is not aligned
SETTINGS = [MAIN, CLOSE, NARROW]
NORMS = {"direct": "l2", "factored": "group_sparse"}
SEEDS = 3


def fit(setting: RuleSetting, parameterisation: str, optimiser: str, rate: float, steps: int, **changes) -> Trained:
    heads = [
        HeadSettings(
            Rotary(base=setting.base),
            setting.offset,
            setting.train_length,
            head_dim=setting.head_dim,
            parameterisation=parameterisation,
            init_std=changes.get("init_std", 0.1),
            seed=seed,
        )
        for seed in range(SEEDS)
    ]
    snapshots = changes.get("snapshots", ())
    return train(heads, TrainSettings(optimiser, rate, steps, 1, objective="positional", snapshots=snapshots))[0]


def carriers_of(batch: HeadBatch) -> NDArray[np.complex128]:
    return batch.carriers().numpy()


@pytest.fixture(scope="module")
def direct() -> dict[RuleSetting, NDArray[np.complex128]]:
    return {s: carriers_of(fit(s, "direct", "ngd", 1.0, 1000).batch) for s in SETTINGS}


@pytest.fixture(scope="module")
def factored() -> dict[RuleSetting, HeadBatch]:
    return {s: fit(s, "factored", "ngd", 3.0, 2500).batch for s in SETTINGS}


def rule_of(setting: RuleSetting, norm: str):
    return hard_margin_rule(setting.frequencies, setting.offset, setting.train_length, norm)


def margin_ratio(setting: RuleSetting, carriers: NDArray[np.complex128], norm: str) -> NDArray[np.float64]:
    reached = normalised_margin(carriers, setting.frequencies, setting.offset, setting.train_length, norm)
    return reached / rule_of(setting, norm).margin


@pytest.mark.parametrize("setting", SETTINGS)
def test_t6_direct_heads_take_the_l2_rule(setting: RuleSetting, direct: dict) -> None:
    own, other = rule_of(setting, "l2"), rule_of(setting, "group_sparse")
    assert direction_cosine(direct[setting], own.carriers).min() > 0.9999
    assert margin_ratio(setting, direct[setting], "l2").min() > 0.998
    assert margin_ratio(setting, direct[setting], "l2").max() <= 1 + 1e-9
    assert direction_cosine(direct[setting], other.carriers).max() < 0.9999
    report = kkt_report(direct[setting][0], setting.frequencies, setting.offset, setting.train_length, "l2")
    assert report.is_kkt(0.05)


@pytest.mark.parametrize("setting", SETTINGS)
def test_t7_factored_heads_take_the_margin_of_the_group_sparse_rule(setting: RuleSetting, factored: dict) -> None:
    carriers = carriers_of(factored[setting])
    assert margin_ratio(setting, carriers, "group_sparse").min() > 0.98
    assert margin_ratio(setting, carriers, "group_sparse").max() <= 1 + 1e-9
    # The ℓ2 rule is another one: on its own terms it is no optimum of the factored head.
    assert margin_ratio(setting, rule_of(setting, "l2").carriers, "group_sparse") < 0.98
    best = participation_ratio(rule_of(setting, "group_sparse").carriers)
    np.testing.assert_allclose(participation_ratio(carriers), best, rtol=0.25)


def test_t7_without_a_rival_the_direction_and_the_kernel_outside_are_those_of_the_rule(factored: dict) -> None:
    rule = rule_of(MAIN, "group_sparse")
    carriers = carriers_of(factored[MAIN])
    assert direction_cosine(carriers, rule.carriers).min() > 0.999
    beyond = kernel(np.vstack([carriers, rule.carriers]), MAIN.frequencies, np.arange(16, 512))
    beyond /= np.linalg.norm(beyond, axis=1, keepdims=True)
    assert (beyond[:-1] @ beyond[-1]).min() > 0.999


@pytest.mark.parametrize("setting", SETTINGS)
def test_t7_query_and_key_are_balanced_pair_by_pair(setting: RuleSetting, factored: dict) -> None:
    pairs = {name: p.unflatten(-1, (-1, 2)).norm(dim=-1).numpy() for name, p in factored[setting].parameters.items()}
    kept = active_carriers(carriers_of(factored[setting]), 0.01)
    np.testing.assert_allclose(pairs["query"][kept], pairs["key"][kept], rtol=0.02)


def factored_score(x: NDArray[np.float64], setting: RuleSetting) -> float:
    """Smallest margin over ½‖(q, κ)‖², from the rotation of queries and keys itself."""
    q_real, q_imag, k_real, k_imag = np.split(x, 4)
    deltas = np.arange(setting.train_length)
    turned = (q_real + 1j * q_imag) * np.exp(1j * np.outer(deltas, setting.frequencies))
    logits = (turned @ (k_real - 1j * k_imag)).real / np.sqrt(setting.head_dim)
    return float(margins(logits, setting.offset).min() / (0.5 * x @ x))


def balanced(carriers: NDArray[np.complex128], setting: RuleSetting) -> NDArray[np.float64]:
    size = np.sqrt(np.abs(carriers) * np.sqrt(setting.head_dim))
    return np.concatenate([size, 0 * size, size * np.cos(np.angle(carriers)), size * np.sin(np.angle(carriers))])


@pytest.mark.parametrize("setting", SETTINGS)
def test_t7_the_factored_problem_has_the_value_of_the_group_sparse_one(setting: RuleSetting) -> None:
    rule = rule_of(setting, "group_sparse")
    best = factored_score(balanced(rule.carriers, setting), setting)
    assert best == pytest.approx(rule.margin / np.sqrt(setting.head_dim), rel=1e-6)
    draw = np.random.default_rng(0)
    at_rule = balanced(rule.carriers, setting)
    for scale in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(50):
            moved = at_rule + scale * draw.normal(size=at_rule.size) * np.abs(at_rule).max()
            assert factored_score(moved, setting) <= best * (1 + 1e-9)


def test_t7_a_rival_rule_is_a_saddle_that_improves_towards_the_rule() -> None:
    best = rule_of(CLOSE, "group_sparse").carriers
    support = rival_rules(CLOSE.frequencies, 5, 16).support[1]
    rival = np.zeros_like(best)
    rival[list(support)] = group_sparse_rule(CLOSE.frequencies[list(support)], 5, 16).carriers
    report = kkt_report(rival, CLOSE.frequencies, 5, 16)
    assert report.is_kkt()
    assert report.inactive_pull > 1
    stays = factored_score(balanced(rival, CLOSE), CLOSE)
    path = [factored_score(balanced((1 - t) * rival + t * best, CLOSE), CLOSE) for t in (1e-3, 1e-2, 0.1, 0.5)]
    assert stays < path[0] < path[1] < path[2] < path[3]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("length", [16, 64, 200])
def test_t8_trained_heads_have_the_rank_of_their_carriers(setting: RuleSetting, length: int, factored: dict) -> None:
    carriers = carriers_of(factored[setting])[0]
    assert logit_rank(carriers, setting.frequencies, length) <= setting.head_dim
    kept = np.where(active_carriers(carriers, 0.01), carriers, 0)
    bound = 2 * np.count_nonzero(kept)
    assert logit_rank(kept, setting.frequencies, length) <= bound
    gap = logit_matrix(carriers, setting.frequencies, length) - logit_matrix(kept, setting.frequencies, length)
    dropped = np.abs(carriers - kept).sum()
    assert np.linalg.norm(gap, 2) <= length * dropped * (1 + 1e-12)
    # Eckart–Young: the singular values beyond the bound are no larger than what was dropped.
    singular = np.linalg.svd(logit_matrix(carriers, setting.frequencies, length), compute_uv=False)
    assert singular[bound:].max(initial=0.0) <= length * dropped * (1 + 1e-12)


@pytest.mark.parametrize("setting", SETTINGS)
def test_t9_trained_heads_are_as_aligned_as_their_rule(setting: RuleSetting, direct: dict, factored: dict) -> None:
    for carriers, norm in ((direct[setting], "l2"), (carriers_of(factored[setting]), "group_sparse")):
        trained = alignment(carriers, setting.frequencies, setting.offset)
        assert trained.max() <= 1 + 1e-12
        expected = alignment(rule_of(setting, norm).carriers, setting.frequencies, setting.offset)
        np.testing.assert_allclose(trained, expected, atol=0.02)


def test_t9_the_narrow_rule_is_misaligned_and_the_head_follows(factored: dict) -> None:
    trained = alignment(carriers_of(factored[NARROW]), NARROW.frequencies, NARROW.offset)
    np.testing.assert_allclose(trained, 0.71, atol=0.01)


@pytest.mark.parametrize("offset", [2, 5, 8])
def test_a_symmetric_window_makes_the_rule_real_around_its_target(offset: int) -> None:
    theta = MAIN.frequencies
    turned = l2_rule(theta, offset, 2 * offset + 1).carriers * np.exp(-1j * theta * offset)
    assert np.abs(turned.imag).max() < 1e-6 * np.abs(turned).max()


def test_adam_switches_on_more_carriers_than_descent_along_the_gradient(factored: dict) -> None:
    adam = carriers_of(fit(MAIN, "factored", "adam", 0.01, 1500).batch)
    assert participation_ratio(adam).min() > 1.3 * participation_ratio(carriers_of(factored[MAIN])).max()
    assert margin_ratio(MAIN, adam, "group_sparse").max() < 0.8


@pytest.mark.parametrize(("optimiser", "rate"), [("sgd", 1.0), ("polyak", 1.0)])
def test_plain_descent_and_polyak_approach_the_same_rules(optimiser: str, rate: float) -> None:
    for parameterisation, norm in NORMS.items():
        carriers = carriers_of(fit(MAIN, parameterisation, optimiser, rate, 1500).batch)
        assert margin_ratio(MAIN, carriers, norm).min() > 0.9


# The optimisers of the direct head, followed by hand.


def clock_step(optimiser: str, rate: float, h: float, gradient: NDArray[np.float64]) -> float:
    """s_t of w ← w − s_t ∇h, from the definitions of the three methods."""
    if optimiser == "sgd":
        return rate * expit(h)
    if optimiser == "ngd":
        return rate / np.linalg.norm(gradient)
    loss, slope = np.logaddexp(0.0, h), expit(h)
    return rate * (loss / slope if slope > 1e-300 else 1.0) / (gradient @ gradient)


def replay(setting: RuleSetting, optimiser: str, rate: float, start: NDArray[np.float64], steps: int):
    """Yield (w_t, s_t, ∇h(w_t)) for t = 0 … steps − 1, then (w_steps, 0, …)."""
    x = difference_features(setting.frequencies, setting.offset, setting.train_length)
    w = start.copy()
    for t in range(steps + 1):
        h = logsumexp(-x @ w)
        gradient = -np.exp(-x @ w - h) @ x
        s = clock_step(optimiser, rate, h, gradient) if t < steps else 0.0
        yield w.copy(), s, gradient
        w = w - s * gradient


OPTIMISERS = [("sgd", 1.0), ("ngd", 0.5), ("polyak", 1.0)]


@pytest.mark.parametrize(("optimiser", "rate"), OPTIMISERS)
def test_training_takes_the_steps_of_the_theorem(optimiser: str, rate: float) -> None:
    trained = fit(MAIN, "direct", optimiser, rate, 40, init_std=1.0, snapshots=(0,))
    start = weights_from_carriers(carriers_of(trained.at(0)))
    ends = weights_from_carriers(carriers_of(trained.batch))
    for first, last in zip(start, ends, strict=True):
        *_, (by_hand, _, _) = replay(MAIN, optimiser, rate, first, 40)
        np.testing.assert_allclose(last, by_hand, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("optimiser", "rate"), OPTIMISERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_bounds_on_progress_and_size_hold_along_training(setting: RuleSetting, optimiser: str, rate: float) -> None:
    rule = rule_of(setting, "l2")
    u, gamma = rule.weights / rule.norm_value, rule.margin
    start = np.random.default_rng(1).normal(size=setting.head_dim)
    low, high = start @ u, np.linalg.norm(start)
    competitors = np.log(setting.train_length - 1)
    for w, s, gradient in replay(setting, optimiser, rate, start, 800):
        size = np.linalg.norm(w)
        assert w @ u >= low - 1e-9 * size
        assert size <= high * (1 + 1e-9)
        assert np.linalg.norm(gradient) >= gamma * (1 - 1e-9)
        low += gamma * s
        high += gamma * s + (s * competitors + (s * np.linalg.norm(gradient)) ** 2 / 2) / size
    assert 1 - w @ u / size <= 1 - low / high


@pytest.mark.parametrize(("optimiser", "rate"), OPTIMISERS)
def test_what_the_features_do_not_see_is_never_forgotten(optimiser: str, rate: float) -> None:
    trained = fit(MAIN, "direct", optimiser, rate, 300, init_std=1.0, snapshots=(0,))
    start = weights_from_carriers(carriers_of(trained.at(0)))
    end = weights_from_carriers(carriers_of(trained.batch))
    span = orth(difference_features(MAIN.frequencies, MAIN.offset, MAIN.train_length).T)
    outside = np.eye(MAIN.head_dim) - span @ span.T
    np.testing.assert_allclose(end @ outside, start @ outside, atol=1e-8)
    rule = rule_of(MAIN, "l2")
    size = np.linalg.norm(end, axis=1)
    error = np.linalg.norm(end / size[:, None] - rule.weights / rule.norm_value, axis=1)
    assert (error >= np.linalg.norm(start @ outside, axis=1) / size - 1e-9).all()


def test_direction_error_falls_like_one_over_t_with_normalised_steps_and_like_one_over_log_t_without() -> None:
    rule = rule_of(MAIN, "l2")
    errors = {}
    for optimiser, rate in (("sgd", 1.0), ("ngd", 1.0), ("polyak", 1.0)):
        trained = fit(MAIN, "direct", optimiser, rate, 1500, init_std=1.0, snapshots=(150,))
        for step, batch in ((150, trained.at(150)), (1500, trained.batch)):
            errors[optimiser, step] = np.arccos(direction_cosine(carriers_of(batch), rule.carriers))
    for optimiser in ("ngd", "polyak"):
        np.testing.assert_allclose(errors[optimiser, 150] / errors[optimiser, 1500], 10.0, rtol=0.1)
    slow = errors["sgd", 150] / errors["sgd", 1500]
    np.testing.assert_allclose(slow, np.log(1500) / np.log(150), rtol=0.1)


def test_polyak_goes_on_when_the_loss_is_no_longer_a_number() -> None:
    trained = fit(MAIN, "direct", "polyak", 1.0, 2000, snapshots=(1900,))
    assert (trained.losses[:, -1] == 0).all()  # e^−745 is the smallest number there is
    smallest = margins(kernel(carriers_of(trained.batch), MAIN.frequencies, np.arange(16)), 5).min(-1)
    before = margins(kernel(carriers_of(trained.at(1900)), MAIN.frequencies, np.arange(16)), 5).min(-1)
    assert (smallest > 745).all()
    assert ((smallest - before > 30) & (smallest - before <= 100)).all()  # convexity: at most a nat a step


def test_polyak_takes_the_step_of_its_definition_for_queries_and_keys() -> None:
    trained = fit(MAIN, "factored", "polyak", 0.7, 1, init_std=1.0)
    batch = HeadBatch(trained.batch.heads)
    parameters = [p.requires_grad_() for p in batch.parameters.values()]
    loss = -batch.kernel(16).log_softmax(-1)[:, 5]
    gradients = torch.autograd.grad(loss.sum(), parameters)
    squared = sum(g.square().sum(-1) for g in gradients)
    for name, p, g in zip(batch.parameters, parameters, gradients, strict=True):
        assert torch.allclose(trained.batch.parameters[name], p - 0.7 * (loss / squared)[:, None] * g, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_cross_entropy_loses_its_target_at_the_predicted_margin(dtype: torch.dtype) -> None:
    limit = np.log(2 / torch.finfo(dtype).eps)
    for above, lost in ((-0.1, False), (0.1, True)):
        logits = torch.tensor([[0.0, -(limit + above)]], dtype=dtype, requires_grad=True)
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor([0]))
        (gradient,) = torch.autograd.grad(loss, logits)
        assert bool(gradient[0, 0] == 0) is lost
        assert gradient[0, 1] > 0


def test_the_attention_matrix_of_the_direct_head_is_its_rule_times_the_query() -> None:
    x = difference_features(MAIN.frequencies, MAIN.offset, MAIN.train_length)
    query = np.array([2.0, 3.0, 6.0]) / 7
    matrix = hard_margin(np.einsum("sd,q->sdq", x, query).reshape(len(x), -1))
    rule = rule_of(MAIN, "l2")
    assert matrix.norm_value == pytest.approx(rule.norm_value, rel=1e-8)
    expected = np.outer(rule.weights, query)
    np.testing.assert_allclose(matrix.weights.reshape(expected.shape), expected, atol=1e-5 * rule.norm_value)
