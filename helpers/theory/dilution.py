"""Dilution: how the target's softmax weight falls with length, exactly and from the carriers alone."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike
from scipy.special import expit, ive

from helpers.theory._validation import (
    as_carriers,
    as_frequencies,
    as_lengths,
    as_one_head,
    as_rows,
    check_integer,
    check_offset,
    check_real,
)
from helpers.theory.carriers import active_carriers
from helpers.theory.kernels import kernel
from helpers.validation import require


def distractor_log_odds(
    kernel_values: ArrayLike, offset: int, lengths: ArrayLike
) -> Float[np.ndarray, "*batch lengths"]:
    """T10: log Σ_{δ<n, δ≠k} e^{f(δ) − f(k)}, the log odds against the target, at each length n.

    ``kernel_values`` holds f(0), f(1), … on its last axis. −∞ where the target has no competitor. ``ValueError``
    unless offset < n ≤ the number of values, for every n.
    """
    values = as_rows("kernel_values", kernel_values)
    offset, available = check_offset(offset, values.shape[-1], "length")
    lengths = as_lengths(lengths, offset + 1, available)
    gaps = values[..., : lengths.max(initial=offset + 1)] - values[..., offset, None]
    gaps[..., offset] = -np.inf
    return np.logaddexp.accumulate(gaps, axis=-1)[..., lengths - 1]


def target_weight(kernel_values: ArrayLike, offset: int, lengths: ArrayLike) -> Float[np.ndarray, "*batch lengths"]:
    """T10: a_k(n) = 1 / (1 + Σ_{δ<n, δ≠k} e^{−(f(k) − f(δ))}), exact, at each length n.

    Errors as ``distractor_log_odds``.
    """
    return expit(-distractor_log_odds(kernel_values, offset, lengths))


def half_length(kernel_values: ArrayLike, offset: int) -> int | None:
    """The smallest length n > k with a_k(n) ≤ 1/2, or None if no length up to the number of values reaches it."""
    values = as_rows("kernel_values", kernel_values)
    require(values.ndim == 1, "kernel_values.shape", values.shape, "that of one kernel, a 1-d array")
    offset, available = check_offset(offset, values.size, "length")
    lengths = np.arange(offset + 1, available + 1)
    reached = np.flatnonzero(distractor_log_odds(values, offset, lengths) >= 0)
    return int(lengths[reached[0]]) if reached.size else None


def empirical_rate(kernel_values: ArrayLike, offset: int, lengths: ArrayLike) -> Float[np.ndarray, "*batch lengths"]:
    """T11: (1/n) Σ_{δ<n} e^{f(δ) − f(k)} = 1 / (n a_k(n)), what the Bessel rate approximates, at each length n.

    Errors as ``distractor_log_odds``.
    """
    odds = np.exp(distractor_log_odds(kernel_values, offset, lengths))
    return (1.0 + odds) / np.atleast_1d(np.asarray(lengths))


def log_bessel_rate(
    carriers: ArrayLike, frequencies: ArrayLike, offset: int, turned: ArrayLike | None = None
) -> Float[np.ndarray, "*batch"]:
    """T11: log ρ = −f(k) + Σ_r log I₀(|c_r|), so that 1/a_k(n) ≈ 1 + nρ.

    Carriers outside the mask ``turned`` (by default none is) have n θ_r ≪ 2π: they stay at the value they have at the
    target, and drop out of f(k) and of the product.
    """
    theta = as_frequencies(frequencies)
    carriers = as_carriers(carriers, theta.size)
    mask = np.ones(theta.size, dtype=bool) if turned is None else np.asarray(turned, dtype=bool)
    require(mask.shape == theta.shape, "turned.shape", mask.shape, f"one value for each of {theta.size} frequencies")
    carriers = np.where(mask, carriers, 0.0)
    amplitudes = np.abs(carriers)
    peak = kernel(carriers, theta, [check_integer("offset", offset, 0)])[..., 0]
    # ive(0, x) = I₀(x) e^{−x}: I₀ itself overflows at 714.
    return (amplitudes + np.log(ive(0, amplitudes))).sum(axis=-1) - peak


def bessel_rate(
    carriers: ArrayLike, frequencies: ArrayLike, offset: int, turned: ArrayLike | None = None
) -> Float[np.ndarray, "*batch"]:
    """T11: ρ = e^{−f(k)} Π_r I₀(|c_r|); its inverse is the predicted half-length. See ``log_bessel_rate``."""
    return np.exp(log_bessel_rate(carriers, frequencies, offset, turned))


def aligned_rate(carriers: ArrayLike) -> Float[np.ndarray, "*batch"]:
    """T11: Π_r (2π|c_r|)^{−1/2}, the rate of an aligned kernel whose amplitudes are large.

    No factor exceeds 1, as the exact one, I₀(|c|) e^{−|c|}, never does: a carrier too small for the approximation
    counts as none.
    """
    factors = np.maximum(2 * np.pi * np.abs(np.asarray(carriers, dtype=np.complex128)), 1.0)
    return np.exp(-0.5 * np.log(factors).sum(axis=-1))


def diluted_weight(rate: ArrayLike, lengths: ArrayLike) -> Float[np.ndarray, "*batch lengths"]:
    """T11: the predicted target weight 1 / (1 + nρ) at each length n."""
    rate = np.asarray(rate, dtype=np.float64)
    return 1.0 / (1.0 + np.multiply.outer(rate, as_lengths(lengths, 1)))


def turns(frequencies: ArrayLike, length: int) -> Float[np.ndarray, "num_carriers"]:
    """How many full turns n|θ_r| / 2π each carrier makes over the length."""
    return check_integer("length", length, 1) * np.abs(as_frequencies(frequencies)) / (2 * np.pi)


@dataclass(frozen=True, eq=False)
class DilutionRegime:
    """T11: how far (1/n) Σ_{δ<n} e^{f(δ)} is from Π_r I₀(|c_r|) at one length, and what is to blame.

    By the Jacobi–Anger expansion the quotient of the two is 1 plus a sum over integer vectors m ≠ 0, of
    Π_r I_{m_r}(|c_r|) / I₀(|c_r|) times the mean over δ < n of cos(Σ_r m_r (θ_r δ − arg c_r)). A combination m (a beat)
    whose frequency Σ_r m_r θ_r is near a multiple of 2π has not averaged out yet, even when every carrier by itself
    has turned hundreds of times: rotary bases often make one, as 100^(−1/16) = 0.7499 does with ¾.

    - ``turns``: turns of each carrier over the length; ``turned``: at least ``min_turns`` of them;
    - ``active``: amplitude above the threshold;
    - ``predicted_error``: that sum, i.e. mean / product − 1, to within ``tail``, the weight of beats left out;
    - ``error_bound``: the sum of absolute values plus ``tail``, which the relative error never exceeds;
    - ``slowest_beat``: the vector m of the largest term; ``beat_turns``: its turns; ``beat_size``: its absolute value.
    """

    length: int
    turns: Float[np.ndarray, "num_carriers"]
    active: Bool[np.ndarray, "num_carriers"]
    turned: Bool[np.ndarray, "num_carriers"]
    predicted_error: float
    error_bound: float
    tail: float
    slowest_beat: Int[np.ndarray, "num_carriers"]
    beat_turns: float
    beat_size: float

    def holds(self, tolerance: float = 0.02) -> bool:
        """The Bessel rate is guaranteed to be within ``tolerance`` of the mean over this length."""
        return self.error_bound <= tolerance


def dilution_regime(
    carriers: ArrayLike,
    frequencies: ArrayLike,
    length: int,
    *,
    min_turns: float = 1.0,
    threshold: float = 1e-3,
    max_terms: int = 100_000,
) -> DilutionRegime:
    """T11: does the Bessel rate of one head hold at this length? See ``DilutionRegime``.

    At most ``max_terms`` beats are kept, the heaviest; the rest goes into ``tail``, so the bound holds all the
    same. ``ValueError`` unless ``carriers`` is one head.
    """
    theta = as_frequencies(frequencies)
    carriers = as_one_head(carriers, theta.size)
    length = check_integer("length", length, 1)
    min_turns = check_real("min_turns", min_turns, positive=False)
    max_terms = check_integer("max_terms", max_terms, 1)
    orders, sizes = _beats(np.abs(carriers), max_terms)
    # Σ_m I_m(A) = e^A, so the weight of all beats together, m = 0 included, is known.
    tail = max(float(np.prod(1.0 / ive(0, np.abs(carriers))) - sizes.sum()), 0.0)
    flat = ~orders.any(axis=1)
    orders, sizes = orders[~flat], sizes[~flat]
    step = np.remainder(orders @ theta + np.pi, 2 * np.pi) - np.pi
    averages = _dirichlet_mean(step, length)
    terms = sizes * averages * np.cos(step * (length - 1) / 2 - orders @ np.angle(carriers))
    bounds = sizes * np.abs(averages)
    worst = int(bounds.argmax()) if bounds.size else None
    made = turns(theta, length)
    return DilutionRegime(
        length=length,
        turns=made,
        active=active_carriers(carriers, threshold),
        turned=made >= min_turns,
        predicted_error=float(terms.sum()),
        error_bound=float(bounds.sum()) + tail,
        tail=tail,
        slowest_beat=np.zeros(theta.size, dtype=np.int64) if worst is None else orders[worst],
        beat_turns=0.0 if worst is None else float(length * abs(step[worst]) / (2 * np.pi)),
        beat_size=0.0 if worst is None else float(bounds[worst]),
    )


def _dirichlet_mean(step: Float[np.ndarray, "beats"], length: int) -> Float[np.ndarray, "beats"]:
    """sin(nx/2) / (n sin(x/2)): the mean of e^{ixδ} over 0 ≤ δ < n, but for its phase x(n − 1)/2."""
    below = length * np.sin(step / 2)
    return np.divide(np.sin(length * step / 2), below, out=np.ones_like(step), where=below != 0)


def _beats(
    amplitudes: Float[np.ndarray, "num_carriers"], max_terms: int, cutoff: float = 1e-9
) -> tuple[Int[np.ndarray, "beats num_carriers"], Float[np.ndarray, "beats"]]:
    """The heaviest integer vectors m, m = 0 among them, and their weights Π_r I_{m_r}(A_r) / I₀(A_r)."""
    orders = np.zeros((1, 0), dtype=np.int64)
    sizes = np.ones(1)
    for amplitude in amplitudes:
        reach = 10 + int(7 * np.sqrt(amplitude))  # I_m / I₀ is below the cutoff from here on
        harmonics = np.arange(-reach, reach + 1)
        weights = ive(np.abs(harmonics), amplitude) / ive(0, amplitude)
        harmonics, weights = harmonics[weights > cutoff], weights[weights > cutoff]
        products = np.multiply.outer(sizes, weights).ravel()
        kept = np.flatnonzero(products > cutoff)
        if kept.size > max_terms:
            kept = kept[np.argpartition(products[kept], -max_terms)[-max_terms:]]
        before, now = np.divmod(kept, harmonics.size)
        orders = np.column_stack([orders[before], harmonics[now]])
        sizes = products[kept]
    return orders, sizes
