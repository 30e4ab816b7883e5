"""The execution record: what a chapter's committed outputs were computed from.

A chapter carries, in its own metadata, one hash each of its code cells, of the helpers code it can reach and of the
lock file. Outputs and record are written together, so a record that differs from the present files means stale outputs.

The helpers code is followed by *rooms*: a room is a top-level module or sub-package of ``helpers``. A chapter reaches
the rooms its code cells import, and the rooms those import. Cells are hashed as syntax trees and modules as syntax
trees without docstrings, so a comment, a docstring or a line break never makes a chapter stale.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    import nbformat

METADATA_KEY = "length_book"
LOCK_FILE = "requirements.lock"
PACKAGE = "helpers"
PARTS = {"code": "code cells", "helpers": "helpers", "lock": "lock file"}


def find_root(start: Path | None = None) -> Path:
    """Return the nearest folder at or above ``start`` (default: the working directory) that holds ``_toc.yml``.

    Raises FileNotFoundError when there is none.
    """
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "_toc.yml").is_file():
            return folder
    raise FileNotFoundError(f"no _toc.yml in {start} or above it: run this inside the book's folder, or pass --root")


def chapters(root: Path) -> dict[str, Path]:
    """Return the chapters by name, in the order of the table of contents: the notebooks directly in ``book/``.

    Raises FileNotFoundError when the table of contents names a notebook that is not there.
    """
    found = {}
    for entry in _toc_files(yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))):
        path = root / entry
        if path.suffix != ".ipynb":
            path = path.with_name(path.name + ".ipynb")
        if path.parent != root / "book" or (path.with_suffix(".md").is_file() and not path.is_file()):
            continue
        if not path.is_file():
            raise FileNotFoundError(f"_toc.yml lists {entry}, but there is neither a notebook nor a page of that name")
        found[path.stem] = path
    return found


def unlisted(root: Path) -> list[str]:
    """Return the names of the notebooks in ``book/`` that the table of contents leaves out."""
    listed = chapters(root)
    return [path.stem for path in sorted((root / "book").glob("*.ipynb")) if path.stem not in listed]


def current_record(notebook: "nbformat.NotebookNode", root: Path) -> dict[str, str]:
    """Return the record that ``notebook`` would get if it were executed now."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return {
        "code": _sha256("\n".join(map(_cell_dump, code))),
        "helpers": _sha256("\n".join(f"{path} {_file_hash(root / path)}" for path in reachable_files(code, root))),
        "lock": _sha256((root / LOCK_FILE).read_text(encoding="utf-8")),
    }


def stale_parts(notebook: "nbformat.NotebookNode", root: Path) -> list[str]:
    """Return in words what changed since ``notebook`` was executed; empty when its outputs are up to date."""
    recorded = notebook.metadata.get(METADATA_KEY)
    if not isinstance(recorded, dict):
        return ["never executed with a record"]
    current = current_record(notebook, root)
    return [f"{words} changed" for part, words in PARTS.items() if recorded.get(part) != current[part]]


def reachable_files(code: Iterable[str], root: Path) -> list[str]:
    """Return, sorted and relative to ``root``, the files of ``helpers`` that code cells reach through imports."""
    todo = {room for cell in code for room in _imported_rooms(_cell_tree(cell), [])}
    rooms: set[str] = set()
    files: set[Path] = set()
    package = root / PACKAGE
    while todo:
        room = todo.pop()
        rooms.add(room)
        for path in _room_files(room, package):
            files.add(path)
            if path.suffix == ".py":
                # A relative import counts its dots from the package the module lives in.
                location = list(path.relative_to(root).parent.parts)
                todo |= _imported_rooms(ast.parse(path.read_text(encoding="utf-8"), str(path)), location) - rooms
    return sorted(path.relative_to(root).as_posix() for path in files)


def _toc_files(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("root", "file"):
                yield value
            else:
                yield from _toc_files(value)
    elif isinstance(node, list):
        for item in node:
            yield from _toc_files(item)


def _room_files(room: str, package: Path) -> list[Path]:
    """Return the files of a room; the room ``""`` is the package's own ``__init__.py``."""
    folder = package / room
    if not room or not folder.is_dir():
        module = package / f"{room or '__init__'}.py"
        return [module] if module.is_file() else []  # an imported name that is no module lives in __init__.py
    return [path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path.relative_to(folder))]


def _is_hidden(path: Path) -> bool:
    return any(part == "__pycache__" or part.startswith(".") for part in path.parts)


def _imported_rooms(tree: ast.Module, location: list[str]) -> set[str]:
    """Return the rooms that ``tree`` imports; ``location`` is the dotted package of the module, empty for a cell."""
    names: list[list[str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = location[: len(location) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            names += [[*base, alias.name] for alias in node.names]
    inside = [name for name in names if name[0] == PACKAGE]
    return {name[1] for name in inside if len(name) > 1} | ({""} if inside else set())


def _cell_tree(cell: str) -> ast.Module:
    from IPython.core.inputtransformer2 import TransformerManager  # slow to import; cells may hold IPython magics

    try:
        return ast.parse(TransformerManager().transform_cell(cell))
    except SyntaxError:  # the run will say so; until then the cell is its text
        return ast.parse(repr(cell))


def _cell_dump(cell: str) -> str:
    from IPython.core.displayhook import DisplayHook

    # A last semicolon keeps a value from being shown, and no syntax tree has it.
    return f"{_dump(_cell_tree(cell))}{DisplayHook.semicolon_at_end_of_expression(cell)}"


def _file_hash(path: Path) -> str:
    if path.suffix != ".py":
        return hashlib.sha256(path.read_bytes()).hexdigest()
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            node.body = node.body[1:]
    return _sha256(_dump(tree))


def _dump(node: object) -> str:
    """Write a syntax tree as text that is the same on every Python: unlike ``ast.dump``, leave out empty fields."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
        return f"{type(node).__name__}({', '.join(f'{name}={_dump(value)}' for name, value in fields)})"
    if isinstance(node, list):
        return f"[{', '.join(map(_dump, node))}]"
    return repr(node)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
