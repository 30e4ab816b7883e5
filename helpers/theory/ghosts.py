"""T13, ghost offsets: where, outside the training range, the quasi-periodic kernel comes back up to its target."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy.typing import ArrayLike

from helpers.theory._validation import as_frequencies, as_one_head, check_integer, check_offset, check_real
from helpers.theory.carriers import active_count, alignment, participation_ratio
from helpers.theory.kernels import kernel, rotary_frequencies
from helpers.theory.rules import InfeasibleMargin, Norm, hard_margin_rule, margins

_MAP_COLUMNS = [
    "train_length",
    "offset",
    "head_dim",
    "base",
    "norm",
    "feasible",
    "margin",
    "alignment",
    "participation_ratio",
    "active",
    "ghosts",
    "first_ghost",
    "closest_return",
]


def ghost_offsets(
    carriers: ArrayLike,
    frequencies: ArrayLike,
    offset: int,
    train_length: int,
    max_length: int = 4096,
    tolerance: float = 0.0,
) -> pd.DataFrame:
    """T13: every δ with L ≤ δ < ``max_length`` and f(δ) ≥ f(k) − tolerance.

    Rows in increasing ``delta``: ``strength`` = f(δ) − f(k) in logits, ``odds`` = e^strength, the softmax weight of the
    ghost over that of the target. A positive ``tolerance`` (logits) also lists near returns. An exact return counts,
    whatever rounding makes of it.
    """
    theta = as_frequencies(frequencies)
    carriers = as_one_head(carriers, theta.size)
    offset, train_length = check_offset(offset, train_length)
    max_length = check_integer("max_length", max_length, train_length)
    tolerance = check_real("tolerance", tolerance, positive=False)
    deltas = np.arange(train_length, max_length)
    strength = kernel(carriers, theta, deltas) - kernel(carriers, theta, [offset])
    rounding = 1e-12 * np.abs(carriers).sum()
    found = strength >= -tolerance - rounding
    with np.errstate(over="ignore"):
        odds = np.exp(strength[found])
    return pd.DataFrame({"delta": deltas[found], "strength": strength[found], "odds": odds})


@dataclass(frozen=True)
class RuleSetting:
    """A rotary head and its task: the four numbers that determine the maximum-margin rule."""

    train_length: int
    offset: int
    head_dim: int
    base: float = 10_000.0

    def __post_init__(self) -> None:
        check_offset(self.offset, self.train_length)
        check_integer("train_length", self.train_length, 2)
        rotary_frequencies(self.head_dim, self.base)

    @property
    def frequencies(self) -> Float[np.ndarray, "num_carriers"]:
        """θ_r of this head."""
        return rotary_frequencies(self.head_dim, self.base)


def ghost_map(
    settings: Iterable[RuleSetting], norm: Norm = "group_sparse", max_length: int = 4096, tolerance: float = 0.0
) -> pd.DataFrame:
    """T13: for each setting, does the rule the implicit bias selects generalise in length?

    One row a setting: its four numbers, ``norm``, ``feasible``; ``margin`` (normalised), ``alignment``,
    ``participation_ratio`` and ``active`` carriers of the rule; ``ghosts``, how many below ``max_length``;
    ``first_ghost`` (missing if there is none); ``closest_return``, the largest f(δ) − f(k) over L ≤ δ < ``max_length``
    in units of the in-range margin (≤ −1 keeps that margin, ≥ 0 is a ghost). An infeasible setting has
    missing values after ``feasible``.
    """
    rows = [_ghost_row(setting, norm, max_length, tolerance) for setting in settings]
    frame = pd.DataFrame(rows, columns=_MAP_COLUMNS)
    return frame.astype({"active": "Int64", "ghosts": "Int64", "first_ghost": "Int64"})


def _ghost_row(setting: RuleSetting, norm: Norm, max_length: int, tolerance: float) -> dict[str, object]:
    row: dict[str, object] = {
        "train_length": setting.train_length,
        "offset": setting.offset,
        "head_dim": setting.head_dim,
        "base": setting.base,
        "norm": norm,
    }
    try:
        rule = hard_margin_rule(setting.frequencies, setting.offset, setting.train_length, norm)
    except InfeasibleMargin:
        missing = dict.fromkeys(["active", "ghosts", "first_ghost"], pd.NA)
        return row | {"feasible": False} | missing
    # The rule's smallest in-range margin is 1: strengths are already in its units.
    beyond = -margins(kernel(rule.carriers, setting.frequencies, np.arange(max_length)), setting.offset)
    beyond = beyond[setting.train_length - 1 :]
    ghosts = ghost_offsets(
        rule.carriers, setting.frequencies, setting.offset, setting.train_length, max_length, tolerance
    )
    return row | {
        "feasible": True,
        "margin": rule.margin,
        "alignment": float(alignment(rule.carriers, setting.frequencies, setting.offset)),
        "participation_ratio": float(participation_ratio(rule.carriers)),
        "active": int(active_count(rule.carriers)),
        "ghosts": len(ghosts),
        "first_ghost": int(ghosts["delta"].iloc[0]) if len(ghosts) else pd.NA,
        "closest_return": float(beyond.max()) if beyond.size else np.nan,
    }
