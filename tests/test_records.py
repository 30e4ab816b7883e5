"""Numbers in a notebook: read from its outputs alone, the last value of a name, nothing else."""

from pathlib import Path

import nbformat

from helpers.records import MIME, read_records


def output(name: str, value: str) -> nbformat.NotebookNode:
    metadata = {"scrapbook": {"name": name, "mime_prefix": "application/papermill.record/"}}
    return nbformat.v4.new_output("display_data", {MIME: value}, metadata=metadata)


def notebook() -> nbformat.NotebookNode:
    shown = nbformat.v4.new_output("display_data", {"text/plain": "3.0"})
    stream = nbformat.v4.new_output("stream", text="accuracy 0.5")
    cells = [
        nbformat.v4.new_markdown_cell("accuracy = 7"),
        nbformat.v4.new_code_cell("first", outputs=[output("b", "0.25"), shown, output("a", "1e-17")]),
        nbformat.v4.new_code_cell("second", outputs=[stream, output("b", "nan"), output("b", "0.5")]),
    ]
    return nbformat.v4.new_notebook(cells=cells)


def test_the_last_value_of_each_name_in_order_of_appearance(tmp_path: Path) -> None:
    assert read_records(notebook()) == {"b": 0.5, "a": 1e-17}
    assert list(read_records(notebook())) == ["b", "a"]
    nbformat.write(notebook(), tmp_path / "chapter.ipynb")
    assert read_records(tmp_path / "chapter.ipynb") == {"b": 0.5, "a": 1e-17}


def test_a_notebook_without_records_has_none() -> None:
    assert read_records(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1")])) == {}
