"""Sweeps: the same runs and numbers wherever they are done, and whatever is killed meanwhile."""

import itertools
import math
import multiprocessing
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from helpers.rerun import spread
from helpers.rerun.book import Book
from helpers.rerun.cli import main
from helpers.rerun.errors import RequestError, RunError
from helpers.rerun.runs import FINISHED, MANIFEST, Outcome, Run, read_manifest, read_numbers

COMMAND = Path(sys.executable).with_name("length-book")
PROGRAMS = Path(sys.executable).parent
GRID = ["-p", "offset=3,4,5", "-p", "seed=0:2"]
NUMBERS = {(offset, seed): math.sin(offset * 0.5 + seed) for offset in (3, 4, 5) for seed in (0, 1)}


# The kernel's parent is the process that joblib started.
SHOOT_THE_WORKER = """\
time.sleep(1)
if seed == 1 and not os.path.exists("shot"):
    import signal
    open("shot", "w").close()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
"""


def numbers(runs: Path) -> dict[tuple[int, int], float]:
    """Return what every run recorded by offset and seed; every folder there is whole."""
    found = {}
    for folder in visible(runs):
        assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "records.json", "tiny.ipynb"]
        manifest = read_manifest(folder)
        assert manifest["status"] == FINISHED
        assert nbformat.read(folder / "tiny.ipynb", as_version=4).cells[-1].outputs
        parameters = manifest["parameters"]
        found[parameters["offset"], parameters["seed"]] = read_numbers(folder)["value"]
    return found


def visible(runs: Path) -> list[Path]:
    """Return the folders of runs that a reader sees."""
    return sorted(runs.glob("tiny/[!.]*"))


def snapshot(runs: Path) -> dict[Path, tuple[bytes, int]]:
    """Return content and time of every file that a reader sees."""
    files = [path for folder in visible(runs) for path in folder.iterdir()]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def lose_time(book: Path, expression: str) -> None:
    """Let every run of the tiny chapter evaluate an expression first."""
    path = book / "book/tiny.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[2].source += f"\n{expression}"
    nbformat.write(notebook, path)


def test_processes_give_what_one_process_gives(tiny_book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(tiny_book)]
    results = {}
    for jobs in ("1", "2"):
        runs = tiny_book / f"runs-{jobs}"
        assert main(["sweep", "tiny", *GRID, *root, "--runs", str(runs), "--jobs", jobs]) == 0
        out, err = capsys.readouterr()
        assert out.splitlines() == [str(runs / "tiny" / Path(line).name) for line in out.splitlines()]
        assert err.splitlines()[-1] == "runs: 6 done, 0 finished before, 0 failed"
        assert sum("left" in line for line in err.splitlines()) == 5
        assert numbers(runs) == NUMBERS
        results[jobs] = {folder.name: (folder / "records.json").read_bytes() for folder in visible(runs)}
    assert results["1"] == results["2"]
    assert (
        main(["sweep", "tiny", "-p", "offset=5", "-p", "seed=0:3", *root, "--runs", str(runs), "--jobs", "2"]) == 0
    )  # one to do
    assert capsys.readouterr().err.splitlines()[-1] == "runs: 1 done, 2 finished before, 0 failed"


def kill(process: multiprocessing.Process | subprocess.Popen, after: float) -> bool:
    """Send SIGKILL after some seconds; return whether the process was still at work."""
    deadline = time.monotonic() + after
    while time.monotonic() < deadline:
        time.sleep(0.01)
    at_work = process.is_alive() if isinstance(process, multiprocessing.process.BaseProcess) else process.poll() is None
    process.kill()
    process.join() if isinstance(process, multiprocessing.process.BaseProcess) else process.wait()
    return at_work


@pytest.mark.parametrize(("jobs", "kills"), [(1, 15), (2, 5)])
def test_a_sweep_killed_at_random_moments_and_resumed_has_every_run_once(
    tiny_book: Path, jobs: int, kills: int
) -> None:
    # Forked from a server that has imported what a run needs: a kill hits the work, not the start.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers.rerun.kernel", "helpers.rerun.cli", "helpers.rerun.spread", "joblib"])
    moments = random.Random(jobs)
    killed = 0
    for attempt in itertools.count():
        runs = tiny_book / f"runs-{attempt}"
        command = ["sweep", "tiny", *GRID, "-q", "--root", str(tiny_book), "--runs", str(runs), "--jobs", str(jobs)]
        before = {}
        while killed < kills and len(visible(runs)) < len(NUMBERS):
            process = context.Process(target=main, args=(command,))
            process.start()
            killed += kill(process, moments.uniform(0.3, 3 * jobs))
            seen = snapshot(runs)
            assert before.items() <= seen.items()  # what was finished is as it was
            before = seen
            assert numbers(runs).items() <= NUMBERS.items()
        assert main(command) == 0
        assert before.items() <= snapshot(runs).items()
        assert numbers(runs) == NUMBERS
        assert sorted(path.name for path in (runs / "tiny").iterdir()) == [path.name for path in visible(runs)]
        if killed == kills:
            break


def test_a_killed_worker_process_is_one_line_and_the_rest_is_kept(
    tiny_book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lose_time(tiny_book, SHOOT_THE_WORKER)
    sweep = ["sweep", "tiny", *GRID, "--root", str(tiny_book), "--jobs", "2"]
    assert main(sweep) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: a worker process was killed, perhaps for want of memory")
    before = snapshot(tiny_book / "runs")
    assert main(sweep) == 0
    assert before.items() <= snapshot(tiny_book / "runs").items()
    assert numbers(tiny_book / "runs") == NUMBERS


def test_two_identical_sweeps_at_once_share_one_set_of_runs(tiny_book: Path) -> None:
    log = tiny_book / "log"
    lose_time(tiny_book, f"open({str(log)!r}, 'a').write(f'{{offset}} {{seed}}\\n')")
    sweeps = [
        subprocess.Popen(
            [COMMAND, "sweep", "tiny", *GRID, "--root", tiny_book],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    (first, second) = [process.communicate(timeout=120) for process in sweeps]
    assert [process.returncode for process in sweeps] == [0, 0], first[1] + second[1]
    assert first[0] == second[0]
    assert numbers(tiny_book / "runs") == NUMBERS
    assert sorted(log.read_text().splitlines()) == sorted(f"{offset} {seed}" for offset, seed in NUMBERS)
    assert len(list((tiny_book / "runs/tiny").iterdir())) == len(NUMBERS)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Cluster:
    """A Dask scheduler and workers on loopback, started as a user starts them."""

    def __init__(self, folder: Path) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.folder = folder
        self.processes: dict[str, subprocess.Popen] = {}
        self.start("scheduler", "--host", "127.0.0.1", "--port", self.address.rpartition(":")[2])

    def start(self, what: str, *arguments: str) -> None:
        command = [PROGRAMS / "dask", what, *arguments, "--no-dashboard"]
        with (self.folder / f"{what}.log").open("w") as log:
            self.processes[what] = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)

    def add_workers(self) -> None:
        self.start("worker", self.address, "--nworkers", "2", "--nthreads", "1", "--local-directory", str(self.folder))
        with spread._client(self.address) as client:
            client.wait_for_workers(2, timeout=60)

    def stop(self, what: str, how: int = signal.SIGTERM) -> None:
        self.processes[what].send_signal(how)
        self.processes[what].wait(timeout=30)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return a cluster of two workers; the last test of this file takes it apart."""
    pytest.importorskip("distributed", reason="the extra 'cluster' is not installed: nothing is spread over Dask")
    cluster = Cluster(tmp_path_factory.mktemp("dask"))
    try:
        cluster.add_workers()
        yield cluster
    finally:
        for what, process in cluster.processes.items():
            if process.poll() is None:
                cluster.stop(what)


def test_a_dask_cluster_gives_what_one_process_gives(
    tiny_book: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["sweep", "tiny", *GRID, "--root", str(tiny_book), "--dask", cluster.address]
    assert main(sweep) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "runs: 6 done, 0 finished before, 0 failed"
    assert numbers(tiny_book / "runs") == NUMBERS
    records = [path.read_bytes() for path in sorted((tiny_book / "runs").rglob("records.json"))]
    local = tiny_book / "local"
    assert main([*sweep[:-2], "-q", "--runs", str(local)]) == 0
    assert records == [path.read_bytes() for path in sorted(local.rglob("records.json"))]
    assert sorted(path.name for path in (tiny_book / "runs").iterdir()) == ["tiny"]
    assert main(sweep) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "runs: 0 done, 6 finished before, 0 failed"


def test_a_cell_that_fails_on_a_worker_is_named(
    tiny_book: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    lose_time(tiny_book, "assert seed == 0, 'an unlucky seed'")
    assert main(["sweep", "tiny", "-p", "seed=0:2", "--root", str(tiny_book), "--dask", cluster.address]) == 1
    assert "raised AssertionError: an unlucky seed; see" in capsys.readouterr().err.splitlines()[-1]


def test_a_run_whose_dask_worker_is_killed_is_done_by_another(tiny_book: Path, cluster: Cluster) -> None:
    lose_time(tiny_book, "time.sleep(0.5)")
    runs = tiny_book / "runs"
    result: list[int] = []
    command = ["sweep", "tiny", *GRID, "-q", "--root", str(tiny_book), "--dask", cluster.address]
    sweep = threading.Thread(target=lambda: result.append(main(command)))
    sweep.start()
    while len(visible(runs)) < 2:
        time.sleep(0.05)
    before = snapshot(runs)
    with spread._client(cluster.address) as client:
        os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
    sweep.join(timeout=120)
    assert result == [0]
    assert before.items() <= snapshot(runs).items()
    assert numbers(runs) == NUMBERS
    assert sorted(path.name for path in (runs / "tiny").iterdir()) == [path.name for path in visible(runs)]


def test_a_worker_of_another_version_is_one_line(
    tiny_book: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["sweep", "tiny", *GRID, "--root", str(tiny_book), "--dask", cluster.address]
    for change, what in [
        (lambda patch: patch.setattr(platform, "python_version_tuple", lambda: ("3", "7", "0")), "Python"),
        (lambda patch: patch.setattr(spread, "__file__", str(tiny_book / "spread.py")), "the package helpers"),
    ]:
        with monkeypatch.context() as patch:
            change(patch)  # this process is the one that differs
            assert main(sweep) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: the Dask worker tcp://127.0.0.1:")
        assert f"has another version of {what}: " in line
        assert not any((tiny_book / "runs").iterdir())


def test_a_worker_that_sees_other_files_is_one_line(
    tiny_book: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = Book.find(tiny_book).plan("tiny", {}).runs
    elsewhere = Run(tiny_book / "not there", run.runs, run.chapter, run.parameters)
    with spread._client(cluster.address) as client, pytest.raises(RequestError, match="it needs the same files"):
        spread._probe(client, cluster.address, elsewhere)


def test_a_run_that_kills_its_workers_is_one_line(tiny_book: Path, cluster: Cluster) -> None:
    (run,) = Book.find(tiny_book).plan("tiny", {}).runs

    def deadly(run: Run, wait: bool) -> Outcome:
        os._exit(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread, "perform", deadly)
        with pytest.raises(RunError, match="a run has killed several Dask workers"):
            list(spread.dask(cluster.address)([run], False))


@pytest.mark.parametrize("address", ["nonsense", "", "foo://127.0.0.1:8786", "tcp://no.such.host.invalid:8786"])
def test_what_is_no_address_is_one_line(tiny_book: Path, capsys: pytest.CaptureFixture[str], address: str) -> None:
    assert main(["sweep", "tiny", *GRID, "--root", str(tiny_book), "--dask", address]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --dask {address} is no address such as tcp://10.0.0.1:8786: ")
    assert not (tiny_book / "runs").exists()


def test_a_scheduler_that_is_not_there_is_one_line(
    tiny_book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spread, "CONNECT_SECONDS", 1)
    address = f"tcp://127.0.0.1:{free_port()}"
    assert main(["sweep", "tiny", *GRID, "--root", str(tiny_book), "--dask", address]) == 2
    assert capsys.readouterr().err == f"error: no Dask scheduler answers at {address} within 1 s\n"
    assert not (tiny_book / "runs").exists()


def test_a_cluster_that_goes_away_is_one_line_and_finished_runs_are_kept(
    tiny_book: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spread, "CONNECT_SECONDS", 2)
    monkeypatch.setattr(spread, "WORKER_SECONDS", 1)
    lose_time(tiny_book, "time.sleep(0.5)")
    runs = tiny_book / "runs"
    sweep = ["sweep", "tiny", *GRID, "--root", str(tiny_book), "--dask", cluster.address]

    def stop_after(what: str, finished: int) -> threading.Thread:
        def stop() -> None:
            while len(visible(runs)) < finished:
                time.sleep(0.05)
            cluster.stop(what, signal.SIGKILL if what == "scheduler" else signal.SIGTERM)

        thread = threading.Thread(target=stop)
        thread.start()
        return thread

    stopper = stop_after("worker", 2)
    assert main(sweep) == 1
    stopper.join()
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"error: the Dask cluster at {cluster.address} has lost all its workers: {spread.REST}"
    assert main(sweep) == 2
    assert f"{cluster.address} has no workers: start some, dask worker" in capsys.readouterr().err
    before = snapshot(runs)
    assert 2 <= len(visible(runs)) < len(NUMBERS)

    cluster.add_workers()
    stopper = stop_after("scheduler", len(visible(runs)) + 1)
    assert main(sweep) == 1
    stopper.join()
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"error: the Dask scheduler at {cluster.address} is gone: {spread.REST}"
    assert before.items() <= snapshot(runs).items()
    cluster.stop("worker")
    assert main([*sweep[:-2], "-q"]) == 0
    assert before.items() <= snapshot(runs).items()
    assert numbers(runs) == NUMBERS
