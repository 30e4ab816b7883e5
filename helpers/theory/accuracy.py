"""T12, the accuracy law: from kernel weights to accuracy through a Gaussian, with no fitted parameter.

Symbol v scores S_v = Σ_δ b_δ 1[x_{n−1−δ} = v]. The differences S_y − S_v have mean b_k, variance 2 Σ_{δ≠k} b_δ² / V and
half of that as covariance: the moments of V independent Gaussians of variance Σ_{δ≠k} b_δ² / V, the label's raised by
b_k. The law puts such Gaussians in their place.
"""

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.special import log_ndtr

from helpers.theory._validation import as_lengths, as_rows, check_integer, check_offset


def d_prime(scores: ArrayLike, offset: int, vocab_size: int, lengths: ArrayLike) -> Float[np.ndarray, "*batch lengths"]:
    """T12: d′ = b_k / √(Σ_{δ<n, δ≠k} b_δ² / V) for weights b of either sign, at each length n.

    ±∞ where the target has no competitor, 0 where every weight is 0. ``ValueError`` unless offset < n ≤ the number of
    scores.
    """
    values = as_rows("scores", scores)
    offset, available = check_offset(offset, values.shape[-1], "length")
    vocab_size = check_integer("vocab_size", vocab_size, 1)
    lengths = as_lengths(lengths, offset + 1, available)
    # d′ does not depend on the scale, but squares overflow.
    scale = np.abs(values).max(axis=-1, keepdims=True)
    values = np.divide(values, scale, out=np.zeros_like(values), where=scale > 0)
    target = values[..., offset, None]
    squares = values**2
    squares[..., offset] = 0.0
    noise = np.sqrt(np.cumsum(squares, axis=-1)[..., lengths - 1] / vocab_size)
    return _ratio(target, noise)


def softmax_d_prime(
    kernel_values: ArrayLike, offset: int, vocab_size: int, lengths: ArrayLike
) -> Float[np.ndarray, "*batch lengths"]:
    """T12 for softmax weights b = a: d′ = √V e^{f(k)} / √(Σ e^{2f(δ)}), taken in logarithms. As ``d_prime``."""
    values = as_rows("kernel_values", kernel_values)
    offset, available = check_offset(offset, values.shape[-1], "length")
    vocab_size = check_integer("vocab_size", vocab_size, 1)
    lengths = as_lengths(lengths, offset + 1, available)
    doubled = 2 * (values - values[..., offset, None])
    doubled[..., offset] = -np.inf
    with np.errstate(over="ignore"):
        return np.exp(0.5 * (np.log(vocab_size) - np.logaddexp.accumulate(doubled, axis=-1)[..., lengths - 1]))


def forced_choice_accuracy(d_prime: ArrayLike, vocab_size: int) -> Float[np.ndarray, "*batch"]:
    """T12: ∫ φ(z − d′) Φ(z)^{V−1} dz, the m-alternative forced-choice integral, to an absolute error below 1e-10.

    1/V at d′ = 0, Φ(d′/√2) at V = 2, 1 at V = 1. By the trapezoid rule, which converges exponentially for an analytic
    integrand that vanishes at both ends.
    """
    vocab_size = check_integer("vocab_size", vocab_size, 1)
    separation = np.asarray(d_prime, dtype=np.float64)
    if vocab_size == 1:
        return np.ones_like(separation)
    step = 1.0 / 32.0
    deviation = np.arange(-10.0, 10.0 + step, step)
    density = np.exp(-0.5 * deviation**2) * step / np.sqrt(2 * np.pi)
    wins = np.exp((vocab_size - 1) * log_ndtr(separation[..., None] + deviation))
    return np.clip(wins @ density, 0.0, 1.0)


def softmax_accuracy(
    kernel_values: ArrayLike, offset: int, vocab_size: int, lengths: ArrayLike
) -> Float[np.ndarray, "*batch lengths"]:
    """T12: predicted accuracy of the softmax head with kernel f at each length. As ``softmax_d_prime``."""
    return forced_choice_accuracy(softmax_d_prime(kernel_values, offset, vocab_size, lengths), vocab_size)


def linear_accuracy(
    scores: ArrayLike, offset: int, vocab_size: int, lengths: ArrayLike
) -> Float[np.ndarray, "*batch lengths"]:
    """T12 with b = f: predicted accuracy of the linear head with scores f at each length. As ``d_prime``."""
    return forced_choice_accuracy(d_prime(scores, offset, vocab_size, lengths), vocab_size)


def _ratio(
    signal: Float[np.ndarray, "*batch one"], noise: Float[np.ndarray, "*batch lengths"]
) -> Float[np.ndarray, "*batch lengths"]:
    """signal / noise with 0 / 0 = 0."""
    signal = np.broadcast_to(signal, noise.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((signal == 0) & (noise == 0), 0.0, signal / noise)
