"""The execution record changes with what a chapter was computed from, and with nothing else."""

from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from helpers.rerun.record import (
    METADATA_KEY,
    chapters,
    current_record,
    find_root,
    reachable_files,
    stale_parts,
    unlisted,
)

TASKS = ["tasks/__init__.py", "tasks/retrieval.py"]


def executed(root: Path, name: str) -> nbformat.NotebookNode:
    """Return a chapter with the record it would get if it were executed now."""
    notebook = nbformat.read(root / "book" / f"{name}.ipynb", as_version=4)
    notebook.metadata[METADATA_KEY] = current_record(notebook, root)
    return notebook


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")


@pytest.mark.parametrize(
    ("cell", "rooms"),
    [
        ("import helpers", []),
        ("%matplotlib inline\n!ls\nfrom helpers import __version__", []),
        ("from helpers.heads import double", ["heads.py", *TASKS]),
        ("import helpers.heads as heads", ["heads.py", *TASKS]),
        ("from helpers import tasks", TASKS),
        ("from helpers.tasks.retrieval import CHANCE", TASKS),
        ("def later():\n    from helpers import heads, theory", ["heads.py", *TASKS, "theory.py"]),
    ],
)
def test_a_cell_reaches_the_rooms_it_imports_and_the_rooms_those_import(
    mini_book: Path, cell: str, rooms: list[str]
) -> None:
    assert reachable_files([cell], mini_book) == sorted(f"helpers/{name}" for name in ["__init__.py", *rooms])


def test_a_cell_without_helpers_reaches_nothing(mini_book: Path) -> None:
    assert reachable_files(["import numpy as np", "from helpers_of_mine import heads"], mini_book) == []


@pytest.mark.parametrize(
    ("edited", "text", "waves", "plain"),
    [
        ("helpers/heads.py", "TRIPLE = 3\n", ["helpers changed"], []),
        ("helpers/tasks/retrieval.py", "CHANCE = 0.5\n", ["helpers changed"], []),
        ("helpers/tasks/sorting.py", "N = 1\n", ["helpers changed"], []),
        ("helpers/tasks/table.csv", "1,2\n", ["helpers changed"], []),
        ("helpers/theory.py", "N = 1\n", [], []),
        ("helpers/heads.py", "# a remark\n", [], []),
        ("helpers/heads.py", '\n\nclass Head:\n    """A head."""\n', ["helpers changed"], []),
        ("requirements.lock", "numpy==2.4.6\n", ["lock file changed"], ["lock file changed"]),
    ],
)
def test_an_edit_makes_the_chapters_it_can_reach_stale(
    mini_book: Path, edited: str, text: str, waves: list[str], plain: list[str]
) -> None:
    notebooks = {name: executed(mini_book, name) for name in ("waves", "plain")}
    (mini_book / edited).touch()
    append(mini_book / edited, text)
    assert {name: stale_parts(notebook, mini_book) for name, notebook in notebooks.items()} == {
        "waves": waves,
        "plain": plain,
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Heads."""', '"""The minimal heads."""'),
        ('"""Heads."""\n', ""),
        ("    return 2 * x", '    """Twice x."""\n    # doubled\n    return (2 *\n        x)'),
        ("2 * x", "0x2 * x"),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(mini_book: Path, old: str, new: str) -> None:
    notebook = executed(mini_book, "waves")
    module = mini_book / "helpers/heads.py"
    source = module.read_text(encoding="utf-8")
    assert old in source
    module.write_text(source.replace(old, new), encoding="utf-8")
    assert stale_parts(notebook, mini_book) == []


@pytest.mark.parametrize("value", ["2.0 * x", "x * 2", "'2' * x", "2 * (x or None)"])
def test_every_other_change_of_code_counts(mini_book: Path, value: str) -> None:
    notebook = executed(mini_book, "waves")
    module = mini_book / "helpers/heads.py"
    module.write_text(module.read_text(encoding="utf-8").replace("2 * x", value), encoding="utf-8")
    assert stale_parts(notebook, mini_book) == ["helpers changed"]


def test_code_cells_count_and_text_cells_do_not(mini_book: Path) -> None:
    notebook = executed(mini_book, "waves")
    notebook.cells[0].source = "# Another heading"
    assert stale_parts(notebook, mini_book) == []
    notebook.cells[2].source = "print(double(22))"
    assert stale_parts(notebook, mini_book) == ["code cells changed"]
    notebook.cells[2].source, notebook.cells[1].source = notebook.cells[1].source, "print(double(21))"
    assert stale_parts(notebook, mini_book) == ["code cells changed"]


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("# doubled\nprint(double( 21 ))  # 42", []),
        ("print(double(21));", ["code cells changed"]),
        ("%time print(double(21))", ["code cells changed"]),
    ],
)
def test_a_comment_in_a_code_cell_does_not_count(mini_book: Path, source: str, changed: list[str]) -> None:
    notebook = executed(mini_book, "waves")
    notebook.cells[2].source = source
    assert stale_parts(notebook, mini_book) == changed


@pytest.mark.parametrize("metadata", [{}, {METADATA_KEY: None}, {METADATA_KEY: "yes"}])
def test_a_chapter_without_a_record_is_stale(mini_book: Path, metadata: dict) -> None:
    notebook = nbformat.v4.new_notebook(metadata=metadata)
    assert stale_parts(notebook, mini_book) == ["never executed with a record"]


def test_chapters_are_the_listed_notebooks_in_order(mini_book: Path, write_chapter: Callable[..., Path]) -> None:
    write_chapter(mini_book, "draft", "1")
    (mini_book / "book/assignments").mkdir()
    append(mini_book / "_toc.yml", "  - file: book/assignments/first.ipynb\n  - file: book/draft.ipynb\n")
    assert list(chapters(mini_book)) == ["waves", "plain", "draft"]
    write_chapter(mini_book, "scratch", "1")
    assert unlisted(mini_book) == ["scratch"]


def test_a_listed_chapter_that_is_not_there_is_named(mini_book: Path) -> None:
    append(mini_book / "_toc.yml", "  - file: book/gone\n")
    with pytest.raises(FileNotFoundError, match="book/gone"):
        chapters(mini_book)


def test_the_root_is_found_from_below(mini_book: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert find_root(mini_book / "helpers" / "tasks") == mini_book
    with pytest.raises(FileNotFoundError, match=r"no _toc\.yml"):
        find_root(tmp_path_factory.mktemp("elsewhere"))
