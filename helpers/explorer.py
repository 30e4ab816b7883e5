"""The carrier explorer: a live figure whose kernel, ghosts and target weight are computed in the reader's browser.

Altair builds the figure; its numbers are Vega expressions of the sliders (T10, T11 and T13 written out), so that the
page needs neither a network nor a server. ``ExplorerSettings`` gives the same numbers from ``helpers.theory``, for the
tests.

    python -m helpers.explorer    write book/_static/explorer/spec.js again
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
import vl_convert
from jaxtyping import Complex, Float

from helpers import theory
from helpers.validation import require, require_integer

SCRIPT = Path(__file__).resolve().parent.parent / "book" / "_static" / "explorer" / "spec.js"
TRAIN_LENGTH = 16
NEAR = 2.0  # nats below the target that still count as a near ghost
TOPMOST = "currentColor"  # the colour of the page's text, light or dark
COLOURS = {"kernel": "#0173b2", "near": "#de8f05", "ghost": "#d55e00", "law": "#949494"}


@dataclass(frozen=True)
class Slider:
    """One slider: ``label`` with its unit, and the values minimum, minimum + step, … maximum."""

    label: str
    minimum: float
    maximum: float
    step: float


SLIDERS = {
    "offset": Slider("target offset k (tokens)", 1, TRAIN_LENGTH - 1, 1),
    "num_carriers": Slider("number of carriers R", 1, 16, 1),
    "amplitude": Slider("amplitude A (nats)", 0, 10, 0.1),
    "log_base": Slider("base of the frequencies, log₁₀", 0.1, 6, 0.1),
    "phase_error": Slider("phase error ε (radians)", 0, 1.5, 0.05),
    "length": Slider("length n (tokens)", 32, 4096, 32),
}


@dataclass(frozen=True)
class ExplorerSettings:
    """A position of the sliders, and what the figure then shows, by ``helpers.theory``.

    R carriers c_r = A e^{i(θ_r k ± ε)}, + for even r and − for odd r, at θ_r = base^{−r/R}, the rotary frequencies of a
    head of width 2R. ``ValueError`` for a value outside its slider.
    """

    offset: int = 5
    num_carriers: int = 5
    amplitude: float = 4.0
    log_base: float = 1.0
    phase_error: float = 0.0
    length: int = 512

    def __post_init__(self) -> None:
        for field in fields(self):
            slider, value = SLIDERS[field.name], getattr(self, field.name)
            if isinstance(field.default, int):
                require_integer(field.name, value, int(slider.minimum))
            allowed = f"in {slider.minimum:g} … {slider.maximum:g}"
            require(slider.minimum <= value <= slider.maximum, field.name, value, allowed)

    @property
    def frequencies(self) -> Float[np.ndarray, "num_carriers"]:
        """θ_r, radians per token."""
        return theory.rotary_frequencies(2 * self.num_carriers, 10.0**self.log_base)

    @property
    def carriers(self) -> Complex[np.ndarray, "num_carriers"]:
        """c_r, nats."""
        error = self.phase_error * (-1.0) ** np.arange(self.num_carriers)
        return self.amplitude * np.exp(1j * (self.frequencies * self.offset + error))

    def kernel(self) -> Float[np.ndarray, "length"]:
        """f(δ) for δ < n, nats."""
        return theory.kernel(self.carriers, self.frequencies, np.arange(self.length))

    def target_weight(self) -> Float[np.ndarray, "lengths"]:
        """T10: a_k at every length k + 1 … n."""
        return theory.target_weight(self.kernel(), self.offset, np.arange(self.offset + 1, self.length + 1))

    def rate(self) -> float:
        """T11: ρ, the share of the target's odds that a mean distractor takes."""
        return float(theory.bessel_rate(self.carriers, self.frequencies, self.offset))

    def ghosts(self) -> pd.DataFrame:
        """T13: every offset L ≤ δ < n whose kernel is at most ``NEAR`` nats below the target; see ``ghost_offsets``."""
        return theory.ghost_offsets(self.carriers, self.frequencies, self.offset, TRAIN_LENGTH, self.length, NEAR)


def kernel_expression() -> str:
    """Vega's f(δ): Σ_r A cos(θ_r (δ − k) ∓ ε), a term for each carrier that the sliders allow."""
    terms = [
        f"(num_carriers > {r} ? cos(pow(base, -{r} / num_carriers) * (datum.delta - offset) {sign} phase_error) : 0)"
        for r, sign in zip(range(int(SLIDERS["num_carriers"].maximum)), "-+" * 8, strict=True)
    ]
    return "amplitude * (" + " + ".join(terms) + ")"


def rate_expression(terms: int = 40) -> str:
    """Vega's ρ = (I₀(A) e^{−A cos ε})^R; I₀(A) = Σ_m (A²/4)^m / m!² by Horner's rule, exact to rounding for A ≤ 10."""
    series = "1"
    for m in range(terms, 0, -1):
        series = f"1 + amplitude * amplitude / {4 * m * m} * ({series})"
    return f"pow(({series}) * exp(-amplitude * cos(phase_error)), num_carriers)"


def chart() -> alt.VConcatChart:
    """The figure: the kernel with its ghosts above, the target weight against length below."""
    defaults = ExplorerSettings()
    sliders = [
        alt.param(
            name=name,
            value=getattr(defaults, name),
            bind=alt.binding_range(name=s.label, min=s.minimum, max=s.maximum, step=s.step),
        )
        for name, s in SLIDERS.items()
    ]
    derived = [
        alt.param(name="base", expr="pow(10, log_base)"),
        alt.param(name="peak", expr="amplitude * num_carriers * cos(phase_error)"),
        alt.param(name="rate", expr=rate_expression()),
    ]
    offsets = alt.sequence(0, int(SLIDERS["length"].maximum), as_="delta")
    return (
        alt.vconcat(_kernel_panel(), _weight_panel(), data=offsets, spacing=24)
        .transform_filter("datum.delta < length")
        .transform_calculate(kernel=kernel_expression())
        .add_params(*sliders, *derived)
        .resolve_scale(color="independent", x="independent")
        .configure(background="transparent", font="sans-serif", padding=2)
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=TOPMOST, titleColor=TOPMOST, domainColor=TOPMOST, tickColor=TOPMOST, gridColor=TOPMOST,
            gridOpacity=0.12, labelFontSize=12, titleFontSize=13, titleFontWeight="normal", labelOverlap=True,
        )
        .configure_axisY(minExtent=44, maxExtent=44)
        .configure_legend(
            labelColor=TOPMOST, titleColor=TOPMOST, orient="top", labelFontSize=12, labelLimit=240, columns=2
        )
    )  # fmt: skip


def _kernel_panel() -> alt.LayerChart:
    """The kernel, the training range, the target's height, near ghosts and ghosts."""
    delta = alt.X("delta:Q", title="offset δ (tokens)").scale(nice=False)
    height = alt.Y("kernel:Q", title="kernel f(δ) (nats)")
    names = [f"near ghost (within {NEAR:g} nats)", "ghost"]
    scores = alt.Chart()
    found = (
        scores.transform_filter(f"datum.delta >= {TRAIN_LENGTH}")
        .transform_calculate(strength="datum.kernel - peak")
        .transform_filter(f"datum.strength >= -{NEAR:g}")
        .transform_calculate(kind=f"datum.strength >= 0 ? '{names[1]}' : '{names[0]}'")
    )
    colour = alt.Color("kind:N", title=None).scale(domain=names, range=[COLOURS["near"], COLOURS["ghost"]])
    seen = alt.Chart(alt.Data(values=[{}])).mark_rect(color=TOPMOST, opacity=0.08)
    target = scores.transform_filter("datum.delta == offset")
    return alt.layer(
        seen.encode(x=alt.datum(0), x2=alt.datum(TRAIN_LENGTH - 1)),
        target.mark_rule(color=TOPMOST, strokeDash=[4, 4], opacity=0.7).encode(y=height),
        scores.mark_line(color=COLOURS["kernel"], strokeWidth=1.2).encode(delta, height).properties(name="kernel"),
        found.mark_point(filled=True, size=45, opacity=1).encode(delta, height, colour).properties(name="ghosts"),
        target.mark_point(shape="diamond", size=90, color=TOPMOST).encode(delta, height),
    ).properties(height=220, width=560)


def _weight_panel() -> alt.LayerChart:
    """a_k(n), exact and by the Bessel rate."""
    weights = (
        alt.Chart()
        .transform_calculate(odds="exp(datum.kernel - peak)")
        .transform_window(total="sum(odds)", frame=[None, 0], sort=[alt.SortField("delta")])
        .transform_filter("datum.delta >= offset")
        .transform_calculate(
            tokens="datum.delta + 1", weight="1 / datum.total", predicted="1 / (1 + rate * (datum.delta + 1))"
        )
    )
    names = ["exact (T10)", "Bessel rate (T11)"]
    tokens = alt.X("tokens:Q", title="sequence length (tokens)").scale(type="log", nice=False)
    height = {"title": "target weight", "scale": alt.Scale(domain=[0, 1])}
    colour = alt.Color("kind:N", title=None).scale(domain=names, range=[COLOURS["kernel"], COLOURS["law"]])
    exact, law = (weights.transform_calculate(kind=f"'{name}'") for name in names)
    return alt.layer(
        law.mark_line(strokeDash=[5, 4]).encode(tokens, alt.Y("predicted:Q", **height), colour),
        exact.mark_line(strokeWidth=2).encode(tokens, alt.Y("weight:Q", **height), colour).properties(name="weight"),
    ).properties(height=160, width=560)


def vega_spec() -> dict[str, object]:
    """The figure as a Vega specification, which needs no Vega-Lite in the browser."""
    return vl_convert.vegalite_to_vega(chart().to_dict(), vl_version=".".join(alt.SCHEMA_VERSION[1:].split(".")[:2]))


def data_names(spec: dict[str, object]) -> dict[str, str]:
    """Which data set feeds the marks called kernel, ghosts and weight."""
    sources = {mark["name"].split("_")[0]: mark["from"] for mark in _marks(spec) if "from" in mark}
    return {name: sources[name].get("facet", sources[name])["data"] for name in ("kernel", "ghosts", "weight")}


def _marks(node: dict[str, object]) -> Iterator[dict[str, object]]:
    # Outer marks last: they hold the data sets' names, the inner ones those of their facets.
    for mark in node.get("marks", []):
        yield from _marks(mark)
        yield mark


def spec_script() -> str:
    """The text of spec.js: the figure for the browser."""
    spec = vega_spec()
    figure = {"spec": spec, "data": data_names(spec), "trainLength": TRAIN_LENGTH}
    return f"// Generated by python -m helpers.explorer.\nwindow.carrierExplorer = {json.dumps(figure)};\n"


if __name__ == "__main__":
    SCRIPT.write_text(spec_script(), encoding="utf-8")
