"""A run: one chapter at one setting of all its parameters, kept in a folder that appears whole or not at all.

``runs/<chapter>/<hash of parameters>/`` holds the executed notebook, ``records.json`` (the numbers that the chapter
recorded) and ``manifest.json`` (what was run, on what, when, and how it ended). It is prepared in a hidden folder
beside it and renamed. Whoever does a run holds a lock on it, which the operating system drops when the process dies.
"""

import fcntl
import hashlib
import json
import math
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from helpers.rerun.errors import RunError, first_line
from helpers.rerun.notebooks import read_plain
from helpers.rerun.record import METADATA_KEY, PARTS, current_record

DISTRIBUTION = "length-generalization-book"
MANIFEST = "manifest.json"
RECORDS = "records.json"
FINISHED, FAILED = "finished", "failed"  # how a run ended
KEPT, BUSY = "kept", "busy"  # why nothing was done: it is finished already, or another process is at it
HASH_DIGITS = 12
NEEDED = {"chapter", "run", "error", "parameters", "record", "git", "finished", "seconds"}  # what readers rely on


@dataclass(frozen=True)
class Run:
    """One chapter at one setting of all its parameters."""

    root: Path
    runs: Path
    chapter: str
    parameters: dict[str, object]

    @cached_property
    def id(self) -> str:
        """The hash of the parameters: the name of the run's folder."""
        text = json.dumps(self.parameters, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]

    @property
    def name(self) -> str:
        """Chapter and hash."""
        return f"{self.chapter}/{self.id}"

    @property
    def folder(self) -> Path:
        """Where the run's results live."""
        return self.runs / self.chapter / self.id

    def beside(self, ending: str) -> Path:
        """A hidden place beside the run's folder."""
        return self.folder.with_name(f".{self.id}.{ending}")

    @property
    def notebook(self) -> Path:
        """The chapter that is run."""
        return chapter_file(self.root, self.chapter)


@dataclass(frozen=True)
class Outcome:
    """What became of a run: FINISHED, FAILED, KEPT or BUSY, its seconds and error, and why it was done again."""

    run: Run
    status: str
    seconds: float = 0.0
    error: str = ""
    again: str = ""


def read_manifest(folder: Path) -> dict:
    """Return a run's manifest. FileNotFoundError if the folder has none, RunError if it cannot be understood."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["status"] not in (FINISHED, FAILED) or not NEEDED.issubset(manifest):
            raise KeyError("status")
    except (NotADirectoryError, FileNotFoundError):
        raise FileNotFoundError(path) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is broken ({type(error).__name__}): delete {folder} and run again") from None
    return manifest


def read_numbers(folder: Path) -> dict[str, float]:
    """Return the numbers that a run recorded. Raises RunError if they cannot be read."""
    path = folder / RECORDS
    try:
        return {name: float(value) for name, value in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is broken ({type(error).__name__}): delete {folder} and run again") from None


def state(run: Run, record: Mapping[str, str]) -> tuple[bool, str]:
    """Return whether a run is finished and of the present code, and if it is there and is not, why not."""
    try:
        manifest = read_manifest(run.folder)
    except FileNotFoundError:
        return False, ""
    except RunError:
        return False, "its manifest was broken"
    if manifest["status"] == FAILED:
        return False, "it had failed"
    changed = changes(manifest, record)
    return not changed, changed


def changes(manifest: Mapping, record: Mapping[str, str]) -> str:
    """Return in words what has changed since a run was made, or nothing."""
    changed = [words for part, words in PARTS.items() if manifest["record"].get(part) != record[part]]
    return f"{', '.join(changed)} changed since" if changed else ""


def record_of(root: Path, chapter: str) -> dict[str, str]:
    """Return the execution record that a run of a chapter would get now."""
    try:
        return current_record(read_plain(chapter_file(root, chapter)), root)
    except SyntaxError as error:
        raise RunError(f"the helpers that {chapter} imports do not parse: {error}") from None


def chapter_file(root: Path, chapter: str) -> Path:
    """Return the committed notebook of a chapter."""
    return root / "book" / f"{chapter}.ipynb"


def perform(
    run: Run,
    wait: bool = True,
    threads: str = "1",
    on_cell: Callable[[int, int], None] = lambda index, total: None,
) -> Outcome:
    """Do a run unless it is finished, and return what became of it; safe to call from any number of processes.

    With ``wait`` false a run that another process is doing is BUSY, otherwise it is waited for. Raises RunError when
    the results cannot be written; then nothing is left behind.
    """
    record = record_of(run.root, run.chapter)
    if state(run, record)[0]:
        return Outcome(run, KEPT)
    try:
        with _locked(run.beside("lock"), wait) as mine:
            if not mine:
                return Outcome(run, BUSY)
            _remove_leftovers(run)
            finished, again = state(run, record)
            if finished:
                return Outcome(run, KEPT)
            try:
                run.beside("tmp").mkdir()
                outcome = _execute(run, record, run.beside("tmp"), threads, on_cell, again)
                if run.folder.exists():
                    run.folder.rename(run.beside("old"))
                run.beside("tmp").rename(run.folder)
            finally:
                _remove_leftovers(run)
            return outcome
    except OSError as error:
        raise RunError(f"cannot write {run.folder}: {error.strerror or first_line(str(error))}") from error


def clear(run: Run) -> None:
    """Remove what a killed process has left of a run, unless another process is at it."""
    if run.beside("lock").exists():
        with _locked(run.beside("lock"), wait=False) as mine:
            if mine:
                _remove_leftovers(run)


def _remove_leftovers(run: Run) -> None:
    for leftover in ("tmp", "old"):
        shutil.rmtree(run.beside(leftover), ignore_errors=True)


def _execute(
    run: Run, record: dict[str, str], folder: Path, threads: str, on_cell: Callable[[int, int], None], again: str
) -> Outcome:
    """Execute the chapter and write notebook, numbers and manifest into ``folder``."""
    import nbformat

    from helpers.records import read_records
    from helpers.rerun.kernel import execute

    manifest = {
        "chapter": run.chapter,
        "run": run.id,
        "status": FINISHED,
        "error": "",
        "parameters": run.parameters,
        "seeds": {name: value for name, value in run.parameters.items() if "seed" in name},
        "record": record,
        "git": git_state(run.root),
        "packages": package_versions(),
        "device": {**machine(), "device": run.parameters.get("device", "cpu"), "threads": threads},
        "started": _now(),
    }
    start = time.perf_counter()
    notebook, failure = execute(run.notebook, run.parameters, run.root, threads, on_cell)
    seconds = round(time.perf_counter() - start, 3)
    error = ""
    if failure is not None:
        cell = first_line(failure.source)
        error = f"cell In [{failure.exec_count}] ({cell}) raised {failure.ename}: {first_line(failure.evalue)}"
    manifest |= {
        "status": FAILED if failure else FINISHED,
        "error": error,
        "finished": _now(),
        "seconds": seconds,
    }
    for path in ("input_path", "output_path"):
        notebook.metadata.papermill.pop(path, None)
    notebook.metadata[METADATA_KEY] = record
    nbformat.write(notebook, folder / f"{run.chapter}.ipynb")
    _write_json(folder / RECORDS, {name: _strict(value) for name, value in read_records(notebook).items()})
    _write_json(folder / MANIFEST, manifest)
    return Outcome(run, manifest["status"], seconds, error, again)


@contextmanager
def _locked(path: Path, wait: bool) -> Iterator[bool]:
    """Hold the lock file ``path``, which is removed at the end; yield whether it was free (always, with ``wait``)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            # The holder before may have removed the file between our open and our lock.
            try:
                ours = os.path.samestat(path.stat(), os.fstat(file.fileno()))
            except FileNotFoundError:
                ours = False
            if ours:
                try:
                    yield True
                finally:
                    path.unlink()
                return


def git_state(root: Path) -> dict[str, object]:
    """Return the book's git revision and whether files differ from it; both None outside a repository."""
    try:
        revision = _git(root, "rev-parse", "HEAD")
        return {"revision": revision, "dirty": bool(_git(root, "status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {"revision": None, "dirty": None}


def _git(root: Path, *arguments: str) -> str:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # never in the way of the user's own git
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that the book asks for."""
    requirements = map(Requirement, metadata.requires(DISTRIBUTION) or [])
    needed = [requirement.name for requirement in requirements if requirement.marker is None]  # the rest are extras
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in needed}}


@cache
def machine() -> dict[str, object]:
    """Return what the run is computed on: host, system, processor, cores, GPUs."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        models = [line for line in cpuinfo.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        processor = models[0].partition(":")[2].strip() if models else processor
    gpus: list[str] = []
    if program := shutil.which("nvidia-smi"):
        command = [program, "--query-gpu=name", "--format=csv,noheader"]
        gpus = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor,
        "cores": os.cpu_count(),
        "gpus": [name.strip() for name in gpus if name.strip()],
    }


def _strict(value: float) -> float | str:
    """Return what strict JSON can hold: it has no infinities and no NaN."""
    return value if math.isfinite(value) else str(value)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
