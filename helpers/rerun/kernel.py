"""papermill's engine with what it leaves out: the kernel's environment, its last words, a second try to start it."""

import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import nbformat
import papermill
from jupyter_client.kernelspec import NoSuchKernel
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, NotebookExecutionManager, papermill_engines
from papermill.exceptions import PapermillExecutionError

from helpers.rerun.errors import RequestError, RunError, first_line

KERNEL = "python3"
ENGINE = "length-book"
STARTS = 3  # many kernels that start at once may meet "Address already in use"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
CHATTER = "[IPKernelApp]"  # the kernel's own log is about its sockets

log = logging.getLogger(__name__)
log.addHandler(logging.NullHandler())
log.propagate = False  # what nbclient logs is in the error that it raises


class Engine(NBClientEngine):
    """Runs a notebook as papermill does, and writes a dead kernel into the outputs of the cell that killed it."""

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: NotebookExecutionManager,
        kernel_name: str,
        *,
        environment: dict[str, str],
        folder: Path,
        done: Callable[[nbformat.NotebookNode], None],
        on_cell: Callable[[int, int], None],
        **_: object,
    ) -> nbformat.NotebookNode:
        """Run every cell in ``folder``; call ``on_cell`` before each, and ``done`` with the notebook in any case."""
        cells = nb_man.nb.cells
        started = -1  # the cell that runs, or -1 before the kernel answers

        def note_start(**_: object) -> None:
            nonlocal started
            started = 0

        def note_cell(cell: nbformat.NotebookNode, cell_index: int) -> None:
            nonlocal started
            started = cell_index
            on_cell(cell_index, len(cells))

        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as words:
            for attempt in range(STARTS):
                client = PapermillNotebookClient(
                    nb_man,
                    timeout=None,
                    kernel_name=kernel_name,
                    log=log,
                    resources={"metadata": {"path": str(folder)}},
                    on_notebook_start=note_start,
                    on_cell_start=note_cell,
                )
                try:
                    client.execute(env=environment, stdout=words, stderr=words)
                except RuntimeError as error:
                    reason = f"{first_line(str(error))}{_last_words(words)}"
                    if started < 0:
                        if attempt + 1 < STARTS:
                            continue
                        raise RunError(f"the kernel does not start: {reason}") from error
                    output = nbformat.v4.new_output("error", ename=type(error).__name__, evalue=reason, traceback=[])
                    cells[started].outputs.append(output)
                break
        done(nb_man.nb)
        return nb_man.nb


papermill_engines.register(ENGINE, Engine)


def execute(
    notebook: Path,
    parameters: dict[str, object],
    root: Path,
    threads: str,
    on_cell: Callable[[int, int], None] = lambda index, total: None,
) -> tuple[nbformat.NotebookNode, PapermillExecutionError | None]:
    """Run a chapter with ``parameters`` in a fresh kernel; return the notebook and the error of a cell that failed.

    The kernel works in the chapter's folder, imports ``helpers`` from ``root`` and uses ``threads`` threads.
    ``on_cell`` is called with a cell's index and the number of cells. Raises RequestError without a kernel.
    """
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, threads)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    executed: list[nbformat.NotebookNode] = []
    failure = None
    try:
        papermill.execute_notebook(
            str(notebook).replace("{", "{{").replace("}", "}}"),  # papermill fills braces in a path
            None,
            parameters=parameters,
            engine_name=ENGINE,
            kernel_name=KERNEL,
            language="python",
            progress_bar=False,
            environment=environment,
            folder=notebook.parent,
            done=executed.append,
            on_cell=on_cell,
        )
    except PapermillExecutionError as error:
        failure = error
    except NoSuchKernel:
        raise RequestError(f"no Jupyter kernel {KERNEL!r}: install ipykernel into {sys.prefix}") from None
    return executed[0], failure


def _last_words(words: tempfile._TemporaryFileWrapper) -> str:
    words.seek(0)
    lines = [line.strip() for line in words.read().splitlines() if line.strip() and not line.startswith(CHATTER)]
    return f" ({lines[-1]})" if lines else " (without a word: was the memory full?)"
