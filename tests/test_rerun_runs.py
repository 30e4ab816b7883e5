"""One run: what it keeps, when it is repeated, and what happens when a cell, a kernel or a lock fails."""

import json
import math
import multiprocessing
import os
import re
import subprocess
import time
from pathlib import Path

import nbformat
import pytest
from papermill.clientwrap import PapermillNotebookClient

from helpers.records import read_records
from helpers.rerun.book import Book
from helpers.rerun.errors import RequestError, RunError
from helpers.rerun.record import METADATA_KEY, current_record
from helpers.rerun.runs import BUSY, FAILED, FINISHED, KEPT, Run, _locked, perform, read_manifest, read_numbers


def the_run(root: Path, **given: str) -> Run:
    (run,) = Book.find(root).plan("tiny", given).runs
    return run


def add_cell(root: Path, source: str) -> None:
    path = root / "book/tiny.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(source, id=f"cell-{len(notebook.cells)}"))
    nbformat.write(notebook, path)


def test_a_run_keeps_notebook_numbers_and_manifest(tiny_book: Path) -> None:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    (tiny_book / ".gitignore").write_text("runs/\n")
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "book"]):
        subprocess.run(["git", "-C", str(tiny_book), *command], check=True, env=environment)
    run = the_run(tiny_book, offset="3", rate="1", lengths="[8,64]")
    assert re.fullmatch(r"[0-9a-f]{12}", run.id)
    assert run.folder == tiny_book / "runs/tiny" / run.id
    outcome = perform(run)
    assert (outcome.status, outcome.error, outcome.again) == (FINISHED, "", "")
    assert sorted(path.name for path in run.folder.iterdir()) == ["manifest.json", "records.json", "tiny.ipynb"]
    assert sorted(path.name for path in run.folder.parent.iterdir()) == [run.id]  # no lock, no temporary

    numbers = read_numbers(run.folder)
    assert numbers == {"value": math.sin(3), "longest": 64.0, "threads": 1.0}
    notebook = nbformat.read(run.folder / "tiny.ipynb", as_version=4)
    assert read_records(notebook) == numbers
    committed = nbformat.read(run.notebook, as_version=4)
    assert notebook.metadata[METADATA_KEY] == current_record(committed, tiny_book)
    assert str(tiny_book) not in (run.folder / "tiny.ipynb").read_text(encoding="utf-8")

    manifest = read_manifest(run.folder)
    assert manifest["parameters"] == {
        "offset": 3,
        "train_length": 16,
        "rate": 1.0,
        "lengths": [8, 64],
        "optimiser": "adam",
        "fast": False,
        "seed": 0,
        "strict_claims": False,
    }
    assert manifest["seeds"] == {"seed": 0}
    assert manifest["record"] == notebook.metadata[METADATA_KEY]
    head = subprocess.run(
        ["git", "-C", str(tiny_book), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    assert manifest["git"]["revision"] == head.stdout.strip()
    assert manifest["git"]["dirty"] is False
    assert manifest["packages"]["papermill"] == __import__("papermill").__version__
    assert manifest["device"]["cores"] == os.cpu_count()
    assert manifest["started"] <= manifest["finished"]
    assert 0 < manifest["seconds"] < 600


def test_the_hash_is_of_the_parameters_alone(tiny_book: Path) -> None:
    ids = {the_run(tiny_book, **given).id for given in ({}, {"rate": "0.5"}, {"rate": ".50"}, {"lengths": "[16,32]"})}
    assert len(ids) == 1
    different = [{"rate": "0.25"}, {"seed": "1"}, {"lengths": "[32,16]"}, {"strict_claims": "false"}, {"fast": "true"}]
    assert len({the_run(tiny_book, **given).id for given in different}) == len(different)
    add_cell(tiny_book, "1")
    assert the_run(tiny_book).id in ids


def test_a_finished_run_is_kept_until_the_code_changes(tiny_book: Path) -> None:
    run = the_run(tiny_book)
    assert perform(run).status == FINISHED
    before = {path: path.stat().st_mtime_ns for path in run.folder.iterdir()}
    assert perform(run).status == KEPT
    assert {path: path.stat().st_mtime_ns for path in run.folder.iterdir()} == before

    add_cell(tiny_book, "record(more=float('nan'), most=float('inf'))")
    outcome = perform(run)
    assert (outcome.status, outcome.again) == (FINISHED, "code cells changed since")
    numbers = read_numbers(run.folder)
    assert math.isnan(numbers["more"])
    assert numbers["most"] == math.inf
    json.loads((run.folder / "records.json").read_text(), parse_constant=pytest.fail)  # strict JSON

    (tiny_book / "requirements.lock").write_text("torch==3\n")
    assert perform(run).again == "lock file changed since"
    (run.folder / "manifest.json").write_text("{")
    assert perform(run).again == "its manifest was broken"
    assert sorted(path.name for path in run.folder.parent.iterdir()) == [run.id]


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        ("raise ValueError('offset = 9:\\nsmaller')", "cell In [6] (raise ValueError('offset = 9:\\nsmaller'))"),
        ("1 / 0", "cell In [6] (1 / 0) raised ZeroDivisionError: division by zero"),
        ("import os\nos._exit(3)", "raised DeadKernelError: Kernel died (without a word: was the memory full?)"),
        (
            "import os, sys\nprint('Out of luck', file=sys.__stderr__, flush=True)\nos._exit(3)",
            "raised DeadKernelError: Kernel died (Out of luck)",
        ),
    ],
)
def test_a_failing_cell_is_named_and_kept_and_the_run_is_done_again(tiny_book: Path, cell: str, error: str) -> None:
    add_cell(tiny_book, cell)
    add_cell(tiny_book, "print('never')")
    run = the_run(tiny_book)
    outcome = perform(run)
    assert outcome.status == FAILED
    assert error in outcome.error
    assert "\n" not in outcome.error
    manifest = read_manifest(run.folder)
    assert (manifest["status"], manifest["error"]) == (FAILED, outcome.error)
    kept = nbformat.read(run.folder / "tiny.ipynb", as_version=4)
    (failed,) = [c for c in kept.cells if any(o.output_type == "error" for o in c.get("outputs", []))]
    assert failed.source == cell
    assert read_numbers(run.folder)["threads"] == 1

    path = run.notebook
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[5].source = "pass"
    nbformat.write(notebook, path)
    assert (perform(run).status, perform(run).status) == (FINISHED, KEPT)


@pytest.mark.parametrize("failures", [2, 3])
def test_a_kernel_that_does_not_start_is_tried_three_times(
    tiny_book: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    tries = []
    start = PapermillNotebookClient.start_new_kernel_client

    def busy_port(client: PapermillNotebookClient, **options: object) -> object:
        tries.append(1)
        if len(tries) <= failures:
            client._cleanup_kernel()
            raise RuntimeError("Kernel died before replying to kernel_info")
        return start(client, **options)

    monkeypatch.setattr(PapermillNotebookClient, "start_new_kernel_client", busy_port)
    if failures < 3:
        assert perform(the_run(tiny_book)).status == FINISHED
    else:
        with pytest.raises(RunError, match="the kernel does not start: Kernel died before replying"):
            perform(the_run(tiny_book))
        assert list((tiny_book / "runs/tiny").iterdir()) == []
    assert len(tries) == 3


def test_no_kernel_is_one_line_and_leaves_nothing(tiny_book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helpers.rerun.kernel.KERNEL", "julia-0.1")
    with pytest.raises(RequestError, match=r"no Jupyter kernel 'julia-0\.1': install ipykernel into"):
        perform(the_run(tiny_book))
    assert list((tiny_book / "runs/tiny").iterdir()) == []


def test_an_interrupted_run_leaves_nothing(tiny_book: Path) -> None:
    def interrupt(index: int, total: int) -> None:
        if index == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perform(the_run(tiny_book), on_cell=interrupt)
    assert list((tiny_book / "runs/tiny").iterdir()) == []


def test_what_a_killed_process_left_is_removed(tiny_book: Path) -> None:
    run = the_run(tiny_book)
    for name in (f".{run.id}.tmp", f".{run.id}.old"):
        (run.folder.parent / name).mkdir(parents=True)
        (run.folder.parent / name / "tiny.ipynb").write_text("half a noteb")
    (run.folder.parent / f".{run.id}.lock").touch()
    assert perform(run).status == FINISHED
    assert [path.name for path in run.folder.parent.iterdir()] == [run.id]


def test_a_run_that_another_process_does_is_busy(tiny_book: Path) -> None:
    run = the_run(tiny_book)
    lock = run.folder.parent / f".{run.id}.lock"
    with _locked(lock, wait=False) as mine:
        assert mine
        assert perform(run, wait=False).status == BUSY
    assert not lock.exists()


def _count(path: Path, times: int) -> None:
    for _ in range(times):
        with _locked(path.with_suffix(".lock"), wait=True):
            seen = int(path.read_text())
            time.sleep(0.001)
            path.write_text(str(seen + 1))


def test_the_lock_lets_one_process_in_although_its_file_is_removed_each_time(tmp_path: Path) -> None:
    path = tmp_path / "count"
    path.write_text("0")
    workers = [multiprocessing.get_context("fork").Process(target=_count, args=(path, 50)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert path.read_text() == "200"
    assert [file.name for file in tmp_path.iterdir()] == ["count"]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"status": "finished"}', '{"status": "finished", "parameters": {}}', "\x00"]
)
def test_a_broken_manifest_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(RunError, match=r"manifest.json is broken .* run again"):
        read_manifest(tmp_path)
