"""``length-book`` as a user calls it: good requests, bad ones in one line, and a machine that is in the way."""

import contextlib
import errno
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest

from helpers.rerun import cli
from helpers.rerun.cli import main
from helpers.rerun.settings import PRESETS_FILE

COMMAND = Path(sys.executable).with_name("length-book")


@pytest.fixture
def book(tiny_book: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the tiny book, found through the environment; the working directory is elsewhere."""
    monkeypatch.setenv("LENGTH_BOOK_ROOT", str(tiny_book))
    monkeypatch.delenv("LENGTH_BOOK_RUNS", raising=False)
    (tiny_book.parent / "elsewhere").mkdir()
    monkeypatch.chdir(tiny_book.parent / "elsewhere")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tiny_book


def files(folder: Path) -> set[Path]:
    """Every file and folder below ``folder``."""
    return set(folder.rglob("*"))


def test_list_and_show(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert capsys.readouterr().out.splitlines() == ["chapter  runs  title", "tiny     0     Tiny waves"]
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"chapter": "tiny", "runs": 0, "title": "Tiny waves"}]
    assert main(["show", "tiny"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^offset +int +5 +steps back from the query +0 < offset < train_length$", shown, re.MULTILINE)
    assert re.search(
        r"^lengths +list\[int\] +\[16,32\] +evaluation lengths +min\(lengths\) > offset$", shown, re.MULTILINE
    )
    assert main(["show", "tiny", "--json"]) == 0
    (offset, *_) = json.loads(capsys.readouterr().out)["parameters"]
    assert offset["conditions"] == ["0 < offset < train_length"]


def test_list_show_and_help_import_nothing_slow(book: Path) -> None:
    slow = ("torch", "nbformat", "papermill", "pandas", "matplotlib", "joblib", "distributed", "IPython")
    for arguments in (
        ["list"],
        ["show", "tiny"],
        ["run", "--help"],
        ["sweep", "tiny", "-p", "offset=3,4", "--dry-run"],
    ):
        program = (
            f"import sys; from helpers.rerun.cli import main; status = main({arguments!r})\n"
            f"sys.exit(status or [name for name in {slow!r} if name in sys.modules] or 0)"
        )
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert (result.stderr, result.returncode) == ("", 0)


def test_run_prints_the_folder_and_says_the_rest_on_standard_error(
    book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "tiny", "-p", "offset=3", "--preset", "paper"]) == 0
    out, err = capsys.readouterr()
    folder = Path(out.strip())
    assert folder.parent == book / "runs/tiny"
    assert json.loads((folder / "manifest.json").read_text())["parameters"]["lengths"] == [64]
    cost, done = err.splitlines()
    assert cost == "preset paper: expected to take 3 minutes of one core"
    assert re.fullmatch(rf"\[1/1\] tiny/{folder.name} \(offset=3, lengths=\[64\]\): finished in \d+\.\d s", done)

    assert main(["run", "tiny", "-p", "offset=3", "--preset", "paper"]) == 0
    assert capsys.readouterr().err.splitlines()[-1].endswith(": finished before")
    assert main(["run", "tiny", "-p", "offset=3", "--preset", "paper", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["run", "tiny", "-p", "offset=3", "--preset", "paper", "-q", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["status"], row["folder"], row["parameters"]["offset"]) == ("kept", str(folder), 3)


def test_a_file_and_options_go_together(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("grid.yaml").write_text("offset: [3, 5]\nseed: 0:2\n", encoding="utf-8")
    assert main(["sweep", "tiny", "-f", "grid.yaml", "-p", "offset=4", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.split(r"  +", line)[1] for line in lines[1:]] == ["offset=4", "offset=4, seed=1"]
    assert not (book / "runs").exists()


def test_forbidden_combinations_can_be_left_out(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["sweep", "tiny", "-p", "offset=3,5,9", "-p", "train_length=4,8,12", "--dry-run"]
    assert main(grid) == 2
    assert "3 of 9 combinations are not allowed (see --skip-forbidden): 0 < offset <" in capsys.readouterr().err
    assert main([*grid, "--skip-forbidden"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 6


def test_the_book_is_found_from_a_folder_inside_it(
    tiny_book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LENGTH_BOOK_ROOT", raising=False)
    monkeypatch.chdir(tiny_book / "book")
    assert main(["run", "tiny", "-q", "--json", "--runs", "my runs ü"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert Path(row["folder"]).parent == tiny_book / "book/my runs ü/tiny"


def test_a_failing_cell_is_named_with_its_exception(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = book / "book/tiny.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[3].source += "assert seed != 1, 'an unlucky seed'\n"
    nbformat.write(notebook, path)
    assert main(["sweep", "tiny", "-p", "seed=0:3"]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    *_, summary, error = err.splitlines()
    assert summary == "runs: 2 done, 0 finished before, 1 failed"
    assert re.fullmatch(
        r"error: tiny/\w{12} \(seed=1\): cell In \[4\] \(value = .*\) raised AssertionError: an unlucky seed; "
        r"see .*/tiny\.ipynb \(1 of 3 runs failed\)",
        error,
    )


def _bad_chapter(source: str) -> Callable[[Path], None]:
    def spoil(book: Path) -> None:
        path = book / "book/tiny.ipynb"
        notebook = nbformat.read(path, as_version=4)
        notebook.cells[1].source = source
        nbformat.write(notebook, path)

    return spoil


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda book: (book / name).write_text(text, encoding="utf-8") and None


def _remove(name: str) -> Callable[[Path], None]:
    return lambda book: (book / name).unlink()


def _file(text: str) -> Callable[[Path], None]:
    return lambda book: Path("grid.yaml").write_text(text, encoding="utf-8") and None


def _break_helpers(book: Path) -> None:
    (book / "helpers").mkdir()
    (book / "helpers/heads.py").write_text("x = = 1\n")
    path = book / "book/tiny.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[2].source = "import helpers.heads"
    nbformat.write(notebook, path)


RUN, SWEEP = ["run", "tiny"], ["sweep", "tiny"]
BAD: dict[str, tuple[list[str], int, str, Callable[[Path], None] | None]] = {
    "no such command": (["rum", "tiny"], 2, "No such command 'rum'", None),
    "no chapter": (["run"], 2, "Missing argument", None),
    "no such option": ([*RUN, "--jbos", "2"], 2, "No such option: --jbos", None),
    "option without value": ([*RUN, "-p"], 2, "requires an argument", None),
    "two chapters": (["run", "tiny", "tiny"], 2, "unexpected extra argument", None),
    "unknown chapter": (["run", "tinny"], 2, "unknown chapter 'tinny'; did you mean tiny?", None),
    "quite unknown chapter": (["run", "zzz"], 2, "unknown chapter 'zzz'; chapters: tiny", None),
    "empty chapter": (["run", ""], 2, "unknown chapter ''", None),
    "a path for a chapter": (["show", "../tiny"], 2, "unknown chapter '../tiny'", None),
    "unknown chapter to show": (["show", "tinny"], 2, "did you mean tiny?", None),
    "unknown parameter": ([*RUN, "-p", "ofset=3"], 2, "'ofset'; did you mean offset or fast?", None),
    "quite unknown parameter": ([*RUN, "-p", "zzz=3"], 2, "it has: offset, train_length, rate", None),
    "unknown in all": (["run", "all", "-p", "zzz=3"], 2, "unknown parameter 'zzz'", None),
    "not a pair": ([*RUN, "-p", "offset"], 2, "-p 'offset' is not of the form name=value", None),
    "no name": ([*RUN, "-p", "=3"], 2, "not of the form name=value", None),
    "no value": ([*RUN, "-p", "offset="], 2, "offset has no values", None),
    "given twice": ([*RUN, "-p", "offset=3", "-p", "offset=4"], 2, "offset is given twice", None),
    "unknown preset": ([*RUN, "--preset", "smokey"], 2, "unknown preset 'smokey'; did you mean smoke?", None),
    "not an int": ([*RUN, "-p", "offset=three"], 2, "offset=three is not allowed: offset must be a whole", None),
    "float for int": ([*RUN, "-p", "offset=3.5"], 2, "offset must be a whole number", None),
    "not a float": ([*RUN, "-p", "rate=fast"], 2, "rate=fast is not allowed: rate must be a number", None),
    "not finite": ([*RUN, "-p", "rate=inf"], 2, "rate must be finite", None),
    "not a bool": ([*RUN, "-p", "fast=yes"], 2, "fast must be true or false", None),
    "not a list of ints": ([*RUN, "-p", "lengths=16,big"], 2, "lengths must be a whole number", None),
    "open bracket": ([*RUN, "-p", "lengths=[16,32"], 2, "brackets and quotes that close", None),
    "out of range": (
        [*RUN, "-p", "offset=16"],
        2,
        "tiny needs 0 < offset < train_length (offset=16, train_length=16)",
        None,
    ),
    "negative": ([*RUN, "-p", "offset=-1"], 2, "(offset=-1, train_length=16)", None),
    "forbidden pair": ([*RUN, "-p", "lengths=4"], 2, "min(lengths) > offset (lengths=[4], offset=5)", None),
    "empty list": ([*RUN, "-p", "lengths=[]"], 2, "min(lengths) > offset", None),
    "not among": ([*RUN, "-p", "optimiser=adamw"], 2, "optimiser in ('adam', 'sgd')".replace("'", '"'), None),
    "several in run": (
        [*RUN, "-p", "offset=3,4"],
        2,
        "run takes one value for each of offset: length-book sweep",
        None,
    ),
    "sweep without grid": (SWEEP, 2, "a sweep needs a grid", None),
    "empty range": ([*SWEEP, "-p", "seed=5:5"], 2, "a range with at least one number", None),
    "endless range": ([*SWEEP, "-p", "seed=0:100000000000"], 2, "at most 10,000 numbers", None),
    "huge grid": (
        [*SWEEP, "-p", "seed=0:500", "-p", "rate=" + ",".join(map(str, range(1, 99)))],
        2,
        "49,000 runs",
        None,
    ),
    "value twice": ([*SWEEP, "-p", "seed=1,1"], 2, "seed is given 1 twice", None),
    "forbidden in a grid": ([*SWEEP, "-p", "offset=3,20"], 2, "1 of 2 combinations are not allowed", None),
    "all forbidden": ([*SWEEP, "-p", "offset=20,21", "--skip-forbidden"], 2, "2 of 2 combinations", None),
    "no jobs": ([*SWEEP, "-p", "seed=0:2", "--jobs", "0"], 2, "--jobs 0 is not allowed", None),
    "odd jobs": ([*SWEEP, "-p", "seed=0:2", "--jobs", "two"], 2, "Invalid value for '-j' / '--jobs'", None),
    "jobs and dask": ([*SWEEP, "-p", "seed=1", "--jobs", "2", "--dask", "tcp://x:1"], 2, "exclude each other", None),
    "no such file": ([*SWEEP, "-f", "grid.yaml"], 2, "cannot read grid.yaml: No such file", None),
    "a folder for a file": ([*SWEEP, "-f", "."], 2, "cannot read .: Is a directory", None),
    "not YAML": ([*SWEEP, "-f", "grid.yaml"], 2, "grid.yaml is not valid YAML or JSON", _file("a: [1")),
    "not a mapping": ([*SWEEP, "-f", "grid.yaml"], 2, "must hold a mapping", _file("- 1")),
    "nested mapping": ([*SWEEP, "-f", "grid.yaml"], 2, "offset must be of type int", _file("offset: {a: 1}")),
    "null": ([*SWEEP, "-f", "grid.yaml"], 2, "offset must be a whole number", _file("offset:")),
    "twice in a file": ([*SWEEP, "-f", "grid.yaml"], 2, "offset is given twice", _file("offset: 1\noffset: 2")),
    "no book": ([*RUN, "--root", "."], 2, "no _toc.yml in", None),
    "no such root": ([*RUN, "--root", "nowhere"], 2, "no _toc.yml in", None),
    "broken toc": (RUN, 2, "the table of contents", _write("_toc.yml", "a: [")),
    "chapter gone": (RUN, 2, "_toc.yml lists book/tiny", _remove("book/tiny.ipynb")),
    "chapter broken": (RUN, 2, "is not a readable notebook", _write("book/tiny.ipynb", "{")),
    "untyped parameter": (RUN, 2, "not of the form 'name: type = default  # help'", _bad_chapter("a = 1")),
    "odd condition": (RUN, 2, "is not a condition", _bad_chapter("a: int = 1  # a; at most 3")),
    "no presets": ([*RUN, "--preset", "smoke"], 2, f"cannot read {PRESETS_FILE}", _remove(PRESETS_FILE)),
    "broken presets": ([*RUN, "--preset", "smoke"], 2, f"cannot read {PRESETS_FILE}", _write(PRESETS_FILE, "[")),
    "no such section": ([*RUN, "--preset", "smoke"], 2, "has no [smoke.tiny]", _write(PRESETS_FILE, "")),
    "odd preset": (
        [*RUN, "--preset", "smoke"],
        2,
        "ofset must be a par",
        _write(PRESETS_FILE, "[smoke.tiny]\nofset = 1"),
    ),
    "mistyped preset": (
        [*RUN, "--preset", "smoke"],
        2,
        "rate must be float",
        _write(PRESETS_FILE, "[smoke.tiny]\nrate = '1'"),
    ),
    "broken helpers": (RUN, 1, "helpers that tiny imports do not parse: invalid syntax (heads.py", _break_helpers),
    "runs is a file": ([*RUN, "--runs", "grid.yaml"], 1, "cannot write", _file("x")),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_one_line_and_leaves_nothing(
    book: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    arguments, status, message, spoil = BAD[case]
    if spoil:
        spoil(book)
    before = files(book.parent)
    assert main(arguments) == status
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert out == ""
    assert files(book.parent) == before


def test_no_kernel_is_one_line(book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("helpers.rerun.kernel.KERNEL", "julia-0.1")
    assert main(["sweep", "tiny", "-p", "seed=0:3", "-q"]) == 2
    assert capsys.readouterr().err == (f"error: no Jupyter kernel 'julia-0.1': install ipykernel into {sys.prefix}\n")
    assert [path for path in files(book / "runs") if path.is_file()] == []


def test_a_terminal_shows_a_bar(book: Path) -> None:
    ours, terminal = pty.openpty()
    variables = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    command = [COMMAND, "sweep", "tiny", "-p", "seed=0:2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, env=variables, text=True) as process:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # the other side has closed
            while read := os.read(ours, 4096):
                shown += read
        assert process.stdout
        folders = process.stdout.read().splitlines()
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert process.returncode == 0
    assert len(folders) == 2
    assert re.search(r"tiny/\w{12}, cell \d of 6", text)
    assert re.search(r"━.* 1/2 .*left", text)
    assert "runs: 2 done, 0 finished before, 0 failed" in text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 16 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", disk], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("mounting a small tmpfs needs root: the full disk and the read-only one are not tried")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_one_line_and_leaves_nothing(
    book: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_disk / "filler").write_bytes(b"x" * 8192)
    assert main(["run", "tiny", "--runs", str(small_disk / "runs"), "-q"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"error: cannot write .*: No space left on device", line)
    assert [path.name for path in files(small_disk) if path.is_file()] == ["filler"]
    (small_disk / "filler").unlink()
    assert main(["run", "tiny", "--runs", str(small_disk / "runs"), "-q"]) in (0, 1)


def test_a_read_only_disk_is_one_line_and_finished_runs_can_still_be_seen(
    book: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["mount", "-o", "remount,size=1m", small_disk], check=True)
    run = ["run", "tiny", "--runs", str(small_disk), "-q"]
    assert main(run) == 0
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert main(run) == 0
    assert main([*run, "-p", "seed=1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"error: cannot write .*: Read-only file system", line)


@pytest.mark.parametrize(
    ("stop", "status", "message"),
    [(signal.SIGINT, 130, "interrupted: finished runs are kept"), (signal.SIGTERM, 143, "")],
)
def test_a_signal_ends_a_run_without_leftovers(book: Path, stop: int, status: int, message: str) -> None:
    path = book / "book/tiny.ipynb"
    notebook = nbformat.read(path, as_version=4)
    marker = book / "started"
    notebook.cells[2].source += f"\nopen({str(marker)!r}, 'w').close()\ntime.sleep(60)"
    nbformat.write(notebook, path)
    process = subprocess.Popen([COMMAND, "run", "tiny"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(stop)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert (out, err.splitlines()) == ("", [f"error: {message}, the same command does the rest"] if message else [])
    assert files(book / "runs") == {book / "runs/tiny"}


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_sweep_and_its_workers_leaves_nothing(book: Path, stop: int) -> None:
    path = book / "book/tiny.ipynb"
    notebook = nbformat.read(path, as_version=4)
    marker = book / "started"
    notebook.cells[2].source += f"\nopen({str(marker)!r}, 'a').write('x')\ntime.sleep(60)"
    nbformat.write(notebook, path)
    command = [COMMAND, "sweep", "tiny", "-p", "seed=0:4", "--jobs", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not (marker.exists() and len(marker.read_text()) == 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, stop)  # as a terminal and a job scheduler do
    out, err = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[stop]
    assert (out, "Traceback" in err) == ("", False)
    assert files(book / "runs") == {book / "runs/tiny"}


def test_an_error_of_the_system_is_one_line(
    book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_memory(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(cli, "_table", no_memory)
    assert main(["list"]) == 1
    assert capsys.readouterr().err == "error: the machine: Cannot allocate memory\n"


def test_a_reader_that_leaves_early_is_no_error(book: Path) -> None:
    result = subprocess.run(f"{COMMAND} show tiny | head -n 1", shell=True, capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("tiny: Tiny waves\n", "")


def test_the_shell_completes_chapters_and_parameters(book: Path) -> None:
    def complete(words: str) -> list[str]:
        variables = {"_LENGTH_BOOK_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        result = subprocess.run([COMMAND], env=os.environ | variables, capture_output=True, text=True, check=True)
        return result.stdout.split()

    assert complete("length-book sw") == ["sweep"]
    assert complete("length-book run ti") == ["tiny"]
    assert complete("length-book run tiny -p o") == ["offset=", "optimiser="]
