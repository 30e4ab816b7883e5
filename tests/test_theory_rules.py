"""Maximum-margin rules against closed forms, Lawson–Hanson, a support vector machine, a linear program and duality."""

import itertools

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import linprog, nnls
from sklearn.svm import SVC

from helpers.theory import (
    InfeasibleMargin,
    MarginSolverError,
    carriers_from_weights,
    difference_features,
    direction_cosine,
    features,
    group_sparse_rule,
    hard_margin,
    kernel,
    kkt_report,
    l2_rule,
    margins,
    merge_repeated,
    normalised_margin,
    rival_rules,
    rotary_frequencies,
    rule_norm,
    rules,
)

# (train_length, offset, head_dim, base)
SETTINGS = [
    (16, 5, 32, 1e4),
    (16, 3, 32, 1e4),
    (16, 5, 32, 100.0),
    (32, 7, 64, 1e4),
    (16, 3, 8, 1e4),
    (16, 0, 32, 1e4),
    (16, 15, 32, 1e4),
    (8, 3, 4, 1e4),
    (16, 5, 2, 1e4),
    (64, 31, 64, 1e4),
    (64, 5, 8, 1e4),
    (128, 60, 16, 1e4),
    (2, 1, 32, 1e4),
    (6, 5, 16, 1e6),
]


@pytest.mark.parametrize(("train_length", "offset", "head_dim", "base"), SETTINGS)
def test_l2_rule_is_the_active_set_solution(train_length: int, offset: int, head_dim: int, base: float) -> None:
    # Lawson and Hanson, Solving Least Squares Problems, chapter 23: least distance programming by non-negative
    # least squares, an active-set method without tolerances.
    theta = rotary_frequencies(head_dim, base)
    everything = features(theta, np.arange(train_length))
    differences = everything[offset] - np.delete(everything, offset, axis=0)
    wanted = np.append(np.zeros(2 * theta.size), 1.0)
    dual, _ = nnls(np.vstack([differences.T, np.ones(len(differences))]), wanted)
    residual = np.append(differences.T @ dual, dual.sum()) - wanted
    expected = -residual[:-1] / residual[-1]
    rule = l2_rule(theta, offset, train_length)
    assert rule.norm_value == pytest.approx(np.linalg.norm(expected), rel=1e-8)
    assert direction_cosine(rule.carriers, carriers_from_weights(expected)) == pytest.approx(1.0, abs=1e-9)
    assert margins(kernel(rule.carriers, theta, np.arange(train_length)), offset).min() == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(("train_length", "offset", "head_dim", "base"), SETTINGS)
def test_group_sparse_rule_is_optimal_by_duality(train_length: int, offset: int, head_dim: int, base: float) -> None:
    # For λ ≥ 0 with every |Σ_δ λ_δ (e^{iθ_r k} − e^{iθ_r δ})| ≤ 1, any rule with margins ≥ 1 has norm ≥ Σ λ.
    theta = rotary_frequencies(head_dim, base)
    rule = group_sparse_rule(theta, offset, train_length)
    competitors = np.delete(np.arange(train_length), offset)
    waves = np.exp(1j * theta * offset) - np.exp(1j * np.outer(competitors, theta))
    assert (rule.multipliers >= 0).all()
    assert np.abs(rule.multipliers @ waves).max() <= 1 + 1e-12
    values = kernel(rule.carriers, theta, np.arange(train_length))
    assert (values[offset] - np.delete(values, offset)).min() >= 1 - 1e-9
    norm = np.abs(rule.carriers).sum()
    assert rule.multipliers.sum() == pytest.approx(norm, rel=1e-8)
    assert rule.norm_value == pytest.approx(norm, rel=1e-12)
    assert rule.relative_gap < 1e-8
    assert rule.margin == pytest.approx(1 / norm)


@pytest.mark.parametrize(("train_length", "offset", "head_dim", "base"), SETTINGS[:5])
def test_group_sparse_rule_lies_between_linear_programs(
    train_length: int, offset: int, head_dim: int, base: float
) -> None:
    # The modulus replaced by the largest of its components along 64 directions is smaller by at most cos(π/64).
    theta = rotary_frequencies(head_dim, base)
    count = theta.size
    differences = difference_features(theta, offset, train_length)
    angles = 2 * np.pi * np.arange(64) / 64
    eye = np.eye(count)
    facets = np.vstack([np.hstack([np.cos(a) * eye, np.sin(a) * eye, -eye]) for a in angles])
    above = np.hstack([-differences, np.zeros((len(differences), count))])
    answer = linprog(
        np.append(np.zeros(2 * count), np.ones(count)),
        A_ub=np.vstack([facets, above]),
        b_ub=np.append(np.zeros(len(facets)), -np.ones(len(differences))),
        bounds=(None, None),
    )
    assert answer.status == 0
    norm = group_sparse_rule(theta, offset, train_length).norm_value
    assert norm * np.cos(np.pi / 64) - 1e-7 <= answer.fun <= norm + 1e-7


@pytest.mark.parametrize(("train_length", "offset", "head_dim", "base"), SETTINGS[:5])
def test_l2_rule_agrees_with_a_support_vector_machine(
    train_length: int, offset: int, head_dim: int, base: float
) -> None:
    differences = difference_features(rotary_frequencies(head_dim, base), offset, train_length)
    # The mirrored points make the machine's offset term zero.
    machine = SVC(kernel="linear", C=1e8, tol=1e-8)
    machine.fit(np.vstack([differences, -differences]), np.repeat([1, -1], len(differences)))
    rule = l2_rule(rotary_frequencies(head_dim, base), offset, train_length)
    weights = machine.coef_[0]
    assert weights @ rule.weights / np.linalg.norm(weights) / rule.norm_value == pytest.approx(1.0, abs=1e-5)
    assert np.linalg.norm(weights) == pytest.approx(rule.norm_value, rel=1e-4)


def test_max_margin_attention_matrix_agrees_with_a_support_vector_machine() -> None:
    # W_mm of arXiv 2402.05738: tokens of one sequence, one of them optimal, margins (x_opt − x_t)ᵀ W x_query ≥ 1.
    rng = np.random.default_rng(3)
    tokens = rng.normal(size=(4, 6, 5))
    products = [np.outer(x[0] - x[t], x[-1]).ravel() for x in tokens for t in range(1, 6)]
    rule = hard_margin(products)
    machine = SVC(kernel="linear", C=1e8, tol=1e-8).fit(
        np.vstack([products, -np.array(products)]), [1] * 20 + [-1] * 20
    )
    assert rule.weights == pytest.approx(machine.coef_[0], abs=1e-4)


@pytest.mark.parametrize("head_dim", [2, 8, 32])
def test_two_offsets_have_a_closed_form(head_dim: int) -> None:
    # L = 2, k = 1, also the case L = k + 1: one constraint ⟨w, ψ⟩ ≥ 1 with |ψ_r| = 2 sin(θ_r/2).
    theta = rotary_frequencies(head_dim)
    sizes = 2 * np.sin(theta / 2)
    assert l2_rule(theta, 1, 2).norm_value == pytest.approx(1 / np.linalg.norm(sizes), rel=1e-9)
    sparse = group_sparse_rule(theta, 1, 2)
    assert sparse.norm_value == pytest.approx(1 / sizes.max(), rel=1e-9)
    assert np.abs(sparse.carriers[1:]).max(initial=0.0) < 1e-8


@pytest.mark.parametrize("theta", [1.0, 0.1, 1e-3])
def test_one_carrier_has_a_closed_form(theta: float) -> None:
    # Neighbours on both sides of k bind: c is aligned and |c| (1 − cos θ) = 1.
    for rule in (l2_rule([theta], 2, 5), group_sparse_rule([theta], 2, 5)):
        amplitude = 1 / (2 * np.sin(theta / 2) ** 2)
        assert rule.norm_value == pytest.approx(amplitude, rel=1e-7)
        assert rule.carriers[0] == pytest.approx(amplitude * np.exp(2j * theta), rel=1e-6)


def test_repeated_frequencies_determine_the_sum_of_their_carriers() -> None:
    single, double = [1.0, 0.1], [1.0, 1.0, 0.1, 0.1]
    sparse = group_sparse_rule(double, 3, 16)
    assert sparse.norm_value == pytest.approx(group_sparse_rule(single, 3, 16).norm_value, rel=1e-8)
    merged, theta = merge_repeated(sparse.carriers, double)
    assert theta.tolist() == single
    assert merged == pytest.approx(group_sparse_rule(single, 3, 16).carriers, abs=1e-5)
    # Two equal carriers of half the size have 1/√2 of the ℓ2 norm.
    smooth = l2_rule(double, 3, 16)
    assert smooth.norm_value == pytest.approx(l2_rule(single, 3, 16).norm_value / np.sqrt(2), rel=1e-8)
    assert smooth.carriers[0] == pytest.approx(smooth.carriers[1], abs=1e-7)


@pytest.mark.parametrize("offset", range(4))
@pytest.mark.parametrize("solve", [l2_rule, group_sparse_rule])
def test_reversing_time_reverses_the_rule(solve, offset: int) -> None:
    # δ → L − 1 − δ maps the constraints of offset k onto those of L − 1 − k and c_r onto conj(c_r) e^{iθ_r(L−1)}.
    theta = rotary_frequencies(16, 100)
    forward, backward = solve(theta, offset, 9), solve(theta, 8 - offset, 9)
    assert forward.norm_value == pytest.approx(backward.norm_value, rel=1e-8)
    mirrored = forward.carriers.conj() * np.exp(8j * theta)
    assert direction_cosine(mirrored, backward.carriers) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    "theta",
    [[0.0], [2 * np.pi], [np.pi], [2 * np.pi / 8, 2 * np.pi / 4, 2 * np.pi / 2]],
    ids=["constant", "a turn a token", "period 2", "period 8"],
)
@pytest.mark.parametrize("solve", [l2_rule, group_sparse_rule])
def test_an_impossible_margin_is_reported_as_such(solve, theta: list[float]) -> None:
    with pytest.raises(InfeasibleMargin, match="put offset 3 above every other offset below train_length 16"):
        solve(theta, 3, 16)
    assert issubclass(InfeasibleMargin, ValueError)


def test_a_period_of_eight_is_enough_for_eight_offsets() -> None:
    assert group_sparse_rule([2 * np.pi / 8], 3, 8).norm_value == pytest.approx(1 / (1 - np.cos(np.pi / 4)), rel=1e-8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: l2_rule([1.0], 0, 1), "train_length=1"),
        (lambda: l2_rule([1.0], 3, 3), "offset=3"),
        (lambda: l2_rule([1.0], -1, 3), "offset=-1"),
        (lambda: hard_margin([[1.0, 2.0]], "l1"), "norm='l1'"),
        (lambda: hard_margin([1.0, 2.0]), "differences.shape"),
        (lambda: hard_margin([[np.nan, 2.0]]), "differences entry=nan"),
        (lambda: hard_margin([[1.0, 2.0, 3.0]], "group_sparse"), "even number of features"),
        (lambda: hard_margin([[1.0, 0.0], [-1.0, 0.0]]), "all 2 differences"),
        (lambda: margins(np.ones(4), 4), "offset=4"),
        (lambda: normalised_margin([1.0], [1.0], 0, 1, "l2"), "train_length=1"),
        (lambda: kkt_report([-1.0], [1.0], 0, 4), "smallest margin of carriers"),
        (lambda: kkt_report([[1.0]], [1.0], 0, 4), "carriers.shape"),
        (lambda: kkt_report([0.0], [1.0], 0, 4), "smallest margin of carriers"),
    ],
)
def test_wrong_input_is_one_line_that_names_it(call, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_an_answer_that_is_not_optimal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_solve", lambda *_: (np.array([1.0, 1.0]), np.array([1.0]), "optimal"))
    with pytest.raises(MarginSolverError, match="certified only to"):
        hard_margin([[1.0, 0.0]])
    monkeypatch.setattr(rules, "_solve", lambda *_: (np.array([-1.0, 1.0]), np.array([1.0]), "optimal"))
    with pytest.raises(MarginSolverError, match="do not fit"):
        hard_margin([[1.0, 0.0]])


def test_a_solver_that_gives_up_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(*_: object, **__: object) -> None:
        raise cp.SolverError("numerical trouble")

    monkeypatch.setattr(cp.Problem, "solve", give_up)
    with pytest.raises(MarginSolverError, match="without an answer"):
        hard_margin([[1.0, 0.0]])


@settings(deadline=None, max_examples=25)
@given(arrays(np.float64, (20, 16), elements=st.integers(-1000, 1000)), st.sampled_from(["l2", "group_sparse"]))
def test_no_direction_beats_the_rule(weights: np.ndarray, norm: str) -> None:
    theta = rotary_frequencies(16, 100)
    best = (l2_rule if norm == "l2" else group_sparse_rule)(theta, 3, 8).margin
    margin = normalised_margin(carriers_from_weights(weights), theta, 3, 8, norm)
    assert np.isnan(margin).tolist() == (~weights.any(axis=1)).tolist()
    assert not (margin > best * (1 + 1e-9)).any()


def test_normalised_margin_takes_batches_and_is_scale_free() -> None:
    theta = rotary_frequencies(32)
    sparse = group_sparse_rule(theta, 5, 16)
    batch = np.stack([sparse.carriers, 7 * sparse.carriers, 0 * sparse.carriers])
    found = normalised_margin(batch, theta, 5, 16, "group_sparse")
    assert found[:2] == pytest.approx([sparse.margin, sparse.margin], rel=1e-9)
    assert np.isnan(found[2])
    assert rule_norm(batch, "group_sparse")[1] == pytest.approx(7 * sparse.norm_value)
    assert rule_norm([3.0, 4j], "l2") == pytest.approx(5.0)


@pytest.mark.parametrize(("train_length", "offset", "head_dim", "base"), SETTINGS[:5])
@pytest.mark.parametrize("norm", ["l2", "group_sparse"])
def test_an_optimum_is_a_kkt_point_at_any_scale(
    norm: str, train_length: int, offset: int, head_dim: int, base: float
) -> None:
    theta = rotary_frequencies(head_dim, base)
    rule = (l2_rule if norm == "l2" else group_sparse_rule)(theta, offset, train_length)
    report = kkt_report(17 * rule.carriers, theta, offset, train_length, norm)
    assert report.stationarity < 1e-5
    assert report.complementarity < 1e-5
    assert report.is_kkt()
    assert report.is_optimal()
    assert report.support_ratio == pytest.approx(1.0, abs=1e-6)
    assert report.optimum_ratio == pytest.approx(1.0, abs=1e-8)
    # The other problem's optimum is no KKT point of this one, unless a single carrier leaves no choice.
    other = (group_sparse_rule if norm == "l2" else l2_rule)(theta, offset, train_length)
    assert not kkt_report(other.carriers, theta, offset, train_length, norm).is_kkt()


def factored_gradient(carriers: np.ndarray, theta: np.ndarray, offset: int, multipliers: np.ndarray) -> np.ndarray:
    """Central differences of ½ Σ (|q|² + |κ|²) − √d Σ λ_δ z_δ at the balanced (q, κ) of the carriers."""
    width = 2 * theta.size
    size = np.sqrt(np.abs(carriers) * np.sqrt(width))
    point = np.concatenate([size, 0 * size, size * np.cos(np.angle(carriers)), size * np.sin(np.angle(carriers))])
    competitors = np.delete(np.arange(multipliers.size + 1), offset)

    def lagrangian(x: np.ndarray) -> float:
        q_real, q_imag, k_real, k_imag = np.split(x, 4)
        q, k = q_real + 1j * q_imag, k_real + 1j * k_imag

        def logit(delta: int) -> float:
            return float((q * np.exp(1j * theta * delta) @ k.conj()).real / np.sqrt(width))

        pull = sum(m * (logit(offset) - logit(d)) for m, d in zip(multipliers, competitors, strict=True))
        return 0.5 * x @ x - np.sqrt(width) * pull

    step = 1e-5 * np.eye(point.size)
    return np.array([(lagrangian(point + e) - lagrangian(point - e)) / 2e-5 for e in step])


@pytest.mark.parametrize("support", [(0, 1), (0, 2), (0, 3)])
def test_restricted_rules_are_other_kkt_points_of_the_factored_head(support: tuple[int, ...]) -> None:
    theta = rotary_frequencies(32, 100)
    rule = group_sparse_rule(theta[list(support)], 5, 16)
    carriers = np.zeros(16, dtype=complex)
    carriers[list(support)] = rule.carriers
    report = kkt_report(carriers, theta, 5, 16)
    assert report.is_kkt()
    assert not report.is_optimal(1e-4)
    assert report.inactive_pull > 1
    assert report.support_ratio == pytest.approx(1.0, abs=1e-8)
    assert report.optimum_ratio < 1
    assert report.active.nonzero()[0].tolist() == list(support)
    assert np.abs(factored_gradient(carriers, theta, 5, report.multipliers)).max() < 1e-4


def test_a_rule_pulled_off_its_optimum_is_no_kkt_point() -> None:
    theta = rotary_frequencies(32)
    carriers = group_sparse_rule(theta, 5, 16).carriers.copy()
    carriers[0] *= np.exp(0.1j)
    report = kkt_report(carriers, theta, 5, 16)
    assert report.stationarity > 0.01
    assert report.support_ratio < 0.999


def test_near_ties_are_listed_best_first() -> None:
    # At base 100 the pairs (0, 1), (0, 2), (0, 3) all come within 5% of the optimum, in two different directions.
    theta = rotary_frequencies(32, 100)
    table = rival_rules(theta, 5, 16)
    assert table["support"].tolist() == [(0, 1), (0, 2), (0, 3)]
    assert table["norm"].is_monotonic_increasing
    assert (table["margin_ratio"] <= 1 + 1e-9).all()
    assert table.loc[1, "margin_ratio"] > 0.99
    assert table.loc[1, "cosine"] < 0.95
    singles = {
        pair: group_sparse_rule(theta[list(pair)], 5, 16).norm_value for pair in itertools.combinations((0, 1, 2), 2)
    }
    assert table.loc[0, "norm"] == pytest.approx(singles[0, 1])


def test_rivals_leave_out_what_cannot_separate_the_target() -> None:
    table = rival_rules([0.0, 1.0], 2, 5, max_carriers=2, within=2.0)
    assert table["support"].tolist() == [(1,)]
