"""Every committed chapter is executed, tidy and checked; and every chapter runs with small parameters."""

import base64
import io
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import nbformat
import papermill
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output
from PIL import Image

from helpers.rerun.execute import check
from helpers.rerun.parameters import parameters_of

MAX_LINES = 20
MAX_PNG_BYTES = 150_000
CHECKED = "nbval-check-output"
FORBIDDEN_TEXT = {
    "a path of the machine": re.compile(r"/(home|tmp|root|Users|private|opt|mnt|work|usr)/|\b[A-Z]:\\"),
    "a memory address": re.compile(r"\b0x[0-9a-f]{8,}\b"),
}


def problems(notebook: NotebookNode) -> list[str]:
    """Return what is wrong with a committed chapter, one line each."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = _parameter_problems(notebook)
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("the code cells are not executed in order 1, 2, ...")
    if not any(CHECKED in cell.metadata.get("tags", []) for cell in code):
        found.append(f"no cell is tagged {CHECKED}")
    for cell in code:
        first = (cell.source.splitlines() or ["empty"])[0]
        found += [f"cell {cell.execution_count} ({first}): {problem}" for problem in _cell_problems(cell)]
    return found


def _parameter_problems(notebook: NotebookNode) -> list[str]:
    try:
        parameters = parameters_of(notebook)
    except ValueError as error:
        return [str(error)]
    last = parameters[-1] if parameters else None
    if last is None or (last.name, last.type, last.default) != ("strict_claims", "bool", True):
        return ["the last parameter is not 'strict_claims: bool = True'"]
    return []


def _cell_problems(cell: NotebookNode) -> list[str]:
    found = []
    if not cell.source.strip():
        found.append("the cell is empty")
    if len(cell.source.splitlines()) > MAX_LINES:
        found.append(f"the cell has more than {MAX_LINES} lines")
    mimes = {mime for output in cell.outputs for mime in output.get("data", {})}
    if CHECKED in cell.metadata.get("tags", []) and not any(map(_text_of, cell.outputs)):
        found.append("the checked cell has no text to compare")
    if "image/png" in mimes:
        found += _figure_problems(cell)
    if "image/svg+xml" in mimes:
        found.append("an inline SVG")
    if any("widget" in mime for mime in mimes):
        found.append("a widget")
    for output in cell.outputs:
        if output.output_type == "error":
            found.append("an error in the outputs")
        if output.get("name") == "stderr":
            found.append("stderr in the outputs")
        found += [f"{what} in the outputs" for what, regex in FORBIDDEN_TEXT.items() if regex.search(_text_of(output))]
    return found


def _text_of(output: NotebookNode) -> str:
    texts = [text for mime, text in output.get("data", {}).items() if mime.startswith("text/")]
    return "\n".join([output.get("text", ""), *texts])


def _figure_problems(cell: NotebookNode) -> list[str]:
    found = []
    shown = cell.metadata.get("mystnb", {})
    if not shown.get("image", {}).get("alt", "").strip():
        found.append("the figure has no alt text")
    if not shown.get("figure", {}).get("caption", "").strip():
        found.append("the figure has no caption")
    if not shown.get("figure", {}).get("name", "").startswith("fig-"):
        found.append("the figure has no name fig-...")
    if len(cell.outputs) != 1:
        found.append(f"the figure's cell has {len(cell.outputs)} outputs, not one")
    for output in cell.outputs:
        if "image/png" in output.get("data", {}):
            png = base64.b64decode(output.data["image/png"])
            if len(png) > MAX_PNG_BYTES:
                found.append(f"the figure has {len(png)} bytes, more than {MAX_PNG_BYTES}")
            if Image.open(io.BytesIO(png)).convert("RGBA").getchannel("A").getextrema()[0] < 255:
                found.append("the figure is not opaque")
    return found


def test_there_are_chapters(chapter_paths: dict[str, Path]) -> None:
    assert chapter_paths, "_toc.yml lists no notebook of book/: every test of the chapters would pass unseen"


def test_the_chapter_is_executed_and_tidy(notebook: NotebookNode) -> None:
    assert problems(notebook) == []


def test_the_outputs_are_up_to_date_and_the_claims_hold(
    chapter: str, chapter_paths: dict[str, Path], root: Path
) -> None:
    assert check({chapter: chapter_paths[chapter]}, root) == []


def test_the_parameters_are_those_that_papermill_finds(chapter: str, chapter_paths: dict[str, Path]) -> None:
    inferred = papermill.inspect_notebook(str(chapter_paths[chapter]))
    ours = parameters_of(nbformat.read(chapter_paths[chapter], as_version=4))
    assert [(p["name"], p["inferred_type_name"], p["help"]) for p in inferred.values()] == [
        (p.name, p.type, p.help) for p in ours
    ]


def test_every_chapter_runs_with_small_parameters(
    chapter: str, chapter_paths: dict[str, Path], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presets = tomllib.loads((root / "book/presets.toml").read_text(encoding="utf-8"))
    assert chapter in presets["smoke"], f"book/presets.toml has no [smoke.{chapter}]"
    small = presets["smoke"][chapter]
    assert small["strict_claims"] is False
    known = {parameter.name: parameter for parameter in parameters_of(nbformat.read(chapter_paths[chapter], 4))}
    assert [name for name, value in small.items() if name not in known or not known[name].accepts(value)] == []
    monkeypatch.setenv("PYTHONPATH", str(root))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    papermill.execute_notebook(
        str(chapter_paths[chapter]),
        str(tmp_path / "out.ipynb"),
        parameters=small,
        kernel_name="python3",
        cwd=str(root / "book"),
        progress_bar=False,
        execution_timeout=120,
    )


def _png(alpha: int = 255, size: int = 4, noise: bool = False) -> str:
    image = Image.effect_noise((size, size), 90).convert("RGBA") if noise else Image.new("RGBA", (size, size), "white")
    image.putalpha(alpha)
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return base64.b64encode(buffer.getvalue()).decode()


PARAMETERS = "offset: int = 5  # steps back from the query\nstrict_claims: bool = True  # a failed claim stops it"
MYSTNB = {"image": {"alt": "A line"}, "figure": {"caption": "A line.", "name": "fig-line"}}


def _tidy() -> NotebookNode:
    """Return a notebook with nothing wrong: parameters, a checked cell and a figure."""
    text = new_output("stream", name="stdout", text="holds\n")
    figure = new_output("display_data", data={"image/png": _png(), "text/plain": "<Figure size 700x400 with 1 Axes>"})
    return new_notebook(
        cells=[
            new_code_cell(PARAMETERS, execution_count=1, metadata={"tags": ["parameters"]}),
            new_code_cell("check()", execution_count=2, metadata={"tags": [CHECKED]}, outputs=[text]),
            new_code_cell("plt.show()", execution_count=3, metadata={"mystnb": MYSTNB}, outputs=[figure]),
        ]
    )


def _parameters(source: str) -> Callable[[list[NotebookNode]], None]:
    return lambda cells: cells[0].update(source=source)


def _output(cell: int, output: NotebookNode) -> Callable[[list[NotebookNode]], None]:
    return lambda cells: cells[cell].outputs.append(output)


def _shown(**changes: str) -> Callable[[list[NotebookNode]], None]:
    def mutate(cells: list[NotebookNode]) -> None:
        figure = {"caption": "A line.", "name": "fig-line", **changes}
        cells[2].metadata.mystnb = nbformat.from_dict({"image": {"alt": figure.pop("alt", "A line")}, "figure": figure})

    return mutate


def _stdout(text: str) -> NotebookNode:
    return new_output("stream", name="stdout", text=text)


def _mime(mime: str, data: object) -> NotebookNode:
    return new_output("display_data", data={mime: data})


MUTATIONS = {
    "never run": (lambda cells: cells[1].update(execution_count=None), "not executed in order"),
    "run out of order": (lambda cells: cells[0].update(execution_count=2), "not executed in order"),
    "run after a restart": (lambda cells: [c.update(execution_count=c.execution_count + 7) for c in cells], "in order"),
    "no parameters": (lambda cells: cells[0].metadata.clear(), "0 cells are tagged 'parameters'"),
    "two parameters cells": (lambda cells: cells[1].metadata.tags.append("parameters"), "2 cells are tagged"),
    "untyped": (_parameters("offset = 5  # steps\n" + PARAMETERS), "not of the form"),
    "uncommented": (_parameters("width: int = 5\n" + PARAMETERS), "needs a comment"),
    "empty comment": (_parameters("width: int = 5  #\n" + PARAMETERS), "needs a comment"),
    "comment above": (_parameters("# width\nwidth: int = 5\n" + PARAMETERS), "needs a comment"),
    "odd type": (_parameters("width: int | None = 5  # width\n" + PARAMETERS), "the type must be one of"),
    "wrong type": (_parameters("width: int = 5.0  # width\n" + PARAMETERS), "not of type int"),
    "bool for int": (_parameters("width: int = True  # width\n" + PARAMETERS), "not of type int"),
    "wrong item": (_parameters("lengths: list[int] = [1, 2.5]  # lengths\n" + PARAMETERS), "not of type list[int]"),
    "computed": (_parameters("width: int = 2 * 8  # width\n" + PARAMETERS), "must be a literal"),
    "no strict_claims": (_parameters("offset: int = 5  # steps"), "the last parameter is not 'strict_claims"),
    "lenient": (_parameters(PARAMETERS.replace("True", "False")), "the last parameter is not 'strict_claims"),
    "nothing checked": (lambda cells: cells[1].metadata.clear(), f"no cell is tagged {CHECKED}"),
    "checked but silent": (lambda cells: cells[1].outputs.clear(), "no text to compare"),
    "stderr": (_output(1, new_output("stream", name="stderr", text="careful\n")), "stderr in the outputs"),
    "error": (_output(1, new_output("error", ename="E", evalue="", traceback=[])), "an error in the outputs"),
    "widget": (_output(1, _mime("application/vnd.jupyter.widget-view+json", {})), "a widget"),
    "svg": (_output(1, _mime("image/svg+xml", "<svg/>")), "an inline SVG"),
    "home": (_output(1, _stdout("saved to /home/ada/out.csv")), "a path of the machine in the outputs"),
    "tmp": (_output(1, _mime("text/html", "<a href='/tmp/x'>x</a>")), "a path of the machine in the outputs"),
    "windows path": (_output(1, _stdout("C:\\Users\\ada")), "a path of the machine in the outputs"),
    "address": (_output(1, _stdout("<Head object at 0x7f86e517d940>")), "a memory address in the outputs"),
    "long cell": (lambda cells: cells[1].update(source="x = 1\n" * (MAX_LINES + 1)), f"more than {MAX_LINES} lines"),
    "empty cell": (lambda cells: cells[1].update(source="  "), "the cell is empty"),
    "no alt": (_shown(alt=" "), "no alt text"),
    "no caption": (_shown(caption=""), "no caption"),
    "no name": (_shown(name="line"), "no name fig-"),
    "bare figure": (lambda cells: cells[2].metadata.clear(), "no alt text"),
    "figure and text": (_output(2, _stdout("done\n")), "has 2 outputs, not one"),
    "transparent": (lambda cells: cells[2].outputs[0].data.update({"image/png": _png(alpha=0)}), "not opaque"),
    "huge": (lambda cells: cells[2].outputs[0].data.update({"image/png": _png(size=600, noise=True)}), "more than 150"),
}


def test_the_guard_accepts_a_tidy_notebook() -> None:
    assert problems(_tidy()) == []


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_guard_rejects(mutation: str) -> None:
    change, message = MUTATIONS[mutation]
    notebook = _tidy()
    change(notebook.cells)
    assert message in "\n".join(problems(notebook))
