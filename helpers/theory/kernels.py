"""Rotary frequencies, their features, and the kernel f(δ) that carriers make of them.

With φ(δ) = (cos θ_r δ)_r followed by (sin θ_r δ)_r and w = (Re c, Im c),

    f(δ) = ⟨w, φ(δ)⟩ = Σ_r Re(c_r e^{−iθ_r δ}) = Σ_r |c_r| cos(θ_r δ − arg c_r).
"""

import numpy as np
from jaxtyping import Complex, Float
from numpy.typing import ArrayLike

from helpers.theory._validation import (
    as_carriers,
    as_frequencies,
    check_integer,
    check_offset,
    check_real,
    require_each,
)
from helpers.validation import require


def rotary_frequencies(head_dim: int, base: float = 10_000.0) -> Float[np.ndarray, "num_carriers"]:
    """θ_r = base^(−2r/d), radians per token, r = 0 … d/2 − 1 (RoFormer, arXiv 2104.09864, section 3.2.2).

    ``ValueError`` unless ``head_dim`` is an even integer ≥ 2 and ``base`` > 0.
    """
    head_dim = check_integer("head_dim", head_dim, 2)
    require(head_dim % 2 == 0, "head_dim", head_dim, "an even integer ≥ 2")
    base = check_real("base", base, positive=True)
    return base ** (-2.0 * np.arange(head_dim // 2) / head_dim)


def features(frequencies: ArrayLike, offsets: ArrayLike) -> Float[np.ndarray, "*offsets features"]:
    """φ(δ): the cosines, then the sines, of θ_r δ; the last axis has 2 * num_carriers entries."""
    angles = np.multiply.outer(np.asarray(offsets, dtype=np.float64), as_frequencies(frequencies))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=-1)


def difference_features(
    frequencies: ArrayLike, offset: int, train_length: int
) -> Float[np.ndarray, "train_length-1 features"]:
    """φ(k) − φ(δ) for every competitor δ < L, δ ≠ k, in increasing δ.

    Written as products of sines, so that slow frequencies lose no digits to cancellation.
    """
    theta = as_frequencies(frequencies)
    offset, train_length = check_offset(offset, train_length)
    deltas = np.delete(np.arange(train_length, dtype=np.float64), offset)
    middle = np.multiply.outer(offset + deltas, theta / 2)
    half_gap = np.sin(np.multiply.outer(offset - deltas, theta / 2))
    return np.concatenate([-2 * np.sin(middle) * half_gap, 2 * np.cos(middle) * half_gap], axis=-1)


def kernel(carriers: ArrayLike, frequencies: ArrayLike, offsets: ArrayLike) -> Float[np.ndarray, "*batch offsets"]:
    """f(δ) = Σ_r Re(c_r e^{−iθ_r δ}) at each of the given offsets (a 1-d array).

    Carriers may have leading batch axes. ``ValueError`` if the shapes do not fit.
    """
    theta = as_frequencies(frequencies)
    carriers = as_carriers(carriers, theta.size)
    deltas = np.asarray(offsets, dtype=np.float64)
    require(deltas.ndim == 1, "offsets.shape", deltas.shape, "that of a 1-d array")
    values = np.zeros((*carriers.shape[:-1], deltas.size))
    # One carrier at a time: a million offsets would otherwise need a features matrix of gigabytes.
    for r in np.flatnonzero(carriers.reshape(-1, theta.size).any(axis=0)):
        angles = theta[r] * deltas
        values += carriers.real[..., r, None] * np.cos(angles) + carriers.imag[..., r, None] * np.sin(angles)
    return values


def weights_from_carriers(carriers: ArrayLike) -> Float[np.ndarray, "*batch features"]:
    """w = (Re c, Im c), the vector with f = ⟨w, φ⟩."""
    carriers = np.asarray(carriers, dtype=np.complex128)
    return np.concatenate([carriers.real, carriers.imag], axis=-1)


def carriers_from_weights(weights: ArrayLike) -> Complex[np.ndarray, "*batch num_carriers"]:
    """c from w = (Re c, Im c). ``ValueError`` if the last axis is not even."""
    weights = np.asarray(weights, dtype=np.float64)
    half, odd = divmod(weights.shape[-1] if weights.ndim else 0, 2)
    require(half > 0 and not odd, "weights.shape", weights.shape, "of even length ≥ 2 along the last axis")
    return weights[..., :half] + 1j * weights[..., half:]


def aligned_carriers(
    amplitudes: ArrayLike, frequencies: ArrayLike, offset: int
) -> Complex[np.ndarray, "*batch num_carriers"]:
    """T9: the carriers with the given amplitudes whose peaks all meet at the target offset, arg c_r = θ_r k."""
    theta = as_frequencies(frequencies)
    amplitudes = np.asarray(amplitudes, dtype=np.float64)
    require_each("amplitudes", amplitudes, amplitudes >= 0, "a number ≥ 0")
    return as_carriers(amplitudes * np.exp(1j * theta * check_integer("offset", offset, 0)), theta.size)
