"""The same dependencies for pip, for conda and in the lock file; the same version wherever it is written."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = [
    Requirement(text)
    for text in [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
]


def test_conda_asks_for_what_pip_asks_for() -> None:
    *conda, pip = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    assert conda[:2] == [f"python{PROJECT['requires-python']}", "pip"]
    assert pip["pip"].pop() == "-e ."
    # pip's ==1.2.* is conda's =1.2
    expected = {Requirement(re.sub(r"(?<![=<>])=(?!=)([\d.]+)", r"==\1.*", text)) for text in conda[2:]}
    assert expected | {Requirement(text) for text in pip["pip"]} == set(REQUIREMENTS)


def test_the_lock_file_answers_every_requirement() -> None:
    locked: dict[str, set[Version]] = {}
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith((" ", "#")):
            pin = Requirement(line)
            (version,) = pin.specifier
            assert version.operator == "==", f"{line} is not a pin"
            locked.setdefault(canonicalize_name(pin.name), set()).add(Version(version.version))
    unanswered = [
        str(requirement)
        for requirement in REQUIREMENTS
        if not (versions := locked.get(canonicalize_name(requirement.name)))
        or not all(version in requirement.specifier for version in versions)
    ]
    assert unanswered == [], "make lock resolves requirements.lock again"


def test_the_citation_names_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
