"""Figures: tidy rows in, Axes out. One style, and one colour per encoding in every chapter."""

from collections.abc import Sequence
from itertools import cycle

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from helpers.encodings import registry

MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")


def use_style() -> None:
    """The book's style: colour-blind-safe figures on opaque white (for dark mode too), 110 dpi; whole table cells."""
    pd.set_option("display.max_colwidth", None)
    sns.set_theme(style="ticks", palette="colorblind", context="notebook")
    plt.rcParams.update(
        {
            "figure.figsize": (7, 4),
            "figure.dpi": 110,
            "savefig.dpi": 110,
            "figure.facecolor": "white",
            "axes.facecolor": "white",
            "savefig.facecolor": "white",
            "savefig.bbox": "tight",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "legend.frameon": False,
            "figure.constrained_layout.use": True,
        }
    )


def colour_of(encoding: str) -> str:
    """The colour of an encoding, the same in every figure."""
    return registry[encoding].colour


def label_of(encoding: str) -> str:
    """The legend text of an encoding."""
    return registry[encoding].label


def band(
    rows: pd.DataFrame,
    y: str,
    x: str = "length",
    ax: Axes | None = None,
    quantiles: tuple[float, float] = (0.0, 1.0),
    **line: object,
) -> Axes:
    """The median of ``y`` at each ``x`` as a line, and a band between two quantiles over the rows (all of them)."""
    ax = ax or plt.gca()
    grouped = rows.groupby(x)[y]
    median = grouped.median()
    (drawn,) = ax.plot(median.index, median, **({"marker": "o", "markersize": 4} | line))
    ax.fill_between(
        median.index,
        grouped.quantile(quantiles[0]),
        grouped.quantile(quantiles[1]),
        color=drawn.get_color(),
        alpha=0.18,
        lw=0,
    )
    return ax


def by_encoding(rows: pd.DataFrame, y: str = "accuracy", x: str = "length", ax: Axes | None = None) -> Axes:
    """One ``band`` an encoding, in its own colour and marker; a log₂ axis for lengths."""
    ax = ax or plt.gca()
    for marker, (encoding, group) in zip(cycle(MARKERS), rows.groupby("encoding", sort=False)):
        band(group, y, x, ax, color=colour_of(encoding), label=label_of(encoding), marker=marker)
    if x == "length":
        length_axis(ax, rows[x].unique())
    else:
        ax.set_xlabel(x.replace("_", " "))
    ax.set_ylabel(y.replace("_", " "))
    return ax


def length_axis(ax: Axes, lengths: Sequence[int]) -> Axes:
    """A log₂ axis of sequence lengths, ticked at the lengths that are powers of two or sparse enough to read."""
    ax.set_xscale("log", base=2)
    powers = [n for n in sorted(lengths) if n & (n - 1) == 0]
    ticks = powers or sorted(lengths)
    ax.set_xticks(ticks, [str(n) for n in ticks])
    ax.minorticks_off()
    ax.set_xlabel("sequence length n (tokens)")
    return ax


def mark_training(ax: Axes, train_length: int) -> Axes:
    """A dotted line at the training length."""
    ax.axvline(train_length, color="0.35", ls=":", lw=1.2)
    ax.annotate(
        f"L = {train_length}", (train_length, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -3),
        textcoords="offset points", va="top", fontsize=9, color="0.35",
    )  # fmt: skip
    return ax


def mark_chance(ax: Axes, chance: float) -> Axes:
    """A dashed line at the accuracy of a guess."""
    ax.axhline(chance, color="0.35", ls="--", lw=1)
    ax.annotate(
        "chance", (1.0, chance), xycoords=("axes fraction", "data"), xytext=(-2, 3),
        textcoords="offset points", ha="right", fontsize=9, color="0.35",
    )  # fmt: skip
    return ax
