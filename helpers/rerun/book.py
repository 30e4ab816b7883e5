"""The book as a rerunner sees it: its chapters, their parameters, and the runs that a request asks for.

Behind the command ``length-book`` and for notebooks alike:

    book = Book.find()
    book.run("pinning", offset=3)
    book.sweep("pinning", jobs=2, offset=[3, 5, 7], seed=range(8))
    book.collect("pinning")
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import yaml

from helpers.rerun import record, settings
from helpers.rerun.errors import RequestError, RunError, require_known
from helpers.rerun.notebooks import read_plain
from helpers.rerun.parameters import STRICT, Parameter, parameters_of
from helpers.rerun.runs import MANIFEST, Run

if TYPE_CHECKING:
    import pandas as pd

    from helpers.rerun import spread

ALL = "all"
ROOT_VARIABLE = "LENGTH_BOOK_ROOT"
RUNS_VARIABLE = "LENGTH_BOOK_RUNS"


@dataclass(frozen=True)
class Plan:
    """The runs that a request asks for, remarks a user should see, and the forbidden combinations that are left out."""

    runs: list[Run]
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Book:
    """A book's folder and the folder that holds its runs."""

    root: Path
    runs: Path

    @classmethod
    def find(cls, root: Path | None = None, runs: Path | None = None) -> "Book":
        """Return the book at ``root``, else at $LENGTH_BOOK_ROOT, else in the working directory or above it.

        Runs are kept in ``runs``, else in $LENGTH_BOOK_RUNS, else in the book's folder ``runs``. Raises RequestError.
        """
        start = root or (Path(os.environ[ROOT_VARIABLE]) if os.environ.get(ROOT_VARIABLE) else None)
        try:
            found = record.find_root(start)
        except FileNotFoundError as error:
            raise RequestError(str(error)) from None
        kept = runs or os.environ.get(RUNS_VARIABLE) or found / "runs"
        return cls(found, Path(kept).absolute())

    @cached_property
    def chapters(self) -> dict[str, Path]:
        """The chapters by name, in the book's order."""
        try:
            return record.chapters(self.root)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RequestError(f"the table of contents: {' '.join(str(error).split())}") from None

    def select(self, chapter: str) -> list[str]:
        """Return the chapters that a name means: itself, or every one for ``all``."""
        if chapter == ALL:
            if not self.chapters:
                raise RequestError("the book has no chapters yet")
            return list(self.chapters)
        require_known("chapter", chapter, self.chapters)
        return [chapter]

    def notebook(self, chapter: str) -> SimpleNamespace:
        """Return a chapter's cells and metadata."""
        return read_plain(self.chapters[chapter])

    def title(self, chapter: str) -> str:
        """Return a chapter's first heading."""
        lines = [line for cell in self.notebook(chapter).cells for line in cell.source.splitlines()]
        return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), chapter)

    def parameters(self, chapter: str) -> dict[str, Parameter]:
        """Return a chapter's parameters by name, in the order of its parameters cell."""
        try:
            return {parameter.name: parameter for parameter in parameters_of(self.notebook(chapter))}
        except (ValueError, SyntaxError) as error:
            raise RequestError(f"the parameters cell of {chapter}: {error}") from None

    def cost(self, plan: Plan, preset: str) -> list[str]:
        """Return a line with what the runs of a plan are expected to cost, if the preset says so; else nothing."""
        minutes = [settings.expected_minutes(self.root, preset, run.chapter) for run in plan.runs]
        known = [figure for figure in minutes if figure is not None]
        if not known:
            return []
        unknown = f" (runs that nobody measured: {len(minutes) - len(known)})" if len(known) < len(minutes) else ""
        return [f"preset {preset}: expected to take {sum(known):g} minutes of one core{unknown}"]

    def run_folders(self, chapter: str) -> list[Path]:
        """Return the folders of a chapter's runs."""
        return sorted(path.parent for path in (self.runs / chapter).glob(f"[!.]*/{MANIFEST}"))

    def changed_parameters(
        self, chapter: str, parameters: Mapping[str, object]
    ) -> dict[str, tuple[object, object | None]]:
        """Return value and default of every parameter that is not the chapter's default; None if it has none."""
        defaults = {name: p.coerce(p.default) for name, p in self.parameters(chapter).items()}
        return {
            name: (value, defaults.get(name))
            for name, value in parameters.items()
            if name != STRICT and (name not in defaults or value != defaults[name])
        }

    def changed_words(self, chapter: str, parameters: Mapping[str, object]) -> str:
        """Return ``changed_parameters`` as they are written on the command line."""
        changed = self.changed_parameters(chapter, parameters)
        return ", ".join(f"{name}={written(value)}" for name, (value, _) in changed.items()) or "default parameters"

    def run(self, chapter: str, preset: str = "book", **parameters: object) -> "pd.DataFrame":
        """Run a chapter with the given parameters, unless that is done already, and return its recorded numbers.

        Raises RequestError for anything that the chapter does not know or does not allow, RunError when a cell fails.
        """
        from helpers.rerun import spread

        return self._carry_out(
            self.plan(chapter, {name: [value] for name, value in parameters.items()}, preset), spread.here()
        )

    def sweep(
        self,
        chapter: str,
        preset: str = "book",
        jobs: int = 1,
        dask: str | None = None,
        skip_forbidden: bool = False,
        **grid: object,
    ) -> "pd.DataFrame":
        """Run a chapter over every combination of the given values and return the recorded numbers of all runs.

        A value is one value or several: ``seed=range(8)``; several lists are a list of lists. Spreads over ``jobs``
        processes, or over the Dask cluster at the address ``dask``. Raises as ``run`` does, after all runs have ended.
        """
        from helpers.rerun import spread

        given = {
            name: list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
            for name, value in grid.items()
        }
        return self._carry_out(self.plan(chapter, given, preset, skip_forbidden), spread.choose(jobs, dask))

    def collect(self, *selectors: str, wide: bool = False) -> "pd.DataFrame":
        """Return the recorded numbers of finished runs: of chapters, of ``chapter/hash``, of folders, or of all."""
        from helpers.rerun import collect

        runs, _ = collect.finished(self, selectors or [ALL])
        return collect.table(runs, wide)

    def _carry_out(self, plan: Plan, backend: "spread.Backend") -> "pd.DataFrame":
        from helpers.rerun import collect, spread
        from helpers.rerun.runs import FAILED

        outcomes = list(spread.spread(plan.runs, backend))
        if failed := [outcome for outcome in outcomes if outcome.status == FAILED]:
            raise RunError(f"{len(failed)} of {len(outcomes)} runs failed; {failed[0].run.name}: {failed[0].error}")
        runs, _ = collect.finished(self, [str(run.folder) for run in plan.runs])
        return collect.table(runs)

    def plan(
        self,
        chapter: str,
        given: Mapping[str, str | list],
        preset: str = "book",
        skip_forbidden: bool = False,
    ) -> Plan:
        """Return the runs of a chapter, or of all, over the grid of the given values; nothing is started.

        ``given`` holds text, as on the command line, or lists of values. A parameter that only some chapters have is
        left out of the others. Raises RequestError for anything that a chapter does not know or does not allow.
        """
        names = self.select(chapter)
        parameters = {name: self.parameters(name) for name in names}
        known = list(dict.fromkeys(parameter for found in parameters.values() for parameter in found))
        for parameter in given:
            require_known(f"parameter of {chapter}:" if chapter != ALL else "parameter", parameter, known, "it has")
        runs: list[Run] = []
        remarks = []
        for name in names:
            found = parameters[name]
            axes = {key: settings.values_of(found[key], value) for key, value in given.items() if key in found}
            changed = settings.load_preset(self.root, preset, name, found)
            allowed, forbidden = settings.grid(found, changed, axes)
            if forbidden and not (skip_forbidden and allowed):
                raise RequestError(settings.forbidden_message(name, forbidden, len(allowed) + len(forbidden)))
            if forbidden:
                remarks.append(f"{name}: forbidden combinations left out: {len(forbidden)}")
            if lacking := [key for key in given if key not in found]:
                remarks.append(f"{name} has no {', '.join(lacking)}: it runs without")
            runs += [Run(self.root, self.runs, name, values) for values in allowed]
        return Plan(runs, remarks)


def written(value: object) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
