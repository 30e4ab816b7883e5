"""The linear-attention control: output Σ_j f(n−1−j) e_{x_j}, squared loss, rotary features.

The expected loss over uniform i.i.d. tokens is a quadratic form, so that its minimum and gradient descent towards it
are closed forms.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Complex, Float
from numpy.typing import ArrayLike

from helpers.theory._validation import (
    as_carriers,
    as_frequencies,
    as_rows,
    check_integer,
    check_offset,
    check_real,
    require_each,
)
from helpers.theory.kernels import carriers_from_weights, features, kernel
from helpers.validation import require


def expected_linear_loss(scores: ArrayLike, offset: int, vocab_size: int) -> Float[np.ndarray, "*batch"]:
    """T14: E loss = (1 − 1/V) Σ_{δ<L} (f(δ) − 1[δ = k])² + (1/V)(Σ_{δ<L} f(δ) − 1)².

    The last axis of ``scores`` is f(0) … f(L−1). ``ValueError`` if ``offset`` lies outside it.
    """
    values = as_rows("scores", scores)
    offset, _ = check_offset(offset, values.shape[-1])
    vocab_size = check_integer("vocab_size", vocab_size, 1)
    error = values.copy()
    error[..., offset] -= 1.0
    return (1 - 1 / vocab_size) * (error**2).sum(axis=-1) + error.sum(axis=-1) ** 2 / vocab_size


def token_gram_root(train_length: int, vocab_size: int) -> Float[np.ndarray, "train_length train_length"]:
    """T15: M^{1/2}, the symmetric root of M = (1 − 1/V) I + 11ᵀ/V (1 − 1/V, with L/V more along the vector of ones)."""
    train_length = check_integer("train_length", train_length, 1)
    vocab_size = check_integer("vocab_size", vocab_size, 1)
    across = np.sqrt(1 - 1 / vocab_size)
    along = np.sqrt(1 - 1 / vocab_size + train_length / vocab_size)
    return across * np.eye(train_length) + (along - across) / train_length


def linear_design(
    frequencies: ArrayLike, train_length: int, vocab_size: int
) -> Float[np.ndarray, "train_length features"]:
    """T15: the design M^{1/2} Φ, with Φ the L × d matrix of φ(δ)."""
    return token_gram_root(train_length, vocab_size) @ features(frequencies, np.arange(train_length))


def linear_target(offset: int, train_length: int, vocab_size: int) -> Float[np.ndarray, "train_length"]:
    """T15: M^{1/2} e_k, the vector that the design is fitted to."""
    offset, train_length = check_offset(offset, train_length)
    return token_gram_root(train_length, vocab_size)[offset]


def condition_number(design: ArrayLike) -> float:
    """Largest over smallest singular value, ∞ if the smallest is 0. Above 1e15 it is a lower bound: rounding noise."""
    singular = np.linalg.svd(np.asarray(design, dtype=np.float64), compute_uv=False)
    return float(singular[0] / singular[-1]) if singular[-1] > 0 else np.inf


@dataclass(frozen=True, eq=False)
class LinearInterpolant:
    """T15: the minimum-norm minimiser of the expected loss.

    ``rank`` singular directions of the design are kept; ``loss`` is what is left, 0 if they suffice to interpolate.
    """

    weights: Float[np.ndarray, "features"]
    rank: int
    singular_values: Float[np.ndarray, "singular"]
    loss: float

    @property
    def carriers(self) -> Complex[np.ndarray, "num_carriers"]:
        """c from w = (Re c, Im c), so that ``kernel`` gives the scores at any offset."""
        return carriers_from_weights(self.weights)


def min_norm_interpolant(
    frequencies: ArrayLike, offset: int, train_length: int, vocab_size: int, relative_cutoff: float | None = None
) -> LinearInterpolant:
    """T15: the limit of gradient descent from zero, by the pseudo-inverse of the design.

    Singular values at or below ``relative_cutoff`` times the largest (default: machine precision times the larger side)
    are dropped: double precision cannot tell them from 0.
    """
    design = linear_design(frequencies, train_length, vocab_size)
    target = linear_target(offset, train_length, vocab_size)
    left, singular, right = np.linalg.svd(design, full_matrices=False)
    if relative_cutoff is None:
        relative_cutoff = max(design.shape) * np.finfo(np.float64).eps
    relative_cutoff = check_real("relative_cutoff", relative_cutoff, positive=False)
    kept = singular > relative_cutoff * singular[0]
    weights = right[kept].T @ ((left[:, kept].T @ target) / singular[kept])
    scores = features(frequencies, np.arange(train_length)) @ weights
    return LinearInterpolant(
        weights=weights,
        rank=int(kept.sum()),
        singular_values=singular,
        loss=float(expected_linear_loss(scores, offset, vocab_size)),
    )


def largest_stable_step(frequencies: ArrayLike, train_length: int, vocab_size: int) -> float:
    """2 / σ₁²: gradient descent on half the loss diverges from this step size on."""
    return float(2.0 / np.linalg.norm(linear_design(frequencies, train_length, vocab_size), 2) ** 2)


def gradient_descent_path(
    frequencies: ArrayLike, offset: int, train_length: int, vocab_size: int, step_size: float, steps: ArrayLike
) -> Float[np.ndarray, "steps features"]:
    """T15: w_t after t steps of gradient descent from zero on half the expected loss, exact, for each t in ``steps``.

    w_t = Σ_s v_s (1 − (1 − ησ_s²)^t) / σ_s ⟨u_s, M^{1/2} e_k⟩, the power in logarithms, so that it is right for σ_s² at
    rounding level and for t of 1e15 alike. ``ValueError`` unless 0 < step_size < 2 / σ₁² and steps are integers ≥ 0.
    """
    theta = as_frequencies(frequencies)
    counts = np.atleast_1d(np.asarray(steps))
    whole = counts.ndim == 1 and np.issubdtype(counts.dtype, np.integer)
    require(whole, "steps", f"{counts.dtype} of shape {counts.shape}", "integers, at most 1-d")
    require_each("steps", counts, counts >= 0, "an integer ≥ 0")
    left, singular, right = np.linalg.svd(linear_design(theta, train_length, vocab_size), full_matrices=False)
    target = left.T @ linear_target(offset, train_length, vocab_size)
    step_size = check_real("step_size", step_size, positive=True)
    limit = 2.0 / singular[0] ** 2
    require(step_size < limit, "step_size", step_size, f"> 0 and < 2 / σ₁² = {limit:.6g}, where descent diverges")
    rate = step_size * singular**2
    with np.errstate(divide="ignore", invalid="ignore"):
        log_size = np.where(rate < 1, np.log1p(-rate), np.log(np.abs(1 - rate)))
        exponent = np.where(counts[:, None] == 0, 0.0, counts[:, None] * log_size)
    # 1 − (1 − rate)^t; a step beyond 1 / σ_s² overshoots, so that odd powers are negative.
    overshoot = (rate > 1) & (counts[:, None] % 2 == 1)
    reached = np.where(overshoot, 1 + np.exp(exponent), -np.expm1(exponent))
    gain = np.divide(reached, singular, out=np.zeros_like(reached), where=singular > 0)
    return (gain * target) @ right


def linear_d_prime_rate(
    carriers: ArrayLike, frequencies: ArrayLike, offset: int, vocab_size: int
) -> Float[np.ndarray, "*batch"]:
    """T16: lim √n d′(n) of a linear head, √V f(k) / √(½ Σ|c_r|²): at most √(dV), whatever the carriers.

    Over δ < n the mean of f² tends to ½ Σ|c_r|² if the frequencies differ and lie in (0, π), else ``ValueError``. 0
    for a head whose carriers are all 0.
    """
    theta = as_frequencies(frequencies)
    carriers = as_carriers(carriers, theta.size)
    require_each("frequencies", theta, (theta > 0) & (theta < np.pi), "in (0, π)")
    require(np.unique(theta).size == theta.size, "frequencies", theta.tolist(), "all different")
    target = kernel(carriers, theta, [check_integer("offset", offset, 0)])[..., 0]
    noise = np.sqrt(0.5 * (np.abs(carriers) ** 2).sum(axis=-1) / check_integer("vocab_size", vocab_size, 1))
    return np.divide(target, noise, out=np.zeros_like(noise), where=noise > 0)
