"""The command ``length-book``: rerun a chapter, a grid of runs or the whole book with your own parameters.

Results go to standard output, everything else to standard error. Exit status: 0 when all is well; 1 when a run or the
machine failed; 2 when the request is wrong; 130 when interrupted.
"""

import json
import logging
import math
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from helpers.rerun.book import ALL, Book, Plan, written
from helpers.rerun.errors import REST, RequestError, RunError

PROGRAM = "length-book"
INTERRUPTED = 130

app = typer.Typer(
    help="Rerun a chapter, a grid of runs or the whole book with your own parameters.",
    rich_markup_mode=None,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def complete_chapter(incomplete: str) -> list[str]:
    """Return the chapters that a shell may complete to."""
    try:
        return [name for name in [*Book.find().chapters, ALL] if name.startswith(incomplete)]
    except RequestError:
        return []


def complete_parameter(incomplete: str) -> list[str]:
    """Return ``name=`` for every parameter of the chapter on the command line that a shell may complete to."""
    # What the user has typed; an option without its value keeps typer from parsing it.
    words = (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or "").split()
    try:
        book = Book.find()
        chapters = [name for name in book.chapters if name in words] or book.select(ALL)
        names = [name for chapter in chapters for name in book.parameters(chapter)]
    except RequestError:
        return []
    return [f"{name}=" for name in dict.fromkeys(names) if name.startswith(incomplete)]


Chapter = Annotated[
    str, typer.Argument(help="A chapter's name, or 'all'.", show_default=False, autocompletion=complete_chapter)
]
Parameters = Annotated[
    list[str],
    typer.Option(
        "-p",
        "--parameter",
        metavar="NAME=VALUE",
        help="Set a parameter; may be given many times.",
        default_factory=list,
        show_default=False,
        autocompletion=complete_parameter,
    ),
]
ParametersFile = Annotated[
    Path | None, typer.Option("-f", "--file", help="Read parameters from a YAML or JSON file; -p wins over it.")
]
Preset = Annotated[str, typer.Option(help="Start from 'smoke', 'book' (the chapter's defaults) or 'paper'.")]
Jobs = Annotated[int, typer.Option("-j", "--jobs", help="Spread over this many processes, one thread each.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Say nothing unless something fails.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script to read.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be run.")]
Selectors = Annotated[
    list[str],
    typer.Argument(
        metavar="[RUN]...",
        help="Folders of runs, CHAPTER/HASH, or chapters; every finished run when left out.",
        default_factory=list,
        show_default=False,
        autocompletion=complete_chapter,
    ),
]
Root = Annotated[
    Path | None,
    typer.Option(help="The book's folder (default: $LENGTH_BOOK_ROOT, or the nearest one upwards with _toc.yml)."),
]
Runs = Annotated[
    Path | None, typer.Option(help="The folder of the runs (default: $LENGTH_BOOK_RUNS, or the book's runs).")
]


@app.command("list")
def list_chapters(
    chapter: Annotated[
        str | None,
        typer.Argument(help="List the runs of this chapter, or of 'all'.", autocompletion=complete_chapter),
    ] = None,
    as_json: Json = False,
    root: Root = None,
    runs: Runs = None,
) -> None:
    """List the chapters, or the runs of one.

    \b
    length-book list
    length-book list pinning
    """
    book = Book.find(root, runs)
    if chapter is None:
        rows = [
            {"chapter": name, "runs": len(book.run_folders(name)), "title": book.title(name)}
            for name in book.select(ALL)
        ]
    else:
        rows = [row for name in book.select(chapter) for row in _kept(book, name)]
        if not rows and not as_json:
            print(f"{chapter} has no runs yet: {PROGRAM} run {chapter}", file=sys.stderr)
    print(_json(rows) if as_json else _table(rows))


@app.command()
def show(chapter: Chapter, as_json: Json = False, root: Root = None, runs: Runs = None) -> None:
    """Show a chapter's parameters.

    With types, defaults, what they mean and what must hold.

    \b
    length-book show pinning
    """
    book = Book.find(root, runs)
    for name in book.select(chapter):
        rows = [
            {
                "name": p.name,
                "type": p.type,
                "default": p.default if as_json else written(p.default),
                "help": p.summary,
                "conditions": p.conditions if as_json else "; ".join(p.conditions),
            }
            for p in book.parameters(name).values()
        ]
        if as_json:
            print(_json({"chapter": name, "title": book.title(name), "parameters": rows}))
        else:
            print(f"{name}: {book.title(name)}\n\n{_table(rows)}")


@app.command()
def run(
    chapter: Chapter,
    parameter: Parameters,
    file: ParametersFile = None,
    preset: Preset = "book",
    jobs: Jobs = 1,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: Json = False,
    root: Root = None,
    runs: Runs = None,
) -> int:
    """Run a chapter, or all of them.

    Every parameter you change takes one value. A run is kept in runs/CHAPTER/HASH and never repeated; its folder is
    printed.

    \b
    length-book run pinning -p offset=3
    length-book run pinning -p lengths=16,32,64 -p optimiser=sgd
    length-book run all --preset smoke
    """
    book = Book.find(root, runs)
    plan = book.plan(chapter, _given(parameter, file), preset)
    if len(plan.runs) > len(book.select(chapter)):
        several = [p.partition("=")[0] for p in parameter] or ["the file"]
        raise RequestError(f"run takes one value for each of {', '.join(several)}: length-book sweep takes several")
    return _carry_out(book, plan, preset, jobs, None, dry_run, quiet, as_json)


@app.command()
def sweep(
    chapter: Chapter,
    parameter: Parameters,
    file: ParametersFile = None,
    preset: Preset = "book",
    jobs: Jobs = 1,
    dask: Annotated[
        str | None, typer.Option(help="Spread over the Dask cluster whose scheduler is at this address.")
    ] = None,
    skip_forbidden: Annotated[
        bool, typer.Option("--skip-forbidden", help="Leave out the combinations that the chapter forbids.")
    ] = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    as_json: Json = False,
    root: Root = None,
    runs: Runs = None,
) -> int:
    """Run a chapter over a grid.

    Every combination of the values you give is one run. After an interruption or a failure the same command does what
    is missing.

    \b
    length-book sweep pinning -p offset=3,5,7 -p seed=0:8 --jobs 2
    length-book sweep dilution -p lengths=[16,32],[64,128]
    length-book sweep pinning -f grid.yaml --dask tcp://10.0.0.1:8786
    """
    book = Book.find(root, runs)
    given = _given(parameter, file)
    if not given:
        raise RequestError("a sweep needs a grid: -p offset=3,5,7, or a file with -f")
    plan = book.plan(chapter, given, preset, skip_forbidden)
    return _carry_out(book, plan, preset, jobs, dask, dry_run, quiet, as_json)


@app.command()
def collect(
    run: Selectors,
    out: Annotated[Path | None, typer.Option(help="Write the table to this .csv or .parquet file.")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="One row a run, one column a number.")] = False,
    root: Root = None,
    runs: Runs = None,
) -> None:
    """Collect the numbers of runs.

    One tidy table: a row for every recorded number of every finished run, as CSV on standard output or in a file.

    \b
    length-book collect pinning --out pinning.parquet
    length-book collect pinning/1a2b3c runs/dilution/*
    """
    from helpers.rerun import collect as collecting

    book = Book.find(root, runs)
    found, remarks = collecting.finished(book, run or [ALL])
    _remark(remarks)
    frame = collecting.table(found, wide)
    if out is None:
        print(frame.to_csv(index=False), end="")
    else:
        collecting.write(frame, out)
        print(out)


@app.command()
def diff(
    run: Annotated[str, typer.Argument(help="A run: its folder, or CHAPTER/HASH.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="The page to write (default: _build/diff/CHAPTER-HASH.html).")
    ] = None,
    rtol: Annotated[float, typer.Option(min=0, help="Relative tolerance.")] = 0.05,
    atol: Annotated[float, typer.Option(min=0, help="Absolute tolerance.")] = 0.01,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="Exit with 1 if a number is out of tolerance.")
    ] = False,
    as_json: Json = False,
    root: Root = None,
    runs: Runs = None,
) -> int:
    """Compare a run with the committed chapter.

    Prints the numbers and writes a page with them and with the figures side by side. A number is within tolerance if it
    differs by at most atol + rtol times the committed one.

    \b
    length-book diff pinning/1a2b3c
    """
    from helpers.rerun import collect as collecting
    from helpers.rerun import diff as differing

    book = Book.find(root, runs)
    found, _ = collecting.finished(book, [run])
    if len(found) > 1:
        raise RequestError(f"{run} has {len(found)} runs and diff takes one: {run}/{found[0].id}, say")
    (kept,) = found
    if kept.chapter not in book.chapters:
        raise RequestError(f"the book has no chapter {kept.chapter} to compare with")
    chapter = book.chapters[kept.chapter]
    numbers = differing.compare(kept, chapter, rtol, atol)
    page = out or book.root / "_build" / "diff" / f"{kept.chapter}-{kept.id}.html"
    changed = book.changed_words(kept.chapter, kept.manifest["parameters"])
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(differing.page(kept, chapter, numbers, changed, rtol, atol), encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {page}: {error.strerror}") from None
    agree = int(numbers["within"].sum())
    if as_json:
        rows = [{key: _finite(value) for key, value in row.items()} for row in numbers.to_dict("records")]
        print(_json({"page": str(page), "rtol": rtol, "atol": atol, "numbers": rows}))
    else:
        print(_table([{key: _short(value) for key, value in row.items()} for row in numbers.to_dict("records")]))
        print(f"\n{agree} of {len(numbers)} numbers are within {atol:g} + {rtol:g} × |committed|\n{_shown(page)}")
    return 1 if exit_code and agree < len(numbers) else 0


@app.command()
def render(
    run: Selectors,
    out: Annotated[Path | None, typer.Option(help="The folder of the book to build (default: _build/reruns).")] = None,
    quiet: Quiet = False,
    root: Root = None,
    runs: Runs = None,
) -> None:
    """Make a book of reruns.

    Every run is a page with its parameters. Runs of all chapters make a whole book, with the reader pages.

    \b
    length-book render pinning
    length-book render $(length-book run all -p vocab_size=8)
    """
    from helpers.rerun import collect as collecting
    from helpers.rerun.render import render as build

    book = Book.find(root, runs)
    found, remarks = collecting.finished(book, run or [ALL])
    if not quiet:
        _remark([*remarks, f"building a book, runs: {len(found)}"])
    page = build(book, found, (out or book.root / "_build" / "reruns").absolute())
    if not quiet:
        print(_shown(page))


@app.command()
def execute(
    chapter: Annotated[
        list[str], typer.Argument(default_factory=list, help="Chapters; every one when left out.", show_default=False)
    ],
    everything: Annotated[bool, typer.Option("--all", help="Execute chapters that are up to date too.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Execute nothing: name what is stale or fails.")] = False,
    root: Root = None,
) -> int:
    """Execute the book's own chapters in place.

    Only those whose code, helpers or lock file changed since they were executed. This is what make execute does.
    """
    from helpers.rerun.execute import main as execute_chapters

    flags = ["--all"] * everything + ["--check"] * check
    return execute_chapters(["--root", str(Book.find(root).root), *flags, "--", *chapter])


def console() -> int:
    """``main`` as a program of its own: a request to terminate ends it in order, so that temporaries are removed."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # what a killed kernel leaves unread
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return main()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        status = typer.main.get_command(app).main(
            list(sys.argv[1:] if arguments is None else arguments) or ["--help"],
            prog_name=PROGRAM,
            standalone_mode=False,
        )
    except RequestError as error:
        return _fail(str(error), 2)
    except typer.TyperException as error:
        return _fail(f"{error.format_message().rstrip('.')} ({PROGRAM} --help)", 2)
    except RunError as error:
        return _fail(str(error), 1)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"{error.filename or 'the machine'}: {error.strerror or error}", 1)
    if status == INTERRUPTED:
        return _fail(f"interrupted: {REST}", INTERRUPTED)
    return status or 0


def _carry_out(
    book: Book, plan: Plan, preset: str, jobs: int, dask: str | None, dry_run: bool, quiet: bool, as_json: bool
) -> int:
    """Do the runs of a plan, print their folders and return the exit status."""
    from helpers.rerun import progress, spread
    from helpers.rerun.runs import FAILED, FINISHED, KEPT

    changed = {run.name: book.changed_words(run.chapter, run.parameters) for run in plan.runs}
    remarks = plan.remarks + book.cost(plan, preset)
    if dry_run:
        _remark([] if quiet else remarks)
        rows = [{"run": run.name, "parameters": changed[run.name]} for run in plan.runs]
        print(_json(rows) if as_json else _table(rows))
        return 0
    outcomes = {}
    with progress.reporter(len(plan.runs), quiet) as report:
        for remark in remarks:
            report.note(remark)
        backend = spread.choose(jobs, dask, report.cell)

        def waiting(count: int) -> None:
            report.note(f"another process is doing {count} of these runs: waiting for it")

        for outcome in spread.spread(plan.runs, backend, waiting):
            outcomes[outcome.run.name] = outcome
            report.done(outcome, changed[outcome.run.name])
        counts = Counter(outcome.status for outcome in outcomes.values())
        if len(plan.runs) > 1:
            report.note(f"runs: {counts[FINISHED]} done, {counts[KEPT]} finished before, {counts[FAILED]} failed")
    ordered = [outcomes[run.name] for run in plan.runs]
    if as_json:
        rows = [
            {
                "chapter": outcome.run.chapter,
                "run": outcome.run.id,
                "folder": str(outcome.run.folder),
                "status": outcome.status,
                "seconds": outcome.seconds,
                "error": outcome.error,
                "again": outcome.again,
                "parameters": outcome.run.parameters,
            }
            for outcome in ordered
        ]
        print(_json(rows))
    elif not quiet:
        print("\n".join(_shown(outcome.run.folder) for outcome in ordered))
    failed = [outcome for outcome in ordered if outcome.status == FAILED]
    if failed:
        first = failed[0]
        more = f" ({len(failed)} of {len(ordered)} runs failed)" if len(ordered) > 1 else ""
        where = _shown(first.run.folder / first.run.notebook.name)
        raise RunError(f"{first.run.name} ({changed[first.run.name]}): {first.error}; see {where}{more}")
    return 0


def _kept(book: Book, chapter: str) -> list[dict]:
    from helpers.rerun.runs import changes, read_manifest, record_of

    rows = []
    record = record_of(book.root, chapter)
    for folder in book.run_folders(chapter):
        manifest = read_manifest(folder)
        rows.append(
            {
                "run": f"{chapter}/{folder.name}",
                "status": changes(manifest, record) or manifest["status"],
                "seconds": manifest["seconds"],
                "parameters": book.changed_words(chapter, manifest["parameters"]),
            }
        )
    return rows


def _remark(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def _finite(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _given(options: Iterable[str], file: Path | None) -> dict:
    from helpers.rerun.settings import read_file, read_options

    return {**(read_file(file) if file else {}), **read_options(options)}


def _table(rows: Sequence[dict]) -> str:
    """Return rows as aligned columns with a heading."""
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)] if rows else []
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))] if lines else []
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _json(content: object) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False)


def _shown(path: Path) -> str:
    """Return a path relative to the working directory if it lies in it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _fail(message: str, status: int) -> int:
    print(f"error: {' '.join(message.splitlines())}", file=sys.stderr)
    return status
