"""Chance: what heads that select nothing reach on the retrieval task, from counting alone.

A head with equal weights answers with the symbol that occurs most often. That beats 1/V in short sequences, where the
winner of the count is often the answer by luck.
"""

import numpy as np
from scipy.stats import binom, poisson

from helpers.validation import require_integer


def uniform_accuracy(vocab_size: int, length: int) -> float:
    """E[max_v N_v]/n: accuracy of equal weights over n uniform tokens, N_v the number of tokens v (exact to rounding).

    Given the counts, the answer is symbol v with probability N_v/n; how ties are broken does not matter. Counts of
    uniform tokens are independent Poisson counts given their sum, so P(max ≤ m) is the V-fold convolution of a
    truncated Poisson distribution. ``ValueError`` unless both arguments are integers, V ≥ 1 and n ≥ 1.
    """
    require_integer("vocab_size", vocab_size, 1)
    require_integer("length", length, 1)
    counts = np.arange(length + 1)
    mass = poisson.pmf(counts, length / vocab_size)
    total = poisson.pmf(length, length)
    expected = 0.0
    for m in range(length):  # E[max] = Σ_m P(max > m)
        at_most = _power(np.where(counts <= m, mass, 0.0), vocab_size)[length] / total
        expected += 1 - at_most
        if 1 - at_most < np.finfo(float).eps:
            break
    return float(expected / length)


def uniform_loss(vocab_size: int, length: int) -> float:
    """E[−log(N_y/n)] in nats: loss of equal weights, N_y = 1 + Binomial(n − 1, 1/V) tokens being the answer.

    ``ValueError`` as for ``uniform_accuracy``.
    """
    require_integer("vocab_size", vocab_size, 1)
    require_integer("length", length, 1)
    others = np.arange(length)
    return float(binom.pmf(others, length - 1, 1 / vocab_size) @ -np.log((1 + others) / length))


def _power(mass: np.ndarray, exponent: int) -> np.ndarray:
    """The ``exponent``-fold convolution of ``mass``, cut to its length."""
    result = np.zeros_like(mass)
    result[0] = 1.0
    while exponent:
        if exponent & 1:
            result = np.convolve(result, mass)[: mass.size]
        mass = np.convolve(mass, mass)[: mass.size]
        exponent >>= 1
    return result
