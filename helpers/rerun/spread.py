"""Where runs are done: in this process, over the cores of this machine, or over a Dask cluster."""

import hashlib
import logging
import os
import platform
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from helpers.rerun.errors import REST, RequestError, RunError, first_line
from helpers.rerun.runs import BUSY, KEPT, Outcome, Run, clear, perform, record_of, state

if TYPE_CHECKING:
    import distributed

CONNECT_SECONDS = 15
WORKER_SECONDS = 60  # how often to look whether a cluster has workers left
FETCH_SECONDS = 5
POLL_SECONDS = 0.1
Backend = Callable[[Sequence[Run], bool], Iterator[Outcome]]


def spread(
    runs: Sequence[Run], backend: Backend, on_busy: Callable[[int], None] = lambda count: None
) -> Iterator[Outcome]:
    """Yield the outcome of every run as it ends; finished runs first, runs that other processes are doing last."""
    current = {chapter: record_of(root, chapter) for root, chapter in {(run.root, run.chapter) for run in runs}}
    missing = []
    for run in runs:
        if state(run, current[run.chapter])[0]:
            yield Outcome(run, KEPT)
        else:
            missing.append(run)
    busy = []
    for outcome in backend(missing, False) if missing else ():
        if outcome.status == BUSY:
            busy.append(outcome.run)
        else:
            yield outcome
    if busy:
        on_busy(len(busy))
        yield from backend(busy, True)


def choose(
    jobs: int, address: str | None, on_cell: Callable[[Run, int, int], None] = lambda run, index, total: None
) -> Backend:
    """Return where a user wants runs done: a cluster, if there is an address, else processes, else this one."""
    if jobs < 1:
        raise RequestError(f"--jobs {jobs} is not allowed: it must be at least 1")
    if address is None:
        return here(on_cell) if jobs == 1 else processes(jobs)
    if jobs != 1:
        raise RequestError("--jobs and --dask exclude each other: a cluster has its own workers")
    return dask(address)


def here(on_cell: Callable[[Run, int, int], None] = lambda run, index, total: None) -> Backend:
    """Do runs one after another in this process, with one thread unless $OMP_NUM_THREADS says otherwise."""
    threads = os.environ.get("OMP_NUM_THREADS", "1")

    def backend(runs: Sequence[Run], wait: bool) -> Iterator[Outcome]:
        for run in runs:
            yield perform(run, wait, threads, lambda index, total, run=run: on_cell(run, index, total))

    return backend


def processes(jobs: int) -> Backend:
    """Do runs in ``jobs`` processes of this machine, one thread each."""

    def backend(runs: Sequence[Run], wait: bool) -> Iterator[Outcome]:
        import joblib
        from joblib.externals.loky.process_executor import TerminatedWorkerError

        parallel = joblib.Parallel(
            n_jobs=min(jobs, len(runs)), backend="loky", batch_size=1, return_as="generator_unordered"
        )
        try:
            yield from parallel(joblib.delayed(_in_worker)(run, wait, os.getpid()) for run in runs)
        except TerminatedWorkerError:
            raise RunError(
                f"a worker process was killed, perhaps for want of memory (fewer --jobs need less): {REST}"
            ) from None
        finally:  # workers that were killed could not tidy up themselves
            for run in runs:
                clear(run)

    return backend


def dask(address: str) -> Backend:
    """Do runs on the workers of the Dask cluster whose scheduler is at ``address``, one thread each.

    The workers need this package and see the book's folder and the runs at the same paths. A run whose worker dies is
    done by another. Raises RequestError when the cluster cannot be used and RunError when it is lost; what finished is
    kept.
    """

    def backend(runs: Sequence[Run], wait: bool) -> Iterator[Outcome]:
        from distributed import as_completed
        from distributed.client import FutureCancelledError
        from distributed.comm import CommClosedError
        from distributed.scheduler import KilledWorker

        with _client(address) as client:
            _probe(client, address, runs[0])
            futures = [client.submit(perform, run, wait, pure=False) for run in runs]
            waiting = as_completed(futures, loop=client.loop)
            seen = time.monotonic()
            try:
                while waiting.count():
                    for future in waiting.next_batch(block=False):
                        try:
                            outcome = future.result(timeout=FETCH_SECONDS)
                        except TimeoutError:  # its worker died with the result: another will find the run finished
                            waiting.add(future)
                        else:
                            yield outcome
                    if time.monotonic() - seen > WORKER_SECONDS:
                        if not client.nthreads():
                            raise RunError(f"the Dask cluster at {address} has lost all its workers: {REST}")
                        seen = time.monotonic()
                    time.sleep(POLL_SECONDS)
            except (FutureCancelledError, CommClosedError):
                raise RunError(f"the Dask scheduler at {address} is gone: {REST}") from None
            except KilledWorker as error:
                raise RunError(
                    f"a run has killed several Dask workers, the last {error.last_worker.address}: {REST}"
                ) from None

    return backend


@contextmanager
def _client(address: str) -> Iterator["distributed.Client"]:
    """Connect to a scheduler; its log is silent, because what matters in it is in our errors."""
    try:
        import distributed
    except ImportError:
        raise RequestError("--dask needs the package distributed: pip install distributed") from None
    try:
        distributed.comm.resolve_address(address)
    except (ValueError, OSError) as error:
        raise RequestError(f"--dask {address} is no address such as tcp://10.0.0.1:8786: {error}") from None
    logger = logging.getLogger("distributed")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings(action="ignore"):  # versions are compared below
            client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError):
        raise RequestError(f"no Dask scheduler answers at {address} within {CONNECT_SECONDS} s") from None
    except Exception as error:  # a bad address, another protocol
        raise RequestError(f"cannot use the Dask scheduler at {address}: {first_line(str(error))}") from None
    try:
        yield client
    finally:
        client.close(timeout=2)
        logger.setLevel(level)


def _probe(client: "distributed.Client", address: str, run: Run) -> None:
    """Raise RequestError unless there are workers, of our versions, that see the book and the runs."""
    try:
        client.wait_for_workers(1, timeout=CONNECT_SECONDS)
    except TimeoutError:
        raise RequestError(
            f"the Dask scheduler at {address} has no workers: start some, dask worker {address}"
        ) from None
    with tempfile.NamedTemporaryFile(dir=_made(run.runs), prefix=".probe-") as token:
        try:
            answers = client.run(_answer, run.root, Path(token.name))
        except Exception as error:
            raise RequestError(
                f"the Dask workers cannot import this package ({first_line(str(error))}): install it there too"
            ) from None
    versions = client.get_versions()
    ours = _answer(run.root, run.runs)
    for worker, answer in answers.items():
        theirs = versions["workers"][worker]["packages"]["distributed"]
        for what, here, there in [
            ("Python", ours["python"], answer["python"]),
            ("distributed", versions["client"]["packages"]["distributed"], theirs),
            ("the package helpers", ours["code"], answer["code"]),
        ]:
            if here != there:
                raise RequestError(f"the Dask worker {worker} has another version of {what}: {there}, here {here}")
        if not answer["sees"]:
            raise RequestError(
                f"the Dask worker {worker} does not see {run.root} and {run.runs}: it needs the same files"
            )


def _answer(root: Path, path: Path) -> dict[str, object]:
    """Say what this process is: its Python, a hash of the code that does runs, whether it sees book and ``path``."""
    code = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "code": hashlib.sha256(code).hexdigest()[:12],
        "sees": (root / "_toc.yml").is_file() and path.exists(),
    }


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror}") from None
    return folder


def _in_worker(run: Run, wait: bool, parent: int) -> Outcome:
    if os.getpid() != parent:  # joblib does a single run in the process that asks for it
        _die_with(parent)
    return perform(run, wait)


def _die_with(parent: int) -> None:
    """End this process when ``parent`` is gone, as after a SIGKILL: what it works on would be done twice otherwise."""
    if any(thread.name == "die-with-parent" for thread in threading.enumerate()):
        return

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()
