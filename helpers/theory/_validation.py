"""Argument checks shared by the theory modules."""

from numbers import Real

import numpy as np
from jaxtyping import Complex, Float, Int
from numpy.typing import ArrayLike

from helpers.validation import require, require_integer


def check_integer(name: str, value: int, minimum: int) -> int:
    """``value`` as an int; ``ValueError`` unless it is an integer ≥ ``minimum``."""
    require_integer(name, value, minimum)
    return int(value)


def check_real(name: str, value: float, *, positive: bool) -> float:
    """``value`` as a float; ``ValueError`` unless it is finite and > 0 (``positive``) or ≥ 0."""
    number = isinstance(value, Real) and not isinstance(value, bool) and bool(np.isfinite(value))
    in_range = number and (value > 0 or (value == 0 and not positive))
    require(in_range, name, value, f"a finite number {'>' if positive else '≥'} 0")
    return float(value)


def check_offset(offset: int, length: int, length_name: str = "train_length") -> tuple[int, int]:
    """``(offset, length)`` as ints; ``ValueError`` unless 0 ≤ offset < length.

    The task asks for an offset > 0; the theory also has an answer at 0, where the query attends to itself.
    """
    length = check_integer(length_name, length, 1)
    require_integer("offset", offset, 0)
    require(offset < length, "offset", offset, f"an integer, 0 ≤ offset < {length_name} = {length}")
    return int(offset), length


def require_each(name: str, array: np.ndarray, fits: np.ndarray, allowed: str) -> None:
    """Raise ``ValueError`` naming the first entry of ``array`` for which ``fits`` is False."""
    wrong = array[~fits].ravel()
    require(wrong.size == 0, f"{name} entry", wrong[0].item() if wrong.size else None, allowed)


def as_frequencies(frequencies: ArrayLike) -> Float[np.ndarray, "num_carriers"]:
    """The frequencies as float64; ``ValueError`` unless they are a non-empty list of finite numbers."""
    array = np.asarray(frequencies, dtype=np.float64)
    require(array.ndim == 1 and array.size > 0, "frequencies.shape", array.shape, "that of a non-empty 1-d array")
    require_each("frequencies", array, np.isfinite(array), "a finite number, in radians per token")
    return array


def as_carriers(carriers: ArrayLike, num_carriers: int) -> Complex[np.ndarray, "*batch num_carriers"]:
    """The carriers as complex128; ``ValueError`` unless they are finite, one for each frequency."""
    array = np.asarray(carriers, dtype=np.complex128)
    last = array.shape[-1] if array.ndim else None
    require(last == num_carriers, "carriers.shape", array.shape, f"one number for each of {num_carriers} frequencies")
    require_each("carriers", array, np.isfinite(array), "finite")
    return array


def as_one_head(carriers: ArrayLike, num_carriers: int) -> Complex[np.ndarray, "num_carriers"]:
    """As ``as_carriers``, for a single head."""
    array = as_carriers(carriers, num_carriers)
    require(array.ndim == 1, "carriers.shape", array.shape, "one head, a 1-d array")
    return array


def as_rows(name: str, values: ArrayLike) -> Float[np.ndarray, "*batch length"]:
    """``values`` as float64; ``ValueError`` if the last axis is missing or empty, or a value is NaN."""
    array = np.asarray(values, dtype=np.float64)
    require(array.ndim > 0 and array.shape[-1] > 0, f"{name}.shape", array.shape, "with at least one offset last")
    require_each(name, array, ~np.isnan(array), "a number")
    return array


def as_lengths(lengths: ArrayLike, minimum: int, maximum: int | None = None) -> Int[np.ndarray, "lengths"]:
    """The lengths as a 1-d int64 array; ``ValueError`` unless all are integers in minimum … maximum."""
    array = np.atleast_1d(np.asarray(lengths))
    whole = np.issubdtype(array.dtype, np.integer) or array.size == 0
    require(array.ndim == 1 and whole, "lengths", f"{array.dtype} of shape {array.shape}", "integers, at most 1-d")
    upper = np.inf if maximum is None else maximum
    allowed = f"an integer ≥ {minimum}" + ("" if maximum is None else f" and ≤ {maximum}")
    require_each("lengths", array, (array >= minimum) & (array <= upper), allowed)
    return array.astype(np.int64)
