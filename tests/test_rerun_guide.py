"""The page on reruns: its transcripts are what the commands print, its programs run.

``python tests/test_rerun_guide.py`` writes what the commands print now into the page.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "book" / "how-to-rerun.md"
PROGRAMS = Path(sys.executable).parent
CONSOLE = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^```\{code-block\} \w+\n:caption: (?P<name>\S+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(r"^```python\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
VOLATILE = {
    re.compile(r", about [\d.]+ (s|min|h) left"): "",
    re.compile(r"\b[\d.]+ (s|min|h)\b"): "TIME",
    re.compile(r"\b[0-9a-f]{12}\b"): "HASH",
    re.compile(r"^\[\d+/"): "[#/",  # two processes end in any order
}


def commands(block: str) -> list[tuple[str, str]]:
    """Return every command of a transcript with its output."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("LENGTH_BOOK")}
    return inherited | {"PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "110"}


def run(command: str, folder: Path) -> str:
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    return result.stdout


def copy_of_the_book(folder: Path) -> Path:
    """Copy what a rerun needs, and write the files that the page shows."""
    for name in ("book", "helpers"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "assignments"))
    for name in ("_toc.yml", "_config.yml", "requirements.lock"):
        shutil.copy(ROOT / name, folder)
    for file in FILE.finditer(PAGE.read_text(encoding="utf-8")):
        (folder / file["name"]).write_text(file["text"], encoding="utf-8")
    return folder


def stable(output: str) -> list[str]:
    """Return lines of output without what differs from time to time."""
    for pattern, word in VOLATILE.items():
        output = "\n".join(pattern.sub(word, line) for line in output.splitlines())
    return sorted(output.splitlines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_the_book(tmp_path_factory.mktemp("guide"))


def test_the_transcripts_are_what_the_commands_print(folder: Path) -> None:
    blocks = CONSOLE.findall(PAGE.read_text(encoding="utf-8"))
    transcripts = [transcript for block in blocks for transcript in commands(block)]
    assert len(transcripts) >= 10
    for command, printed in transcripts:
        assert stable(run(command, folder)) == stable(printed), (
            f"{command}: python tests/{Path(__file__).name} writes the page's transcripts anew"
        )


def test_the_program_for_a_notebook_runs(folder: Path) -> None:
    (program,) = PYTHON.finditer(PAGE.read_text(encoding="utf-8"))
    printed = run(f"python - <<'END'\n{program['text']}\nEND", folder)
    assert "Error" not in printed
    assert "retrieval-fits" in printed


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Path]:
    """Return a folder with an sbatch that starts the job here, and an scancel that ends it."""
    programs = {
        "sbatch": 'script=$(mktemp -p . job.XXXX) && cp "$1" "$script"\n'
        'setsid sh "$script" >job.log 2>&1 &\necho "Submitted batch job $!"\n',
        "scancel": 'kill -- "-$1"\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_the_program_for_slurm_starts_workers_that_take_runs(folder: Path, slurm: Path) -> None:
    pytest.importorskip("dask_jobqueue", reason="the extra 'cluster' is not installed: no SLURM cluster is tried")
    program = (folder / "cluster.py").read_text(encoding="utf-8")
    small = {"cores=8, processes=8": "cores=1, processes=1", "32GB": "2GB", "jobs=4": "jobs=1"}
    for large, little in small.items():
        assert large in program
        program = program.replace(large, little)
    (slurm / "cluster.py").write_text(program)
    variables = environment() | {"PATH": f"{slurm}{os.pathsep}{environment()['PATH']}"}
    cluster = subprocess.Popen(
        ["python", "cluster.py"], cwd=slurm, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert cluster.stdout
        address = cluster.stdout.readline().strip()
        printed = run(
            f"length-book sweep retrieval-task -p seed=1 --preset smoke --runs slurm-runs --dask {address} --json -q",
            folder,
        )
        assert '"status": "finished"' in printed
    finally:
        cluster.communicate("\n", timeout=60)
    assert cluster.returncode == 0


def main() -> None:
    """Write what the commands print into the page."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = copy_of_the_book(Path(temporary))

        def printed(block: re.Match) -> str:
            return "".join(f"$ {command}\n{run(command, folder)}" for command, _ in commands(block[0]))

        PAGE.write_text(CONSOLE.sub(printed, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
