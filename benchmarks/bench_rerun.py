"""What ``length-book`` adds to papermill, what two processes save, and how long the smallest run of a chapter takes.

    python benchmarks/bench_rerun.py [overhead] [sweep] [smoke]

Run it on a quiet machine with at least two cores; every figure is wall-clock time.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import papermill

from helpers.rerun.book import ALL, Book
from helpers.rerun.kernel import KERNEL
from helpers.rerun.runs import perform

REPEATS = 7
SWEEP_RUNS = 8
COMMAND = Path(sys.executable).with_name("length-book")
PARAMETERS = (
    "seed: int = 0  # one run\nwork: int = 0  # rounds of arithmetic\nstrict_claims: bool = True  # as everywhere"
)
WORK = "total = seed\nfor i in range(work):\n    total = (total * 31 + i) % 1_000_003"


def small_book(root: Path) -> Book:
    """Write a book of one chapter that computes for as long as its parameter says."""
    (root / "book").mkdir(parents=True)
    (root / "_toc.yml").write_text("format: jb-book\nroot: book/intro\nchapters:\n  - file: book/busy\n")
    (root / "book/intro.md").write_text("# Intro\n")
    (root / "requirements.lock").touch()
    kernel = {"name": KERNEL, "display_name": "Python 3", "language": "python"}
    tagged = nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
    cells = [nbformat.v4.new_markdown_cell("# Busy"), tagged, nbformat.v4.new_code_cell(WORK)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), root / "book/busy.ipynb")
    return Book.find(root)


def seconds(action: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def bench_overhead(book: Book) -> None:
    """Time runs of a chapter that does nothing, in turn with papermill's own."""
    runs = book.plan("busy", {"seed": f"0:{REPEATS + 1}"}).runs
    bare, ours = [], []
    for run in runs:  # the first pair warms up
        out = book.root / "out.ipynb"
        options = {
            "parameters": run.parameters,
            "kernel_name": KERNEL,
            "progress_bar": False,
            "cwd": book.root / "book",
        }
        bare.append(
            seconds(lambda out=out, options=options: papermill.execute_notebook(book.chapters["busy"], out, **options))
        )
        ours.append(seconds(lambda run=run: perform(run)))
    added = statistics.median(mine - its for mine, its in zip(ours[1:], bare[1:], strict=True))
    print(f"papermill alone     {statistics.median(bare[1:]):6.2f} s a run")
    print(f"length-book         {statistics.median(ours[1:]):6.2f} s a run, {added:+.2f} s (at most +1 s)")


def bench_sweep(book: Book) -> None:
    """Time a sweep of runs of some seconds each as a user types it, with one process and with two."""
    work = round(4 / seconds(lambda: exec(WORK, {"seed": 0, "work": 2_000_000})) * 2_000_000)
    times = {}
    for jobs in (1, 2):
        grid = ["-p", f"seed=0:{SWEEP_RUNS}", "-p", f"work={work}", "--jobs", str(jobs), "-q"]
        command = [COMMAND, "sweep", "busy", *grid, "--root", book.root, "--runs", book.root / f"runs-{jobs}"]
        times[jobs] = seconds(lambda command=command: subprocess.run(command, check=True))
        print(f"{SWEEP_RUNS} runs, --jobs {jobs}    {times[jobs]:6.1f} s")
    print(f"two processes       {times[1] / times[2]:6.2f} × as fast (at least 1.6 ×; {os.cpu_count()} cores)")


def bench_smoke(runs: Path) -> None:
    """Time the smallest run of every chapter, after one that warms up."""
    book = Book.find(Path(__file__).parent, runs)
    for chapter in book.select(ALL):
        for warm in (False, True):
            (run,) = book.plan(
                chapter, {"seed": str(int(warm))} if "seed" in book.parameters(chapter) else {}, "smoke"
            ).runs
            outcome = perform(run)
            if warm and outcome.status != "kept":
                print(f"{chapter:24}{outcome.seconds:6.1f} s (at most 10 s) {outcome.error}")


def main() -> None:
    """Run the benchmarks that are named, or all."""
    names = sys.argv[1:] or ["overhead", "sweep", "smoke"]
    with tempfile.TemporaryDirectory() as folder:
        book = small_book(Path(folder) / "book")
        if "overhead" in names:
            bench_overhead(book)
        if "sweep" in names:
            bench_sweep(book)
        if "smoke" in names:
            bench_smoke(Path(folder) / "smoke")


if __name__ == "__main__":
    main()
