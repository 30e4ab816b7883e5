"""Figures: the numbers of the rows, the registry's colours, an opaque page."""

from collections.abc import Iterator

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgba

from helpers.encodings import registry
from helpers.plotting import (
    MARKERS,
    band,
    by_encoding,
    colour_of,
    label_of,
    length_axis,
    mark_chance,
    mark_training,
    use_style,
)

LENGTHS = (16, 24, 48, 64, 512)


@pytest.fixture
def ax() -> Iterator[Axes]:
    """Axes in the book's style, on a figure that is closed afterwards."""
    with mpl.rc_context():
        use_style()
        figure, axes = plt.subplots()
        yield axes
        plt.close(figure)


@pytest.fixture
def rows() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    made = [
        {"encoding": encoding, "length": n, "seed": seed, "accuracy": rng.random(), "target_weight": rng.random()}
        for encoding in ("rotary", "learned", "none")
        for n in LENGTHS
        for seed in range(5)
    ]
    return pd.DataFrame(made).sample(frac=1, random_state=0)


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2)."""
    channels = np.array(to_rgba(colour)[:3])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def edges(ax: Axes, index: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The lower and upper edge of a band, at its x values."""
    points = ax.collections[index].get_paths()[0].vertices
    xs = np.unique(points[:, 0])
    at = [points[points[:, 0] == x, 1] for x in xs]
    return np.array([y.min() for y in at]), np.array([y.max() for y in at])


def test_a_band_is_the_median_and_the_range_over_the_rows(ax: Axes, rows: pd.DataFrame) -> None:
    mine = rows[rows.encoding == "rotary"]
    assert band(mine, "accuracy", ax=ax) is ax
    values = mine.pivot_table(index="length", columns="seed", values="accuracy").to_numpy()
    (line,) = ax.lines
    assert line.get_xdata().tolist() == list(LENGTHS)
    np.testing.assert_allclose(line.get_ydata(), np.sort(values, 1)[:, 2], rtol=1e-15)
    lower, upper = edges(ax)
    np.testing.assert_allclose(lower, values.min(1), rtol=1e-15)
    np.testing.assert_allclose(upper, values.max(1), rtol=1e-15)
    assert to_hex(ax.collections[0].get_facecolor()[0]) == to_hex(line.get_color())


def test_a_band_between_quantiles(ax: Axes, rows: pd.DataFrame) -> None:
    mine = rows[rows.encoding == "rotary"]
    band(mine, "accuracy", ax=ax, quantiles=(0.25, 0.75))
    values = mine.pivot_table(index="length", columns="seed", values="accuracy").to_numpy()
    lower, upper = edges(ax)
    np.testing.assert_allclose(lower, np.sort(values, 1)[:, 1], rtol=1e-12)
    np.testing.assert_allclose(upper, np.sort(values, 1)[:, 3], rtol=1e-12)


def test_each_encoding_has_its_own_line_in_its_own_colour_and_name(ax: Axes, rows: pd.DataFrame) -> None:
    by_encoding(rows, ax=ax)
    drawn = {line.get_label(): line for line in ax.lines}
    assert set(drawn) == {registry[name].label for name in ("rotary", "learned", "none")}
    for name in ("rotary", "learned", "none"):
        line, mine = drawn[registry[name].label], rows[rows.encoding == name]
        assert to_hex(line.get_color()) == registry[name].colour
        np.testing.assert_allclose(line.get_ydata(), mine.groupby("length").accuracy.median(), rtol=1e-15)
    assert len({line.get_marker() for line in ax.lines}) == 3


def test_no_encoding_is_left_out_however_many_there_are(ax: Axes, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there are markers, which then come round again."""
    names = [f"kind {i}" for i in range(len(MARKERS) + 3)]
    monkeypatch.setattr("helpers.plotting.registry", dict.fromkeys(names, registry["rotary"]))
    made = [{"encoding": name, "length": n, "accuracy": 0.5} for name in names for n in (16, 32)]
    by_encoding(pd.DataFrame(made), ax=ax)
    assert len(ax.lines) == len(names)


def test_axes_say_what_they_show(ax: Axes, rows: pd.DataFrame) -> None:
    by_encoding(rows, "target_weight", ax=ax)
    assert ax.get_ylabel() == "target weight"
    assert ax.get_xlabel() == "sequence length n (tokens)"
    assert ax.get_xscale() == "log"
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["16", "64", "512"], "powers of two"


def test_another_abscissa_is_named_too(ax: Axes, rows: pd.DataFrame) -> None:
    by_encoding(rows.rename(columns={"seed": "head_dim"}), x="head_dim", ax=ax)
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_xscale()) == ("head dim", "accuracy", "linear")


def test_lengths_that_are_no_powers_of_two_are_ticked_themselves(ax: Axes) -> None:
    length_axis(ax, [48, 20, 33])
    assert ax.get_xticks().tolist() == [20, 33, 48]


def test_training_and_chance_are_marked_and_named(ax: Axes) -> None:
    mark_training(ax, 16)
    mark_chance(ax, 1 / 16)
    vertical, horizontal = ax.lines
    assert list(vertical.get_xdata()) == [16, 16]
    assert list(horizontal.get_ydata()) == [1 / 16, 1 / 16]
    assert [text.get_text() for text in ax.texts] == ["L = 16", "chance"]


def test_current_axes_are_the_default(ax: Axes, rows: pd.DataFrame) -> None:
    assert band(rows, "accuracy") is ax
    assert by_encoding(rows) is ax


def test_colours_and_labels_are_those_of_the_registry_and_all_different() -> None:
    names = list(registry)
    assert [colour_of(name) for name in names] == [registry[name].colour for name in names]
    assert [label_of(name) for name in names] == [registry[name].label for name in names]
    assert len({to_hex(colour_of(name)) for name in names}) == len(names)
    with pytest.raises(ValueError, match="encoding='rotery' is not allowed"):
        colour_of("rotery")


@pytest.mark.parametrize("name", list(registry))
def test_a_colour_is_visible_on_white(name: str) -> None:
    """A contrast of at least 2.5 to 1 with the page, as the orange of the colour-blind-safe palette has."""
    assert 1.05 / (luminance(colour_of(name)) + 0.05) >= 2.5


def test_the_page_is_opaque_white(ax: Axes, tmp_path) -> None:
    for part in (ax.figure.get_facecolor(), ax.get_facecolor(), to_rgba(plt.rcParams["savefig.facecolor"])):
        assert tuple(part) == (1.0, 1.0, 1.0, 1.0)
    band(pd.DataFrame({"length": [1, 2], "accuracy": [0.0, 1.0]}), "accuracy", ax=ax)
    ax.figure.savefig(tmp_path / "figure.png")
    pixels = plt.imread(tmp_path / "figure.png")
    assert pixels.shape[2] == 3 or bool((pixels[..., 3] == 1).all())
    np.testing.assert_allclose(pixels[0, 0, :3], 1.0)
