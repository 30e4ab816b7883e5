"""The claim table: what the book says, with the number that would prove it wrong."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path

import pandas as pd

from helpers.records import read_records, record
from helpers.validation import require, require_choice

TABLE = Path(__file__).resolve().parent.parent / "book" / "claims.toml"
WHOSE = ("paper", "ours")
BOUND_FROM = ("paper", "theory", "spread over seeds", "Monte Carlo error", "floating point", "computed")


class ClaimFailed(AssertionError):
    """A statistic is outside its claim's bound, or was not measured."""


@dataclass(frozen=True)
class Claim:
    """One row of ``book/claims.toml``.

    ``sentence`` is the claim in words, ``statistic`` what is measured, ``at_least`` and ``at_most`` the closed bound
    (one or both), ``bound_from`` where the bound comes from (``computed``: the statistic is a computation without
    chance, the bound its rounded value). ``theorem`` and ``helper`` (a dotted name) are set when the claim is about a
    statement of the book and code that computes it.
    """

    id: str
    chapter: str
    whose: str
    sentence: str
    statistic: str
    bound_from: str
    at_least: float | None = None
    at_most: float | None = None
    theorem: str = ""
    helper: str = ""

    def __post_init__(self) -> None:
        require_choice("whose", self.whose, WHOSE)
        require_choice("bound_from", self.bound_from, BOUND_FROM)
        bounded = self.at_least is not None or self.at_most is not None
        require(bounded, "at_least", None, f"given, or at_most, for the claim {self.id!r}")
        for name in ("at_least", "at_most"):
            end = getattr(self, name)
            number = isinstance(end, (int, float)) and isfinite(end)
            require(end is None or number, name, end, f"a finite number, so that the claim {self.id!r} can fail")
        if self.at_least is not None and self.at_most is not None:
            require(self.at_least <= self.at_most, "at_least", self.at_least, f"≤ at_most={self.at_most} ({self.id})")

    def holds(self, value: float) -> bool:
        """Whether ``value`` is inside the bound; NaN never is."""
        above = self.at_least is None or value >= self.at_least
        below = self.at_most is None or value <= self.at_most
        return value == value and above and below

    @property
    def bound(self) -> str:
        """The bound in words, such as ``≥ 0.99`` or ``in [0.04, 0.08]``."""
        if self.at_most is None:
            return f"≥ {self.at_least:g}"
        return f"≤ {self.at_most:g}" if self.at_least is None else f"in [{self.at_least:g}, {self.at_most:g}]"


def load_claims(path: Path = TABLE) -> dict[str, Claim]:
    """The claims by id. ``ValueError`` for an unknown key, a missing one or an id met twice."""
    known = {field.name for field in fields(Claim)}
    needed = {"id", "chapter", "whose", "sentence", "statistic", "bound_from"}
    claims: dict[str, Claim] = {}
    for row in tomllib.loads(path.read_text(encoding="utf-8")).get("claim", []):
        for key in row:
            require_choice(f"key of the claim {row.get('id')!r}", key, known)
        missing = sorted(needed - set(row))
        require(not missing, "claim", row.get("id"), f"complete, without missing keys {missing}")
        require(row["id"] not in claims, "id", row["id"], "used once")
        claims[row["id"]] = Claim(**row)
    return claims


def chapter_claims(chapter: str, path: Path = TABLE) -> list[Claim]:
    """The claims of one chapter, in the table's order; ``ValueError`` if there are none."""
    claims = load_claims(path)
    require_choice("chapter", chapter, sorted({claim.chapter for claim in claims.values()}))
    return [claim for claim in claims.values() if claim.chapter == chapter]


def measured(chapter: str, values: Mapping[str, float], path: Path = TABLE) -> pd.DataFrame:
    """Record ``values`` in the notebook and return them beside their bounds, one row of text a claim of the chapter."""
    record(values)
    rows = [
        {
            "claim": claim.id,
            "statistic": claim.statistic,
            "measured": f"{values[claim.id]:.4g}" if claim.id in values else "not measured",
            "bound": claim.bound,
        }
        for claim in chapter_claims(chapter, path)
    ]
    return pd.DataFrame(rows).set_index("claim")


def problems(chapter: str, values: Mapping[str, float], path: Path = TABLE) -> list[str]:
    """One line for each claim of the chapter that ``values`` does not support; empty if all hold."""
    lines = []
    for claim in chapter_claims(chapter, path):
        if claim.id not in values:
            lines.append(f"{chapter}: the claim {claim.id} was not measured")
        elif not claim.holds(values[claim.id]):
            lines.append(f"{chapter}: the claim {claim.id} fails: {values[claim.id]:.6g} is not {claim.bound}")
    return lines


def check(chapter: str, values: Mapping[str, float], strict: bool = True, path: Path = TABLE) -> None:
    """Print a verdict a claim, the same on every machine; raise ``ClaimFailed`` if one fails and ``strict`` is set."""
    failed = problems(chapter, values, path)
    for claim in chapter_claims(chapter, path):
        verdict = "holds" if claim.id in values and claim.holds(values[claim.id]) else "FAILS"
        print(f"{verdict}  {claim.id}: {claim.sentence} [{claim.bound}]")
    if strict and failed:
        raise ClaimFailed("; ".join(failed))


def verify_notebook(notebook: Path, path: Path = TABLE) -> list[str]:
    """``problems`` of the numbers stored in an executed chapter (the file's stem is the chapter's name)."""
    return problems(notebook.stem, read_records(notebook), path)
