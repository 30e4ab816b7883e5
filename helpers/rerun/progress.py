"""How far a sweep is: a bar on a terminal, plain lines in a log, nothing when asked to be quiet."""

import sys
import time
from types import TracebackType
from typing import Self

from helpers.rerun.runs import FAILED, KEPT, Outcome, Run


class Silent:
    """Says nothing; the others say more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing to close."""

    def note(self, text: str) -> None:
        """Say a line."""

    def cell(self, run: Run, index: int, total: int) -> None:
        """Say which cell of a run starts."""

    def done(self, outcome: Outcome, changed: str) -> None:
        """Say how a run ended; ``changed`` are its parameters in words."""


class Lines(Silent):
    """One line a run on standard error, with an estimate of the time left."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.ended = self.kept = 0
        self.start = time.monotonic()

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def done(self, outcome: Outcome, changed: str) -> None:
        self.ended += 1
        self.kept += outcome.status == KEPT
        self.note(f"[{self.ended}/{self.total}] {sentence(outcome, changed)}{self._left()}")

    def _left(self) -> str:
        done, left = self.ended - self.kept, self.total - self.ended
        if not done or not left:
            return ""
        return f", about {duration((time.monotonic() - self.start) / done * left)} left"


class Bar(Silent):
    """A bar with the time left on a terminal, and a line for every run that failed."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
        left = [TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()]
        self.progress = Progress(*columns, *left, console=Console(stderr=True), transient=True)
        self.task = self.progress.add_task("starting", total=total)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def note(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False)

    def cell(self, run: Run, index: int, total: int) -> None:
        self.progress.update(self.task, description=f"{run.name}, cell {index + 1} of {total}")

    def done(self, outcome: Outcome, changed: str) -> None:
        self.progress.update(self.task, advance=1, description=outcome.run.name)
        if outcome.status == FAILED:
            self.note(sentence(outcome, changed))


def reporter(total: int, quiet: bool) -> Silent:
    """Return what suits standard error."""
    if quiet:
        return Silent()
    return Bar(total) if sys.stderr.isatty() else Lines(total)


def sentence(outcome: Outcome, changed: str) -> str:
    """Return how a run ended, in a line."""
    about = f"{outcome.run.name} ({changed})"
    if outcome.status == KEPT:
        return f"{about}: finished before"
    again = f", again because {outcome.again}" if outcome.again else ""
    if outcome.status == FAILED:
        return f"{about}: failed{again}: {outcome.error}"
    return f"{about}: finished in {duration(outcome.seconds)}{again}"


def duration(seconds: float) -> str:
    """Return seconds in words: ``3.2 s``, ``4 min``, ``2.5 h``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
