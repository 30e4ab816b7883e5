"""The carrier explorer: its numbers in a browser against ``helpers.theory``, and its sliders moved by hand."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import vl_convert
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Browser, Page

from helpers import explorer, theory
from helpers.explorer import SLIDERS, TRAIN_LENGTH, ExplorerSettings

POSITIONS = [
    ExplorerSettings(),
    ExplorerSettings(offset=1, num_carriers=1, amplitude=10.0, length=4096),
    ExplorerSettings(offset=15, num_carriers=16, amplitude=10.0, log_base=6.0, length=4096),
    ExplorerSettings(num_carriers=6, log_base=1.0, phase_error=0.8, length=2048),
    ExplorerSettings(num_carriers=3, log_base=2.3, amplitude=0.7, phase_error=1.5, length=96),
    ExplorerSettings(num_carriers=16, amplitude=10.0, phase_error=1.5, length=64),
    ExplorerSettings(amplitude=0.0, length=32),
]
READ = """([position]) => {
  const { view, data } = window.carrierExplorer;
  for (const [name, value] of Object.entries(position)) view.signal(name, value);
  const rows = name => [...view.data(data[name])].sort((one, other) => one.delta - other.delta);
  const columns = (name, ...fields) => Object.fromEntries(fields.map(f => [f, rows(name).map(row => row[f])]));
  return view.runAsync().then(() => ({
    kernel: columns("kernel", "delta", "kernel"),
    weight: columns("weight", "tokens", "weight", "predicted"),
    ghosts: columns("ghosts", "delta", "strength"),
    rate: view.signal("rate"),
  }));
}"""
CURVES = "() => [...document.querySelectorAll('.explorer-plot path')].map(path => path.getAttribute('d')).join()"


@pytest.fixture(scope="module")
def text(root: Path) -> str:
    return (root / "book/carrier-explorer.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def address(root: Path, text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page's own HTML in a bare document, opened from disk: no server, no network."""
    folder = tmp_path_factory.mktemp("explorer")
    shutil.copytree(root / "book/_static/explorer", folder / "_static/explorer")
    (folder / "book").mkdir()
    html = re.search(r"```\{raw\} html\n(.*?)```", text, re.DOTALL)[1]
    document = f'<!doctype html><meta charset="utf-8"><title>Explorer</title><body style="margin: 8px">{html}'
    (folder / "book/page.html").write_text(document, encoding="utf-8")
    return (folder / "book/page.html").as_uri()


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    trouble = []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("console", lambda message: trouble.append(message.text) if message.type in ("error", "warning") else None)
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or trouble.append(request.url))
    page.goto(address)
    page.wait_for_function("() => window.carrierExplorer.view")
    yield page
    page.close()
    assert trouble == []


@pytest.mark.parametrize("position", POSITIONS, ids=lambda position: f"R{position.num_carriers}n{position.length}")
def test_the_browser_computes_what_the_theory_says(page: Page, position: ExplorerSettings) -> None:
    shown = page.evaluate(READ, [asdict(position)])
    lengths = list(range(position.offset + 1, position.length + 1))
    assert shown["kernel"]["delta"] == list(range(position.length))
    assert shown["kernel"]["kernel"] == pytest.approx(position.kernel(), abs=1e-6)
    assert shown["weight"]["tokens"] == lengths
    assert shown["weight"]["weight"] == pytest.approx(position.target_weight(), rel=1e-6)
    assert shown["weight"]["predicted"] == pytest.approx(theory.diluted_weight(position.rate(), lengths), rel=1e-6)
    assert shown["rate"] == pytest.approx(position.rate(), rel=1e-6)
    assert shown["ghosts"]["delta"] == position.ghosts().delta.tolist()
    assert shown["ghosts"]["strength"] == pytest.approx(position.ghosts().strength.tolist(), abs=1e-6)


@pytest.mark.parametrize("name", SLIDERS)
def test_moving_a_slider_changes_the_curve_and_the_words(page: Page, name: str) -> None:
    slider = page.locator(f"input[name={name}]")
    curves, words = page.evaluate(CURVES), page.locator(".explorer-words").inner_text()
    key = "ArrowLeft" if name == "offset" else "ArrowRight"
    slider.focus()
    for _ in range(4):
        slider.press(key)
    page.wait_for_function(f"before => ({CURVES})() !== before", arg=curves)
    page.wait_for_function("before => document.querySelector('.explorer-words').textContent !== before", arg=words)
    steps = 4 * SLIDERS[name].step * (-1 if name == "offset" else 1)
    expected = getattr(ExplorerSettings(), name) + steps
    assert page.evaluate("name => window.carrierExplorer.view.signal(name)", name) == pytest.approx(expected)


def test_the_words_say_what_the_figure_shows(page: Page) -> None:
    position = ExplorerSettings(num_carriers=6, phase_error=0.8, length=4096)
    page.evaluate(READ, [asdict(position)])
    ghosts, words = position.ghosts(), page.locator(".explorer-words").inner_text()
    strict, near = ghosts[ghosts.strength >= 0], ghosts[ghosts.strength < 0]
    assert f"At length 4096 the target at offset 5 keeps a weight of {position.target_weight()[-1]:.3g}." in words
    assert f"Ghosts from offset {TRAIN_LENGTH} on: {len(strict)}, the first at offset {strict.delta.min()}." in words
    assert f"Near ghosts: {len(near)}, the first at offset {near.delta.min()}." in words


@pytest.mark.parametrize("width", [390, 1280])
def test_the_figure_fills_the_width_and_no_more(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    drawn = "() => document.querySelector('.explorer-plot svg').getBoundingClientRect().width"
    page.wait_for_function(f"room => Math.abs(({drawn})() - room) < 12", arg=width - 16)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width


def test_the_axes_have_the_colour_of_the_text(page: Page) -> None:
    page.evaluate("() => { document.body.style.color = 'rgb(1, 2, 3)' }")
    fills = page.eval_on_selector_all(
        ".explorer-plot text", "nodes => [...new Set(nodes.map(node => getComputedStyle(node).fill))]"
    )
    assert fills == ["rgb(1, 2, 3)"]


def test_without_scripts_the_page_says_so_and_has_the_table(browser: Browser, address: str, text: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    assert page.locator(".explorer-missing").is_visible()
    assert not page.locator(".explorer-sliders").is_visible()
    context.close()
    assert "| try | R |" in text


def test_the_table_of_experiments_is_right(text: str) -> None:
    rows = re.findall(r"^\| (\d .*) \|$", text, re.MULTILINE)
    assert len(rows) >= 8
    for row in rows:
        _, carriers, *numbers = (float(cell.replace(",", "")) for cell in row.split(" | "))
        amplitude, log_base, error, in_range, weight, half_length, ghosts, near = numbers
        position = ExplorerSettings(5, int(carriers), amplitude, log_base, error, 4096)
        weights, found = position.target_weight(), position.ghosts()
        assert in_range == pytest.approx(weights[TRAIN_LENGTH - 1 - 5], rel=6e-3)
        assert weight == pytest.approx(weights[-1], rel=6e-3)
        assert half_length == pytest.approx(1 / position.rate(), rel=6e-3)
        assert (ghosts, near) == ((found.strength >= 0).sum(), (found.strength < 0).sum())


def test_the_scripts_are_up_to_date(root: Path) -> None:
    folder = root / "book/_static/explorer"
    assert folder / "spec.js" == explorer.SCRIPT
    assert explorer.SCRIPT.read_text(encoding="utf-8") == explorer.spec_script(), "run python -m helpers.explorer"
    library = (folder / "vega.min.js").read_text(encoding="utf-8")
    assert f'version="{vl_convert.get_vega_version()}"' in library
    assert sum(path.stat().st_size for path in folder.iterdir()) < 600_000


def test_the_figure_loads_nothing() -> None:
    spec = json.dumps(explorer.vega_spec())
    assert '"url"' not in spec
    assert re.findall(r"https?://[^\"]*", spec) == [explorer.vega_spec()["$schema"]]


@given(st.floats(0, 10), st.floats(0, 1.5), st.integers(1, 16))
def test_the_rate_is_the_bessel_product(amplitude: float, phase_error: float, num_carriers: int) -> None:
    names = {"amplitude": amplitude, "phase_error": phase_error, "num_carriers": num_carriers}
    functions = {"pow": math.pow, "exp": math.exp, "cos": math.cos}
    by_series = eval(explorer.rate_expression(), {"__builtins__": {}}, names | functions)
    position = ExplorerSettings(num_carriers=num_carriers, amplitude=amplitude, phase_error=phase_error)
    assert by_series == pytest.approx(position.rate(), rel=1e-9)


def test_the_carriers_are_those_of_the_page() -> None:
    position = ExplorerSettings(num_carriers=3, amplitude=2.0, log_base=2.0, phase_error=0.3)
    delta = np.arange(position.length)
    by_hand = sum(2 * np.cos(100 ** (-r / 3) * (delta - 5) - (-1) ** r * 0.3) for r in range(3))
    assert position.kernel() == pytest.approx(by_hand, abs=1e-9)
    assert theory.alignment(position.carriers, position.frequencies, 5) == pytest.approx(np.cos(0.3))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"offset": 16}, "offset=16 is not allowed: offset must be in 1 … 15"),
        ({"num_carriers": 2.5}, "num_carriers=2.5"),
        ({"amplitude": -0.1}, "amplitude=-0.1"),
        ({"length": 5000}, "length=5000"),
    ],
)
def test_a_value_outside_its_slider_is_named(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ExplorerSettings(**wrong)
    assert "\n" not in str(caught.value)
