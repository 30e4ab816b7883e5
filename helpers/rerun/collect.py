"""The numbers of many runs in one tidy table: a row for every recorded number of every run."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from helpers.rerun.book import ALL, Book
from helpers.rerun.errors import RequestError, RunError, require_known
from helpers.rerun.runs import FINISHED, MANIFEST, changes, read_manifest, read_numbers, record_of

FORMATS = (".csv", ".parquet")
RUN_COLUMNS = ("chapter", "run", "seconds")
NUMBER_COLUMNS = ("name", "value")


@dataclass(frozen=True)
class KeptRun:
    """A finished run as it lies in its folder."""

    folder: Path
    manifest: dict

    @property
    def chapter(self) -> str:
        """The chapter that was run."""
        return self.manifest["chapter"]

    @property
    def id(self) -> str:
        """The hash of its parameters."""
        return self.manifest["run"]

    @property
    def order(self) -> list[tuple]:
        """The parameters as a key to sort by: numbers by size, anything else as text."""
        parameters = self.manifest["parameters"].items()
        return [(name, value if isinstance(value, int | float) else 0, str(value)) for name, value in parameters]

    @property
    def notebook(self) -> Path:
        """The executed notebook."""
        return self.folder / f"{self.chapter}.ipynb"


def finished(book: Book, selectors: Iterable[str]) -> tuple[list[KeptRun], list[str]]:
    """Return the finished runs that ``selectors`` name, and remarks: which ones failed, how many are of other code.

    The runs are in the order of the book and of their parameters, once each. A selector is a folder of a run or of
    runs, ``chapter/hash`` (its first digits do), a chapter, or ``all``. Raises RequestError when one names nothing,
    RunError when a run cannot be read.
    """
    folders = [folder for selector in selectors for folder in _folders(book, selector)]
    runs, remarks = [], []
    for folder in dict.fromkeys(folders):
        manifest = read_manifest(folder)
        if manifest["status"] == FINISHED:
            runs.append(KeptRun(folder, manifest))
        else:
            remarks.append(f"{manifest['chapter']}/{manifest['run']} failed and is left out: {manifest['error']}")
    runs.sort(
        key=lambda run: (list(book.chapters).index(run.chapter) if run.chapter in book.chapters else -1, run.order)
    )
    if not runs:
        raise RequestError("; ".join(remarks) or "no finished runs: length-book run or sweep makes some")
    return runs, remarks + _old(book, runs)


def _old(book: Book, runs: Sequence[KeptRun]) -> list[str]:
    """Return a line for every chapter with runs that were made before its code or its packages changed."""
    remarks = []
    for chapter in dict.fromkeys(run.chapter for run in runs if run.chapter in book.chapters):
        record = record_of(book.root, chapter)
        old = [words for run in runs if run.chapter == chapter and (words := changes(run.manifest, record))]
        if old:
            remarks.append(f"{chapter}: old runs: {len(old)} ({old[0]}; run or sweep makes them again)")
    return remarks


def table(runs: Sequence[KeptRun], wide: bool = False) -> pd.DataFrame:
    """Return one row a run and recorded number, or with ``wide`` one row a run and a column a number.

    The columns are chapter, run, seconds, every parameter of any of the runs (lists as JSON text), and name and value.
    """
    rows = []
    for run in runs:
        about = {"chapter": run.chapter, "run": run.id, "seconds": run.manifest["seconds"]}
        parameters = {name: _flat(value) for name, value in run.manifest["parameters"].items()}
        if clash := sorted(set(parameters) & {*RUN_COLUMNS, *NUMBER_COLUMNS}):
            raise RunError(f"{run.chapter} has parameters called like columns of the table: {', '.join(clash)}")
        numbers = read_numbers(run.folder)
        if wide:
            rows.append(about | parameters | numbers)
        else:
            rows += [about | parameters | {"name": name, "value": value} for name, value in numbers.items()]
    frame = pd.DataFrame(rows).convert_dtypes(convert_floating=False)
    for name in frame.select_dtypes(object).columns:  # two chapters may give a name two types
        frame[name] = frame[name].map(lambda value: pd.NA if pd.isna(value) else str(value)).astype("string")
    last = [name for name in NUMBER_COLUMNS if name in frame.columns and not wide]
    return frame[[name for name in frame.columns if name not in last] + last]


def write(frame: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV or Parquet, as the ending says. Raises RequestError for another, RunError on failure."""
    if path.suffix not in FORMATS:
        raise RequestError(f"--out {path} must end in {' or '.join(FORMATS)}")
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        if path.suffix == ".csv":
            frame.to_csv(temporary, index=False)
        else:
            frame.to_parquet(temporary, index=False)
        temporary.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def _folders(book: Book, selector: str) -> list[Path]:
    if selector == ALL:
        return [folder for chapter in book.chapters for folder in book.run_folders(chapter)]
    path = Path(selector)
    if (path / MANIFEST).is_file():
        return [path.absolute()]
    if selector in book.chapters:
        return _some(book.run_folders(selector), f"{selector} has no runs yet: length-book run {selector}")
    if path.is_dir():
        return _some(sorted(file.parent.absolute() for file in path.glob(f"**/[!.]*/{MANIFEST}")), f"no runs in {path}")
    chapter, slash, digits = selector.partition("/")
    if not slash or not digits:
        require_known("run or chapter", selector, book.chapters, "chapters")
    found = [folder for folder in book.run_folders(chapter) if folder.name.startswith(digits)]
    if len(found) > 1:
        raise RequestError(f"{selector} is the beginning of {len(found)} runs: give more digits")
    return _some(found, f"there is no run {selector}: length-book list {chapter} lists what there is")


def _some(folders: list[Path], message: str) -> list[Path]:
    if not folders:
        raise RequestError(message)
    return folders


def _flat(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list) else value
