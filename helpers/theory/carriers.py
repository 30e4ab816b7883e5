"""Carriers of a trained head: where they come from, how large, how aligned, how many, and what they bound."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Bool, Complex, Float, Int
from numpy.typing import ArrayLike

from helpers.theory._validation import (
    as_carriers,
    as_frequencies,
    as_one_head,
    check_integer,
    check_offset,
    check_real,
    require_each,
)
from helpers.theory.kernels import carriers_from_weights, features, kernel
from helpers.validation import require


def head_carriers(queries: ArrayLike, keys: ArrayLike) -> Complex[np.ndarray, "*batch num_carriers"]:
    """c_r = conj(q_r) κ_r / √d with d = 2 num_carriers, from a head's complex query and key pairs.

    Turning q_r by iθ_r and κ_r by jθ_r gives the logit Σ_r Re(q_r conj(κ_r) e^{iθ_r δ}) / √d with δ = i − j; the
    amplitude of e^{−iθ_r δ} is the conjugate of that product. ``ValueError`` unless the two have the same shape.
    """
    queries = np.asarray(queries, dtype=np.complex128)
    keys = np.asarray(keys, dtype=np.complex128)
    require(
        queries.ndim > 0 and queries.shape[-1] > 0, "queries.shape", queries.shape, "with a pair along the last axis"
    )
    require(keys.shape == queries.shape, "keys.shape", keys.shape, f"that of the queries, {queries.shape}")
    return queries.conj() * keys / np.sqrt(2 * queries.shape[-1])


@dataclass(frozen=True, eq=False)
class CarrierFit:
    """Least-squares carriers of a measured kernel.

    ``residual`` is the root-mean-square misfit (weighted as the fit), ``explained`` the share of the kernel's variance
    the fit accounts for (1 for a constant kernel), ``rank`` and ``condition`` those of the fitted design. A rank below
    the number of unknowns means that many carriers make the same kernel: the smallest such is returned.
    """

    carriers: Complex[np.ndarray, "num_carriers"]
    intercept: float
    residual: float
    explained: float
    rank: int
    condition: float


def fit_carriers(
    kernel_values: ArrayLike,
    frequencies: ArrayLike,
    offsets: ArrayLike,
    *,
    intercept: bool = False,
    sample_weights: ArrayLike | None = None,
    relative_cutoff: float = 1e-10,
) -> CarrierFit:
    """Carriers by least squares of f(δ) on φ(δ), optionally with a constant that softmax would not see.

    ``sample_weights`` weigh the squared misfit of each offset, e.g. by how many pairs (i, j) it was averaged over.
    Singular values of the design below ``relative_cutoff`` times the largest are treated as zero: slow rotary
    frequencies are nearly collinear on a short range. ``ValueError`` if the shapes do not fit.
    """
    theta = as_frequencies(frequencies)
    deltas = np.asarray(offsets, dtype=np.float64)
    values = np.asarray(kernel_values, dtype=np.float64)
    require(deltas.ndim == 1 and deltas.size > 0, "offsets.shape", deltas.shape, "that of a non-empty 1-d array")
    require(values.shape == deltas.shape, "kernel_values.shape", values.shape, f"that of the offsets, {deltas.shape}")
    weights = np.ones(deltas.size) if sample_weights is None else np.asarray(sample_weights, dtype=np.float64)
    require(
        weights.shape == deltas.shape, "sample_weights.shape", weights.shape, f"that of the offsets, {deltas.shape}"
    )
    require_each("sample_weights", weights, weights >= 0, "a number ≥ 0")
    require(weights.sum() > 0, "sum of sample_weights", float(weights.sum()), "> 0")
    weights = weights / weights.sum()
    root = np.sqrt(weights)
    design = features(theta, deltas)
    if intercept:
        design = np.column_stack([design, np.ones(deltas.size)])
    solution, _, rank, singular = np.linalg.lstsq(design * root[:, None], values * root, rcond=relative_cutoff)
    misfit = weights @ (values - design @ solution) ** 2
    variance = weights @ (values - weights @ values) ** 2
    return CarrierFit(
        carriers=carriers_from_weights(solution[: 2 * theta.size]),
        intercept=float(solution[-1]) if intercept else 0.0,
        residual=float(np.sqrt(misfit)),
        explained=float(1.0 - misfit / variance) if variance > 0 else 1.0,
        rank=int(rank),
        condition=float(singular[0] / singular[-1]) if singular[-1] > 0 else np.inf,
    )


def merge_repeated(
    carriers: ArrayLike, frequencies: ArrayLike
) -> tuple[Complex[np.ndarray, "*batch distinct"], Float[np.ndarray, "distinct"]]:
    """Sum the carriers that share a frequency: ``(carriers, frequencies)``, fastest first, with the same kernel."""
    theta = as_frequencies(frequencies)
    carriers = as_carriers(carriers, theta.size)
    distinct, index = np.unique(theta, return_inverse=True)
    merged = np.zeros((*carriers.shape[:-1], distinct.size), dtype=np.complex128)
    np.add.at(merged, (..., index), carriers)
    return merged[..., ::-1], distinct[::-1]


def direction_cosine(carriers: ArrayLike, others: ArrayLike) -> Float[np.ndarray, "*batch"]:
    """Cosine of the angle between two rules as vectors w = (Re c, Im c). NaN if either is zero."""
    first, second = np.asarray(carriers, dtype=np.complex128), np.asarray(others, dtype=np.complex128)
    inner = (first * second.conj()).real.sum(axis=-1)
    size = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
    return np.divide(inner, size, out=np.full_like(inner, np.nan), where=size > 0)


def alignment(carriers: ArrayLike, frequencies: ArrayLike, offset: int) -> Float[np.ndarray, "*batch"]:
    """T9: f(k) / Σ_r |c_r| ≤ 1, with equality iff every active carrier has arg c_r = θ_r k. NaN if all are 0."""
    theta = as_frequencies(frequencies)
    carriers = as_carriers(carriers, theta.size)
    peak = kernel(carriers, theta, [check_integer("offset", offset, 0)])[..., 0]
    total = np.abs(carriers).sum(axis=-1)
    return np.divide(peak, total, out=np.full_like(peak, np.nan), where=total > 0)


def participation_ratio(carriers: ArrayLike) -> Float[np.ndarray, "*batch"]:
    """(Σ|c|)² / Σ|c|²: between 1 and the number of carriers; 0 for zero carriers."""
    amplitudes = np.abs(np.asarray(carriers, dtype=np.complex128))
    # Relative to the largest, so that tiny amplitudes do not underflow when squared.
    largest = amplitudes.max(axis=-1, keepdims=True)
    shares = np.divide(amplitudes, largest, out=np.zeros_like(amplitudes), where=largest > 0)
    squares = (shares**2).sum(axis=-1)
    return np.divide(shares.sum(axis=-1) ** 2, squares, out=np.zeros_like(squares), where=squares > 0)


def active_carriers(carriers: ArrayLike, threshold: float = 1e-3) -> Bool[np.ndarray, "*batch num_carriers"]:
    """Which carriers have more than ``threshold`` times the largest amplitude; none if all are zero."""
    require(0 <= threshold < 1, "threshold", threshold, "a number, 0 ≤ threshold < 1")
    amplitudes = np.abs(np.asarray(carriers, dtype=np.complex128))
    return amplitudes > threshold * amplitudes.max(axis=-1, keepdims=True)


def active_count(carriers: ArrayLike, threshold: float = 1e-3) -> Int[np.ndarray, "*batch"]:
    """Number of active carriers."""
    return active_carriers(carriers, threshold).sum(axis=-1)


def carrier_table(carriers: ArrayLike, frequencies: ArrayLike, offset: int, threshold: float = 1e-3) -> pd.DataFrame:
    """One row for each carrier of one head.

    Columns: ``carrier``, ``frequency``, ``period`` (tokens), ``amplitude``, ``share`` of the total amplitude, ``phase``
    (arg c_r), ``phase_error`` (arg c_r − θ_r k in (−π, π], 0 when aligned), ``active``.
    """
    theta = as_frequencies(frequencies)
    carriers = as_one_head(carriers, theta.size)
    amplitudes = np.abs(carriers)
    total = amplitudes.sum()
    rotation = np.exp(-1j * theta * check_integer("offset", offset, 0))
    return pd.DataFrame(
        {
            "carrier": np.arange(theta.size),
            "frequency": theta,
            "period": np.divide(2 * np.pi, np.abs(theta), out=np.full(theta.size, np.inf), where=theta != 0),
            "amplitude": amplitudes,
            "share": amplitudes / total if total > 0 else amplitudes,
            "phase": np.angle(carriers),
            "phase_error": np.angle(carriers * rotation),
            "active": active_carriers(carriers, threshold),
        }
    )


def logit_matrix(carriers: ArrayLike, frequencies: ArrayLike, length: int) -> Float[np.ndarray, "*batch length length"]:
    """The n × n matrix f(i − j), before any causal mask (negative offsets are above the diagonal)."""
    length = check_integer("length", length, 1)
    values = kernel(carriers, frequencies, np.arange(1 - length, length))
    positions = np.arange(length)
    return values[..., positions[:, None] - positions + length - 1]


def logit_rank(
    carriers: ArrayLike, frequencies: ArrayLike, length: int, relative_cutoff: float = 1e-10
) -> Int[np.ndarray, "*batch"]:
    """T8: numerical rank of the n × n logit matrix: singular values above ``relative_cutoff`` times the largest."""
    cutoff = check_real("relative_cutoff", relative_cutoff, positive=False)
    singular = np.linalg.svd(logit_matrix(carriers, frequencies, length), compute_uv=False)
    return (singular > cutoff * singular[..., :1]).sum(axis=-1)


def rank_bound(carriers: ArrayLike, threshold: float = 0.0) -> Int[np.ndarray, "*batch"]:
    """T8: rank ≤ 2 × active carriers, whatever the length. Exact for ``threshold`` = 0, approximate above it."""
    return 2 * active_count(carriers, threshold)


def peak_offset(carriers: ArrayLike, frequencies: ArrayLike, length: int) -> Int[np.ndarray, "*batch"]:
    """The offset 0 ≤ δ < n at which the kernel is largest (the smallest such offset on a tie)."""
    _, length = check_offset(0, length, "length")
    return kernel(carriers, frequencies, np.arange(length)).argmax(axis=-1)
