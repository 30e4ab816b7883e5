"""``python -m helpers.rerun.execute`` on a throw-away book, as a user calls it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from helpers.records import MIME
from helpers.rerun.execute import main, write_notebook
from helpers.rerun.record import METADATA_KEY, current_record


def run(book: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "helpers.rerun.execute", "--root", str(book), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def outputs(path: Path) -> list[str]:
    cells = nbformat.read(path, as_version=4).cells
    return [output.get("text", output.output_type) for cell in cells for output in cell.get("outputs", [])]


def test_stale_chapters_and_no_others_are_executed_and_twice_gives_the_same_bytes(mini_book: Path) -> None:
    waves, plain = mini_book / "book/waves.ipynb", mini_book / "book/plain.ipynb"
    before = run(mini_book, "--check")
    assert before.returncode == 1
    assert "waves is stale: never executed" in before.stderr
    assert "plain is stale: never executed" in before.stderr

    first = run(mini_book)
    assert first.returncode == 0, first.stderr
    assert outputs(waves) == ["42\n"]
    assert run(mini_book, "--check").returncode == 0

    written = waves.read_bytes(), plain.read_bytes()
    again = run(mini_book)
    assert again.stdout.splitlines() == ["waves: up to date", "plain: up to date"]
    forced = run(mini_book, "--all")
    assert forced.returncode == 0
    assert (waves.read_bytes(), plain.read_bytes()) == written

    module = mini_book / "helpers/heads.py"
    module.write_text(module.read_text(encoding="utf-8").replace("2 * x", "3 * x"), encoding="utf-8")
    check = run(mini_book, "--check")
    assert check.returncode == 1
    assert check.stderr.splitlines() == ["waves is stale: helpers changed (make execute re-runs it)"]
    assert run(mini_book).returncode == 0
    assert outputs(waves) == ["63\n"]
    assert plain.read_bytes() == written[1]


def test_what_differs_between_machines_is_not_stored(mini_book: Path) -> None:
    path = mini_book / "book/plain.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.update({"widgets": {}, "kernelspec": {"name": "mine", "display_name": "Mine"}})
    notebook.cells[1].metadata.update({"execution": {"iopub.status.busy": "2026"}, "tags": ["kept"]})
    write_notebook(notebook, path)
    assert run(mini_book, "plain").returncode == 0
    executed = nbformat.read(path, as_version=4)
    assert set(executed.metadata) == {"kernelspec", "language_info", METADATA_KEY}
    assert executed.metadata.kernelspec.name == "python3"
    assert "version" not in executed.metadata.language_info
    assert executed.cells[1].metadata == {"tags": ["kept"]}


@pytest.mark.parametrize(
    ("cell", "options", "message"),
    [
        ("1 / 0", [], "broken: cell 3 raised ZeroDivisionError: division by zero"),
        ("raise ValueError('offset = 9:\\nmust be small')", [], "broken: cell 3 raised ValueError: offset = 9:"),
        ("1 +", [], "broken: cell 3 raised SyntaxError: invalid syntax"),
        ("import os; os._exit(1)", [], "broken: cell 3 did not finish: Kernel died"),
        ("import time; time.sleep(60)", ["--timeout", "1"], "broken: cell 3 did not finish: A cell timed out"),
        ("import helpers.nothing", [], "broken: cell 3 raised ModuleNotFoundError: No module named 'helpers.nothing'"),
    ],
)
def test_a_failing_cell_is_named_and_the_committed_file_stays(
    mini_book: Path, write_chapter: Callable[..., Path], cell: str, options: list[str], message: str
) -> None:
    path = write_chapter(mini_book, "broken", "x = 1", cell, "print('never')")
    with (mini_book / "_toc.yml").open("a") as toc:
        toc.write("  - file: book/broken\n")
    committed = path.read_bytes()
    result = run(mini_book, "broken", *options)
    assert result.returncode == 1
    assert message in result.stderr.splitlines()[-1]
    assert "helpers/rerun" not in result.stderr  # no traceback of ours
    assert path.read_bytes() == committed
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "broken.ipynb",
        "intro.md",
        "plain.ipynb",
        "waves.ipynb",
    ]


def test_a_claim_that_fails_is_named(mini_book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mini_book / "book/plain.ipynb"
    notebook = nbformat.read(path, as_version=4)
    number = {"output_type": "display_data", "data": {MIME: "0.25"}, "metadata": {"scrapbook": {"name": "plain-claim"}}}
    notebook.cells[1].outputs = [nbformat.from_dict(number)]
    notebook.metadata[METADATA_KEY] = current_record(notebook, mini_book)
    write_notebook(notebook, path)
    claim = (
        '[[claim]]\nid = "plain-claim"\nchapter = "plain"\nwhose = "ours"\nsentence = "It is plain."\n'
        'statistic = "plainness"\nbound_from = "theory"\nat_least = '
    )
    check = ["--root", str(mini_book), "--check", "plain"]
    for bound, status, lines in [
        (0.2, 0, []),
        (0.3, 1, ["plain: the claim plain-claim fails: 0.25 is not ≥ 0.3"]),
    ]:
        (mini_book / "book/claims.toml").write_text(f"{claim}{bound}\n", encoding="utf-8")
        assert main(check) == status
        assert capsys.readouterr().err.splitlines() == lines


def test_an_interrupted_write_leaves_the_old_file(mini_book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = mini_book / "book/plain.ipynb"
    committed = path.read_bytes()

    def disk_full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(nbformat, "write", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_notebook(nbformat.v4.new_notebook(), path)
    assert path.read_bytes() == committed
    assert not list(path.parent.glob(".*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wave"], "error: unknown chapter 'wave'; did you mean waves?"),
        (["zzz"], "error: unknown chapter 'zzz'; chapters: waves, plain"),
    ],
)
def test_an_unknown_chapter_is_refused(
    mini_book: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["--root", str(mini_book), *arguments]) == 2
    assert capsys.readouterr().err.strip() == message


def test_no_book_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no _toc.yml")


def test_a_chapter_can_be_named_by_its_file_and_unlisted_ones_are_mentioned(
    mini_book: Path, write_chapter: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write_chapter(mini_book, "draft", "1")
    assert main(["--root", str(mini_book), "--check", f"book{os.sep}plain.ipynb"]) == 1
    warning, problem = capsys.readouterr().err.splitlines()
    assert "book/draft.ipynb is not in _toc.yml" in warning
    assert problem.startswith("plain is stale")
