"""Maximum-margin rules: what gradient descent on the direct (ℓ2) and the factored (group-sparse) head selects.

Both are convex and solved by Clarabel through cvxpy, which knows nothing of the training code. Every answer is
certified: the solver's multipliers give a lower bound on the norm of any rule that fits, and the two must meet.
"""

import itertools
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import cvxpy as cp
import numpy as np
import pandas as pd
from jaxtyping import Bool, Complex, Float
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from helpers.theory._validation import (
    as_carriers,
    as_frequencies,
    as_one_head,
    as_rows,
    check_integer,
    check_offset,
    check_real,
    require_each,
)
from helpers.theory.carriers import active_carriers, direction_cosine
from helpers.theory.kernels import carriers_from_weights, difference_features, weights_from_carriers
from helpers.validation import require, require_choice

Norm = Literal["l2", "group_sparse"]

GAP_ALLOWED = 1e-6  # between the rule's norm and the certified lower bound, relative


class InfeasibleMargin(ValueError):
    """No weights give every difference a positive margin, or only one below about 1e-9 of their norm."""


class MarginSolverError(RuntimeError):
    """The solver stopped without an answer that its own multipliers certify."""


@dataclass(frozen=True, eq=False)
class MarginRule:
    """min norm(w) subject to ⟨w, differences_i⟩ ≥ 1: the answer, and the proof that it is the best one.

    ``weights`` are scaled so that the smallest margin is exactly 1. ``multipliers`` are dual feasible, so their sum
    ``lower_bound`` is at most the norm of every feasible w. ``slack`` is margin − 1, one for each difference.
    """

    norm: Norm
    weights: Float[np.ndarray, "features"]
    norm_value: float
    lower_bound: float
    multipliers: Float[np.ndarray, "differences"]
    slack: Float[np.ndarray, "differences"]
    status: str

    @property
    def carriers(self) -> Complex[np.ndarray, "num_carriers"]:
        """c from w = (Re c, Im c)."""
        return carriers_from_weights(self.weights)

    @property
    def margin(self) -> float:
        """The largest normalised margin any direction has: 1 / norm."""
        return 1.0 / self.norm_value

    @property
    def relative_gap(self) -> float:
        """norm / lower_bound − 1: how far, at most, the rule is from the optimum."""
        return self.norm_value / self.lower_bound - 1.0


def rule_norm(carriers: ArrayLike, norm: Norm) -> Float[np.ndarray, "*batch"]:
    """‖w‖₂ (``l2``, the direct head's norm) or Σ_r |c_r| (``group_sparse``, the factored head's)."""
    _check_norm(norm)
    amplitudes = np.abs(np.asarray(carriers, dtype=np.complex128))
    return np.sqrt((amplitudes**2).sum(axis=-1)) if norm == "l2" else amplitudes.sum(axis=-1)


def margins(kernel_values: ArrayLike, offset: int) -> Float[np.ndarray, "*batch competitors"]:
    """z_δ = f(k) − f(δ) for every δ ≠ k of the last axis, in increasing δ.

    ``ValueError`` if ``offset`` lies outside the last axis.
    """
    values = as_rows("kernel_values", kernel_values)
    offset, _ = check_offset(offset, values.shape[-1], "length")
    return values[..., offset, None] - np.delete(values, offset, axis=-1)


def normalised_margin(
    carriers: ArrayLike, frequencies: ArrayLike, offset: int, train_length: int, norm: Norm
) -> Float[np.ndarray, "*batch"]:
    """min over δ < L of f(k) − f(δ), divided by the norm: at most ``MarginRule.margin``. NaN for zero carriers.

    ``ValueError`` if there is no competitor (train_length = 1).
    """
    differences = _competitors(frequencies, offset, train_length)
    carriers = as_carriers(carriers, differences.shape[-1] // 2)
    smallest = (weights_from_carriers(carriers) @ differences.T).min(axis=-1)
    size = rule_norm(carriers, norm)
    return np.divide(smallest, size, out=np.full_like(smallest, np.nan), where=size > 0)


def hard_margin(differences: ArrayLike, norm: Norm = "l2") -> MarginRule:
    """The rule of least norm with ⟨w, differences_i⟩ ≥ 1 for all i.

    For ``group_sparse`` the features are halves (Re, Im), as those of ``features``. With ``l2`` and the flattened
    outer products (x_opt − x_t) x_queryᵀ the answer is W_mm of Implicit Bias and Fast Convergence Rates for
    Self-attention (arXiv 2402.05738). ``ValueError`` for a wrong shape, ``InfeasibleMargin`` if no weights fit,
    ``MarginSolverError`` if the solver's answer cannot be certified.
    """
    _check_norm(norm)
    matrix = np.asarray(differences, dtype=np.float64)
    require(matrix.ndim == 2 and matrix.size > 0, "differences.shape", matrix.shape, "that of a non-empty 2-d array")
    require_each("differences", matrix, np.isfinite(matrix), "finite")
    even = norm == "l2" or matrix.shape[1] % 2 == 0
    require(even, "differences.shape", matrix.shape, "with an even number of features")
    weights, multipliers, status = _solve(matrix, norm)
    smallest = (matrix @ weights).min()
    multipliers = np.maximum(multipliers, 0.0)
    dual = _dual_norm(matrix.T @ multipliers, norm)
    if smallest <= 0 or dual == 0:
        raise MarginSolverError(f"hard_margin: the solver stopped with status {status} and weights that do not fit")
    weights, multipliers = weights / smallest, multipliers / dual
    rule = MarginRule(
        norm=norm,
        weights=weights,
        norm_value=float(rule_norm(weights if norm == "l2" else carriers_from_weights(weights), norm)),
        lower_bound=float(multipliers.sum()),
        multipliers=multipliers,
        slack=matrix @ weights - 1.0,
        status=status,
    )
    if rule.relative_gap > GAP_ALLOWED:
        raise MarginSolverError(f"hard_margin: certified only to {rule.relative_gap:.1e}, allowed is {GAP_ALLOWED:.0e}")
    return rule


def hard_margin_rule(frequencies: ArrayLike, offset: int, train_length: int, norm: Norm) -> MarginRule:
    """``l2_rule`` (T6) or ``group_sparse_rule`` (T7), chosen by the norm."""
    differences = _competitors(frequencies, offset, train_length)
    try:
        return hard_margin(differences, norm)
    except InfeasibleMargin:
        raise InfeasibleMargin(
            f"no carriers on these {differences.shape[1] // 2} frequencies put offset {offset} above every other "
            f"offset below train_length {train_length}"
        ) from None


def l2_rule(frequencies: ArrayLike, offset: int, train_length: int) -> MarginRule:
    """T6: min ‖w‖₂ with f(k) − f(δ) ≥ 1 for all δ < L, δ ≠ k; the direct head's limit.

    ``ValueError`` if there is no competitor (train_length = 1), else as ``hard_margin``.
    """
    return hard_margin_rule(frequencies, offset, train_length, "l2")


def group_sparse_rule(frequencies: ArrayLike, offset: int, train_length: int) -> MarginRule:
    """T7: min Σ_r |c_r| under the constraints of ``l2_rule``; the best the factored head can reach.

    With repeated frequencies only the sum of their carriers is determined. Errors as ``l2_rule``.
    """
    return hard_margin_rule(frequencies, offset, train_length, "group_sparse")


@dataclass(frozen=True, eq=False)
class KktReport:
    """How nearly a direction is a KKT point of its minimum-norm problem, at the scale where its smallest margin is 1.

    With g_r = Σ_δ λ_δ (e^{iθ_r k} − e^{iθ_r δ}), the pull of the ``multipliers`` λ on carrier r:

    - ``stationarity``: the largest |g_r − c_r/|c_r|| over active carriers (``l2``: ‖g − c/‖c‖‖₂);
    - ``complementarity``: Σ λ_δ slack_δ / Σ λ_δ;
    - ``inactive_pull``: the largest |g_r| over inactive carriers, 0 if there are none; at most 1 at a global optimum;
    - ``support_ratio``: norm of the best rule on the active carriers alone, over the norm here; 1 at a KKT point;
    - ``optimum_ratio``: norm of the best rule on all carriers, over the norm here: normalised margin over its optimum.
    """

    norm: Norm
    active: Bool[np.ndarray, "num_carriers"]
    multipliers: Float[np.ndarray, "competitors"]
    stationarity: float
    complementarity: float
    inactive_pull: float
    support_ratio: float
    optimum_ratio: float

    def is_kkt(self, tolerance: float = 1e-3) -> bool:
        """Stationary and complementary, both to within ``tolerance``."""
        return self.stationarity <= tolerance and self.complementarity <= tolerance

    def is_optimal(self, tolerance: float = 1e-3) -> bool:
        """A KKT point that no inactive carrier could improve: the global optimum, as the problem is convex in c."""
        return self.is_kkt(tolerance) and self.inactive_pull <= 1.0 + tolerance


def kkt_report(
    carriers: ArrayLike,
    frequencies: ArrayLike,
    offset: int,
    train_length: int,
    norm: Norm = "group_sparse",
    threshold: float = 1e-3,
) -> KktReport:
    """T6, T7: is this direction a KKT point of the problem its parameterisation solves?

    Factored head: min ½ Σ_r (|q_r|² + |κ_r|²) is stationary where q_r = conj(g_r) κ_r / √d and κ_r = g_r q_r / √d. An
    active carrier then has |q_r| = |κ_r| and, up to one common scale, c_r/|c_r| = g_r. An inactive one,
    q_r = κ_r = 0, is stationary whatever g_r is. So each support on which the restricted group-sparse rule uses every
    carrier gives a KKT point, and only |g_r| ≤ 1 off the support makes it the global optimum.

    The multipliers solve stationarity and complementarity together by non-negative least squares. Carriers at or below
    ``threshold`` times the largest amplitude count as inactive (``group_sparse`` only). ``ValueError`` unless the
    direction has a positive margin.
    """
    _check_norm(norm)
    theta = as_frequencies(frequencies)
    differences = _competitors(theta, offset, train_length)
    carriers = as_one_head(carriers, theta.size)
    weights = weights_from_carriers(carriers)
    smallest = (differences @ weights).min()
    require(smallest > 0, "smallest margin of carriers", float(smallest), "> 0")
    carriers, weights = carriers / smallest, weights / smallest
    slack = differences @ weights - 1.0
    size = float(rule_norm(carriers, norm))

    if norm == "l2":
        active = np.ones(theta.size, dtype=bool)
        pull_wanted = weights / size
    else:
        active = active_carriers(carriers, threshold)
        pull_wanted = weights_from_carriers(np.where(active, carriers / np.where(active, np.abs(carriers), 1.0), 0.0))
    equations = np.tile(active, 2)
    system = np.vstack([differences.T[equations], np.diag(slack) / size])
    multipliers, _ = nnls(system, np.concatenate([pull_wanted[equations], np.zeros(slack.size)]))

    pull = carriers_from_weights(differences.T @ multipliers)
    miss = np.abs(pull - carriers_from_weights(pull_wanted))[active]
    total = multipliers.sum()
    best = hard_margin_rule(theta, offset, train_length, norm).norm_value
    support = best if active.all() else hard_margin_rule(theta[active], offset, train_length, norm).norm_value
    return KktReport(
        norm=norm,
        active=active,
        multipliers=multipliers,
        stationarity=float(np.linalg.norm(miss) if norm == "l2" else miss.max()),
        complementarity=float(multipliers @ slack / total) if total > 0 else 0.0,
        inactive_pull=float(np.abs(pull)[~active].max(initial=0.0)),
        support_ratio=support / size,
        optimum_ratio=best / size,
    )


def rival_rules(
    frequencies: ArrayLike, offset: int, train_length: int, max_carriers: int = 2, within: float = 1.05
) -> pd.DataFrame:
    """T7: group-sparse rules restricted to at most ``max_carriers`` carriers, that use all of them: other KKT points.

    One row for each support whose norm is at most ``within`` times the unrestricted optimum, best first: ``support``
    (tuple of carrier indices), ``norm``, ``margin_ratio`` (optimum / norm) and ``cosine`` to the unrestricted
    rule. Supports that cannot separate the target are left out. Cost: one small convex problem a support.
    """
    theta = as_frequencies(frequencies)
    max_carriers = check_integer("max_carriers", max_carriers, 1)
    within = check_real("within", within, positive=True)
    best = group_sparse_rule(theta, offset, train_length)
    rows = []
    for count in range(1, min(max_carriers, theta.size) + 1):
        for support in itertools.combinations(range(theta.size), count):
            try:
                rule = group_sparse_rule(theta[list(support)], offset, train_length)
            except InfeasibleMargin:
                continue
            if rule.norm_value > within * best.norm_value or not active_carriers(rule.carriers).all():
                continue
            carriers = np.zeros(theta.size, dtype=np.complex128)
            carriers[list(support)] = rule.carriers
            rows.append(
                {
                    "support": support,
                    "norm": rule.norm_value,
                    "margin_ratio": best.norm_value / rule.norm_value,
                    "cosine": float(direction_cosine(carriers, best.carriers)),
                }
            )
    frame = pd.DataFrame(rows, columns=["support", "norm", "margin_ratio", "cosine"])
    return frame.sort_values("norm", kind="stable", ignore_index=True)


def _check_norm(norm: Norm) -> None:
    require_choice("norm", norm, get_args(Norm))


def _competitors(frequencies: ArrayLike, offset: int, train_length: int) -> Float[np.ndarray, "competitors features"]:
    offset, train_length = check_offset(offset, train_length)
    require(train_length >= 2, "train_length", train_length, "an integer ≥ 2: a margin needs a competitor")
    return difference_features(frequencies, offset, train_length)


def _dual_norm(pull: Float[np.ndarray, "features"], norm: Norm) -> float:
    return float(np.linalg.norm(pull) if norm == "l2" else np.abs(carriers_from_weights(pull)).max())


def _solve(
    differences: Float[np.ndarray, "differences features"], norm: Norm
) -> tuple[Float[np.ndarray, "features"], Float[np.ndarray, "differences"], str]:
    weights = cp.Variable(differences.shape[1])
    # Not the squared norm: with slow frequencies its optimum is 1e12 and the solver then reports infeasibility.
    objective = {"l2": _l2_objective, "group_sparse": _group_sparse_objective}[norm](weights)
    constraint = differences @ weights >= 1
    problem = cp.Problem(cp.Minimize(objective), [constraint])
    with warnings.catch_warnings():
        # "Solution may be inaccurate" is superseded by the certificate.
        warnings.simplefilter("ignore", UserWarning)
        try:
            problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
        except cp.SolverError as error:
            raise MarginSolverError("hard_margin: the solver stopped without an answer") from error
    if problem.status in (cp.INFEASIBLE, cp.INFEASIBLE_INACCURATE):
        raise InfeasibleMargin(f"no weights give all {len(differences)} differences a margin of 1")
    if weights.value is None:
        raise MarginSolverError(f"hard_margin: the solver stopped with status {problem.status}")
    return weights.value, constraint.dual_value, problem.status


def _l2_objective(weights: cp.Variable) -> cp.Expression:
    return cp.norm(weights, 2)


def _group_sparse_objective(weights: cp.Variable) -> cp.Expression:
    half = weights.size // 2
    return cp.sum(cp.norm(cp.vstack([weights[:half], weights[half:]]), 2, axis=0))
