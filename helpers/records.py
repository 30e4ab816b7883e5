"""Numbers a notebook keeps: written by one call, stored in its outputs, read back from the file."""

from collections.abc import Mapping
from pathlib import Path

import nbformat
from myst_nb import glue

MIME = "application/papermill.record/text/plain"


def record(values: Mapping[str, float]) -> None:
    """Store named numbers in the running notebook's outputs; nothing is shown."""
    for name, value in values.items():
        glue(name, float(value), display=False)


def read_records(notebook: Path | nbformat.NotebookNode) -> dict[str, float]:
    """The numbers that ``record`` stored in an executed notebook, in order; of a name recorded twice the last value."""
    if not isinstance(notebook, nbformat.NotebookNode):
        notebook = nbformat.read(notebook, as_version=4)
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    kept = [out for out in outputs if MIME in out.get("data", {})]
    return {out.metadata["scrapbook"]["name"]: float(out.data[MIME]) for out in kept}
