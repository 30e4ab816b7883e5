"""What several test files share: the book's root, its chapters, a browser."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from helpers.rerun.record import chapters

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = chapters(ROOT)


@pytest.fixture(scope="session")
def root() -> Path:
    """The book's folder."""
    return ROOT


@pytest.fixture(scope="session")
def chapter_paths() -> dict[str, Path]:
    """Every chapter of the table of contents, by name."""
    return CHAPTERS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for ``chapter`` once for every chapter."""
    if "chapter" in metafunc.fixturenames:
        metafunc.parametrize("chapter", list(CHAPTERS))


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """Return the Chromium of this machine, closed when the test file is done."""
    from playwright.sync_api import sync_playwright  # slow to import, and most test files open no browser

    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed: the pages are not opened in a browser")
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # Chromium refuses a sandbox to root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture
def notebook(chapter: str) -> nbformat.NotebookNode:
    """The committed notebook of ``chapter``."""
    return nbformat.read(CHAPTERS[chapter], as_version=4)


@pytest.fixture
def write_chapter() -> Callable[..., Path]:
    """Return the function that writes a never executed chapter into a book."""
    return _write_chapter


@pytest.fixture
def mini_book(tmp_path: Path) -> Path:
    """Return a throw-away book: the chapter ``waves`` reaches the room heads, the chapter ``plain`` reaches none."""
    files = {
        "_toc.yml": "format: jb-book\nroot: book/intro\nchapters:\n  - file: book/waves\n  - file: book/plain\n",
        "requirements.lock": "torch==2.13.0\n",
        "book/intro.md": "# Intro\n",
        "helpers/__init__.py": '"""The package."""\n',
        "helpers/heads.py": '"""Heads."""\nfrom .tasks.retrieval import CHANCE\n\ndef double(x):\n    return 2 * x\n',
        "helpers/tasks/__init__.py": "",
        "helpers/tasks/retrieval.py": "CHANCE = 0.25\n",
        "helpers/theory.py": "from helpers import tasks\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    _write_chapter(tmp_path, "waves", "from helpers.heads import double", "print(double(21))")
    _write_chapter(tmp_path, "plain", "print('plain')")
    return tmp_path


def _write_chapter(root: Path, name: str, *cells: str) -> Path:
    code = [nbformat.v4.new_code_cell(source, id=f"cell-{index}") for index, source in enumerate(cells)]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(f"# {name}", id="heading"), *code])
    path = root / "book" / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


TINY_PARAMETERS = """\
offset: int = 5  # steps back from the query; 0 < offset < train_length
train_length: int = 16  # training length L in tokens; train_length > 1
rate: float = 0.5  # step size; rate > 0
lengths: list[int] = [16, 32]  # evaluation lengths; min(lengths) > offset
optimiser: str = "adam"  # adam or sgd; optimiser in ("adam", "sgd")
fast: bool = False  # leave out the slow part
seed: int = 0  # one head
strict_claims: bool = True  # a failed claim stops the chapter
"""
TINY_RECORD = """\
import math, os, time
from IPython.display import display

def record(**values):  # as helpers.records does, without its imports
    for name, value in values.items():
        prefix = "application/papermill.record/"
        about = {"scrapbook": {"name": name, "mime_prefix": prefix}}
        display({f"{prefix}text/plain": repr(float(value))}, raw=True, metadata=about)
"""
TINY_WORK = """\
value = math.sin(offset * rate + seed)
record(value=value, longest=max(lengths), threads=int(os.environ["OMP_NUM_THREADS"]))
print(f"value {value:.3f}")
"""
# A 1 × 1 white PNG: a figure without matplotlib's import.
TINY_FIGURE = """\
from base64 import b64decode
from IPython.display import Image
Image(b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEANl9ngAAAAABJRU5ErkJggg=="))
"""


@pytest.fixture
def tiny_book(tmp_path: Path) -> Path:
    """Return a book whose one chapter ``tiny`` has every kind of parameter, records numbers and imports nothing."""
    return write_tiny_book(tmp_path / "tiny book é")


@pytest.fixture(scope="session")
def make_tiny_book() -> Callable[[Path], Path]:
    """Return the function that writes the book of ``tiny_book`` into a new folder."""
    return write_tiny_book


def write_tiny_book(root: Path) -> Path:
    """Write the book of ``tiny_book``."""
    (root / "book").mkdir(parents=True)
    toc = "format: jb-book\nroot: book/intro\nchapters:\n  - file: book/tiny\n"
    presets = (
        "[smoke.tiny]\nlengths = [8]\nstrict_claims = false\n\n[paper.tiny]\nlengths = [64]\n\n[cost.paper]\ntiny = 3\n"
    )
    for name, text in {
        "_toc.yml": toc,
        "_config.yml": 'title: Tiny\nauthor: A\nonly_build_toc_files: true\nexecute: {execute_notebooks: "off"}\n',
        "requirements.lock": "torch==2.13.0\n",
        "book/intro.md": "# Intro\n\n[The tiny chapter](tiny.ipynb)\n",
        "book/presets.toml": presets,
    }.items():
        (root / name).write_text(text, encoding="utf-8")
    mystnb = {"figure": {"caption": "White.", "name": "fig-white"}, "image": {"alt": "White"}}
    cells = [
        nbformat.v4.new_markdown_cell("# Tiny waves"),
        nbformat.v4.new_code_cell(TINY_PARAMETERS.rstrip(), metadata={"tags": ["parameters"]}),
        *map(nbformat.v4.new_code_cell, (TINY_RECORD, TINY_WORK)),
        nbformat.v4.new_code_cell(TINY_FIGURE, metadata={"mystnb": mystnb}),
    ]
    for index, cell in enumerate(cells):
        cell.id = f"cell-{index}"
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), root / "book/tiny.ipynb")
    return root
