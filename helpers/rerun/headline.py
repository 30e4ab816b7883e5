"""The headline figure as a file: a copy of one figure that a chapter's notebook holds.

    python -m helpers.rerun.headline    write book/_static/headline.png anew

README and the introduction show the file; a test holds it equal, byte for byte, to the chapter's own output.
"""

import base64

import nbformat

from helpers.rerun.record import find_root

CHAPTER = "book/relative-vs-absolute.ipynb"
FIGURE = "fig-relative-vs-absolute-headline"
COPY = "book/_static/headline.png"


def figure_png(notebook: nbformat.NotebookNode, name: str) -> bytes:
    """The PNG that the cell whose figure is called ``name`` shows. ``ValueError`` unless there is exactly one."""
    found = [
        output.data["image/png"]
        for cell in notebook.cells
        if cell.metadata.get("mystnb", {}).get("figure", {}).get("name") == name
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    if len(found) != 1:
        raise ValueError(f"the notebook holds {len(found)} pictures called {name!r}, exactly one is needed")
    return base64.b64decode(found[0])


def main() -> None:
    """Copy the headline figure out of its chapter."""
    root = find_root()
    notebook = nbformat.read(root / CHAPTER, as_version=4)
    (root / COPY).write_bytes(figure_png(notebook, FIGURE))
    print(COPY)


if __name__ == "__main__":
    main()
