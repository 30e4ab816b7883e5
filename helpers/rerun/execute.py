"""Execute chapters in place, and check that the committed ones are up to date.

    python -m helpers.rerun.execute [CHAPTER ...] [--all]    execute the stale chapters (or all)
    python -m helpers.rerun.execute --check                  name stale chapters and failed claims, execute nothing

Exit status: 0 when all is well; 1 when a cell failed, a chapter is stale or a claim fails; 2 when the request is wrong.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import NoSuchKernel
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, CellExecutionError

from helpers.claims import verify_notebook
from helpers.rerun.errors import RequestError, first_line, require_known
from helpers.rerun.record import METADATA_KEY, chapters, current_record, find_root, stale_parts, unlisted

KERNEL = "python3"
# The same on every machine, so that executing again changes nothing but the outputs that really changed.
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": KERNEL}
LANGUAGE_INFO = {"file_extension": ".py", "mimetype": "text/x-python", "name": "python", "pygments_lexer": "ipython3"}
NOISE = {"cell": ("execution", "collapsed", "scrolled"), "notebook": ("papermill", "toc", "widgets")}


class ChapterError(Exception):
    """A chapter stopped at a cell; the message is one line with the chapter, the cell and the exception."""


def execute_notebook(notebook: nbformat.NotebookNode, name: str, root: Path, timeout: int = 600) -> None:
    """Run every cell of ``notebook`` in order in a fresh kernel, replace its outputs and write its execution record.

    The kernel works in ``book/``, imports ``helpers`` from ``root`` and uses one thread unless ``OMP_NUM_THREADS`` says
    otherwise. ``timeout`` is in seconds per cell. Raises ChapterError when a cell fails, RequestError without a kernel.
    """
    record = current_record(notebook, root)  # of the files as they are before the run
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    where = f"{name}: the kernel"

    def note_cell(cell: nbformat.NotebookNode, cell_index: int) -> None:
        nonlocal where
        where = f"{name}: cell {cell_index + 1}"

    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name=KERNEL,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(root / "book")}},
        on_cell_execute=note_cell,
        extra_arguments=["--log-level=ERROR"],  # the kernel's own remarks are not ours
    )
    try:
        client.execute(env=environment)
    except CellExecutionError as error:
        raise ChapterError(f"{where} raised {error.ename}: {first_line(error.evalue)}") from error
    except (CellControlSignal, RuntimeError) as error:  # a cell past its time, a dead kernel
        raise ChapterError(f"{where} did not finish: {first_line(str(error))}") from error
    except NoSuchKernel as error:
        raise RequestError(f"no Jupyter kernel {KERNEL!r}: install ipykernel into {sys.prefix}") from error
    for cell in notebook.cells:
        for noise in NOISE["cell"]:
            cell.metadata.pop(noise, None)
    kept = {key: value for key, value in notebook.metadata.items() if key not in NOISE["notebook"]}
    notebook.metadata = nbformat.from_dict(
        {**kept, "kernelspec": KERNELSPEC, "language_info": LANGUAGE_INFO, METADATA_KEY: record}
    )


def write_notebook(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Write ``notebook`` to ``path`` so that no reader ever sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        nbformat.write(notebook, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def select(names: Sequence[str], known: dict[str, Path]) -> dict[str, Path]:
    """Return the chapters asked for, by name or by path; all when ``names`` is empty. Raises RequestError."""
    asked = [Path(name).stem if name.endswith(".ipynb") else name for name in names] or list(known)
    for name in asked:
        require_known("chapter", name, known)
    return {name: known[name] for name in asked}


def check(selected: dict[str, Path], root: Path) -> list[str]:
    """Return one line per problem: a stale chapter and what changed, or a recorded claim that does not hold."""
    table = root / "book" / "claims.toml"
    problems = []
    for name, path in selected.items():
        if changed := stale_parts(nbformat.read(path, as_version=4), root):
            problems.append(f"{name} is stale: {', '.join(changed)} (make execute re-runs it)")
        elif table.is_file():
            problems += verify_notebook(path, table)
    return problems


def execute(selected: dict[str, Path], root: Path, everything: bool, timeout: int) -> list[str]:
    """Execute the stale chapters among ``selected``, or all, in place; return one line per failed chapter."""
    failures = []
    for name, path in selected.items():
        notebook = nbformat.read(path, as_version=4)
        changed = stale_parts(notebook, root)
        if not changed and not everything:
            print(f"{name}: up to date")
            continue
        start = time.perf_counter()
        try:
            execute_notebook(notebook, name, root, timeout)
        except ChapterError as failure:
            failures.append(str(failure))
            print(failure, file=sys.stderr)
            continue
        write_notebook(notebook, path)
        print(
            f"{name}: executed in {time.perf_counter() - start:.0f} s ({', '.join(changed) or 'asked for'})", flush=True
        )
    return failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m helpers.rerun.execute", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help="a chapter's name; all chapters when left out")
    parser.add_argument("--all", action="store_true", help="execute chapters that are up to date too")
    parser.add_argument("--check", action="store_true", help="execute nothing: name stale chapters and failed claims")
    parser.add_argument("--root", type=Path, help="the book's folder (default: the nearest one upwards with _toc.yml)")
    parser.add_argument("--timeout", type=int, default=600, metavar="SECONDS", help="longest time for one cell (600)")
    options = parser.parse_args(arguments)
    try:
        root = find_root(options.root)
        selected = select(options.chapters, chapters(root))
        for name in unlisted(root):
            print(f"warning: book/{name}.ipynb is not in _toc.yml, so it is left out", file=sys.stderr)
        if options.check:
            problems = check(selected, root)
            for problem in problems:
                print(problem, file=sys.stderr)
            return 1 if problems else 0
        return 1 if execute(selected, root, options.all, options.timeout) else 0
    except (RequestError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
