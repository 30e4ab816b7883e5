"""What several test files share: the book's root and its chapters."""

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from helpers.rerun.record import chapters

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
