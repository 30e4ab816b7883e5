"""Pinning of the learned absolute head: how long the pinned row stays the arg-max, and what accuracy that leaves."""

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from scipy.special import log_ndtr

from helpers.theory._validation import as_lengths, check_integer, check_offset, check_real
from helpers.validation import require


def unseen_row_shrinkage(step_size: float, weight_decay: float, steps: ArrayLike) -> Float[np.ndarray, "*steps"]:
    """T4: (1 − ηλ)^t, all that happens in t steps to a row without gradient (decoupled weight decay)."""
    step_size = check_real("step_size", step_size, positive=False)
    weight_decay = check_real("weight_decay", weight_decay, positive=False)
    return (1.0 - step_size * weight_decay) ** np.asarray(steps, dtype=np.float64)


def row_scores(rows: ArrayLike, direction: ArrayLike) -> Float[np.ndarray, "*rows"]:
    """T5: p · û for each row, û the unit vector along W_Kᵀ W_Q u; at the pinned row this is γ.

    ``ValueError`` if the direction is zero: every row then ties.
    """
    rows = np.asarray(rows, dtype=np.float64)
    direction = np.asarray(direction, dtype=np.float64)
    size = np.linalg.norm(direction)
    require(direction.ndim == 1, "direction.shape", direction.shape, "that of a vector")
    require(0 < size < np.inf, "norm of direction", float(size), "> 0 and finite")
    return rows @ (direction / size)


def pinned_probability(
    gamma: ArrayLike, sigma: float, train_length: int, lengths: ArrayLike
) -> Float[np.ndarray, "*batch lengths"]:
    """T5: P(the pinned row is the arg-max at length n) = Φ(γ/σ)^{n−L}, out-of-range rows ~ N(0, σ² I).

    Given that it is the arg-max in range. With σ = 0 (rows that start at 0) it is 1 where γ > 0, else 0 beyond L.
    ``ValueError`` for a length below ``train_length``.
    """
    train_length = check_integer("train_length", train_length, 1)
    extra = as_lengths(lengths, train_length) - train_length
    return np.exp(_times(extra, _log_win(gamma, sigma)))


def pinned_half_life(gamma: ArrayLike, sigma: float) -> Float[np.ndarray, "*batch"]:
    """T5: positions beyond the training range after which the pinned probability is ½: −log 2 / log Φ(γ/σ).

    ∞ where double precision leaves an out-of-range row no chance.
    """
    log_win = _log_win(gamma, sigma)
    with np.errstate(divide="ignore"):
        return -np.log(2.0) / np.where(log_win == 0, -0.0, log_win)


def hard_attention_accuracy(
    gamma: ArrayLike, sigma: float, offset: int, train_length: int, vocab_size: int, lengths: ArrayLike
) -> Float[np.ndarray, "*batch lengths"]:
    """T5: expected accuracy when all the mass is on the arg-max row, over draws of the out-of-range rows.

    1 at n = L. The pinned token says nothing of the label, so chance, 1/V, for L < n ≤ L + k, where the target is
    still an in-range row that loses to the pinned one. From n = L + k + 1 on the target is one of the n − L fresh
    rows, each of which wins equally often: 1/V + (1 − 1/V)(1 − Φ(γ/σ)^{n−L}) / (n − L).
    """
    offset, train_length = check_offset(offset, train_length)
    vocab_size = check_integer("vocab_size", vocab_size, 1)
    lengths = as_lengths(lengths, train_length)
    extra = lengths - train_length
    lost = -np.expm1(_times(extra, _log_win(gamma, sigma)))
    hit = np.where(extra > offset, lost / np.maximum(extra, 1), 0.0)
    hit = np.where(extra == 0, 1.0, hit)
    return 1.0 / vocab_size + (1.0 - 1.0 / vocab_size) * hit


def _log_win(gamma: ArrayLike, sigma: float) -> Float[np.ndarray, "*batch"]:
    """log Φ(γ / σ): one fresh row loses to the pinned one."""
    gamma = np.asarray(gamma, dtype=np.float64)
    sigma = check_real("sigma", sigma, positive=False)
    if sigma == 0:
        return np.where(gamma > 0, 0.0, -np.inf)
    return log_ndtr(gamma / sigma)


def _times(
    extra: Int[np.ndarray, "lengths"], log_win: Float[np.ndarray, "*batch"]
) -> Float[np.ndarray, "*batch lengths"]:
    """(n − L) log Φ, with 0 × −∞ = 0: no fresh row, nothing to lose to."""
    with np.errstate(invalid="ignore"):
        return np.where(extra == 0, 0.0, np.multiply.outer(log_win, extra))
