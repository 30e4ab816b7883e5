"""The headline picture of README and introduction is the figure that its chapter computed."""

import base64
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from helpers.rerun.headline import CHAPTER, COPY, FIGURE, figure_png


def _cell(name: str, *pictures: bytes) -> nbformat.NotebookNode:
    outputs = [new_output("display_data", {"image/png": base64.b64encode(png).decode()}) for png in pictures]
    return new_code_cell("plt.show()", metadata={"mystnb": {"figure": {"name": name}}}, outputs=outputs)


def test_the_picture_is_the_chapters_figure(root: Path) -> None:
    notebook = nbformat.read(root / CHAPTER, as_version=4)
    same = (root / COPY).read_bytes() == figure_png(notebook, FIGURE)
    assert same, f"{COPY} is not the figure of {CHAPTER}: run python -m helpers.rerun.headline"


def test_the_figure_of_that_name_is_taken() -> None:
    notebook = new_notebook(cells=[_cell("fig-one", b"one"), new_code_cell("1"), _cell("fig-two", b"two")])
    assert figure_png(notebook, "fig-two") == b"two"


@pytest.mark.parametrize("pictures", [(), (b"one", b"two")])
def test_no_picture_or_several_are_named(pictures: tuple[bytes, ...]) -> None:
    with pytest.raises(ValueError, match=f"{len(pictures)} pictures called 'fig-one'"):
        figure_png(new_notebook(cells=[_cell("fig-one", *pictures)]), "fig-one")
