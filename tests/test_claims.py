"""The claim table: every claim can fail, a table that says nothing is refused, numbers survive the notebook."""

import math
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from helpers.claims import TABLE, Claim, ClaimFailed, chapter_claims, check, load_claims, measured, problems
from helpers.claims import verify_notebook as verify
from helpers.records import read_records

CLAIMS = load_claims()

ROW = {
    "id": "waves-fit",
    "chapter": "waves",
    "whose": "paper",
    "sentence": "Waves fit.",
    "statistic": "median accuracy",
    "bound_from": "theory",
    "at_least": 0.99,
}
OTHER = ROW | {"id": "waves-chance", "sentence": "Others guess.", "at_least": 0.04, "at_most": 0.08}


def toml(*rows: dict[str, object]) -> str:
    """The rows as a claim table."""
    written = {float: "{}", int: "{}", str: '"{}"'}
    return "\n".join(
        "[[claim]]\n" + "".join(f"{k} = {written[type(v)].format(v)}\n" for k, v in row.items()) for row in rows
    )


@pytest.fixture
def table(tmp_path: Path):
    """Return a function that writes a claim table."""

    def write(*rows: dict[str, object]) -> Path:
        path = tmp_path / "claims.toml"
        path.write_text(toml(*rows), encoding="utf-8")
        return path

    return write


def at_the_bound(claim: Claim) -> float:
    return claim.at_most if claim.at_least is None else claim.at_least


def beyond(claim: Claim) -> list[float]:
    """The first numbers outside the bound, on each side that has one, and no number at all."""
    below = [] if claim.at_least is None else [np.nextafter(claim.at_least, -np.inf)]
    above = [] if claim.at_most is None else [np.nextafter(claim.at_most, np.inf)]
    return [*below, *above, math.nan]


# The book's own table


def test_the_book_makes_claims() -> None:
    assert TABLE.exists()
    assert any(claim.whose == "paper" for claim in CLAIMS.values())


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=list(CLAIMS))
def test_every_claim_of_the_book_can_fail(
    claim: Claim, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its bound it holds; at the next floating-point number past it, or unmeasured, the check stops and names it."""
    monkeypatch.setattr("helpers.claims.load_claims", lambda path: CLAIMS)
    values = {other.id: at_the_bound(other) for other in chapter_claims(claim.chapter)}
    check(claim.chapter, values)
    assert "FAILS" not in capsys.readouterr().out
    for wrong in beyond(claim):
        with pytest.raises(ClaimFailed, match=rf"^{claim.chapter}: the claim {claim.id} fails: .* is not .*$") as error:
            check(claim.chapter, values | {claim.id: wrong})
        assert str(error.value).count("the claim") == 1, "no other claim fails with it"
        assert f"FAILS  {claim.id}: {claim.sentence} [{claim.bound}]\n" in capsys.readouterr().out
    del values[claim.id]
    with pytest.raises(ClaimFailed, match=f"^{claim.chapter}: the claim {claim.id} was not measured$"):
        check(claim.chapter, values)


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=list(CLAIMS))
def test_every_claim_of_the_book_is_in_words_and_has_its_chapter(claim: Claim, chapter_paths: dict[str, Path]) -> None:
    assert claim.chapter in chapter_paths
    assert claim.sentence.endswith(".")
    assert claim.statistic


# Bounds


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"at_least": 0.99}, "≥ 0.99"),
        ({"at_most": 1e-12}, "≤ 1e-12"),
        ({"at_least": 0.04, "at_most": 0.08}, "in [0.04, 0.08]"),
        ({"at_most": 0}, "≤ 0"),
    ],
)
def test_a_bound_is_closed_and_said_in_words(bounds: dict[str, float], words: str) -> None:
    claim = Claim(**{k: v for k, v in ROW.items() if k != "at_least"}, **bounds)
    assert claim.bound == words
    assert all(claim.holds(end) for end in bounds.values())
    assert not any(claim.holds(value) for value in beyond(claim))


def test_nothing_but_a_number_inside_holds() -> None:
    claim = Claim(**ROW)
    assert claim.holds(1.0)
    assert claim.holds(np.float32(1.0))
    assert not claim.holds(math.nan)
    assert not claim.holds(-math.inf)


# Tables


def test_claims_are_read_by_id_and_by_chapter_in_order(table) -> None:
    path = table(OTHER, ROW, ROW | {"id": "tides", "chapter": "tides", "theorem": "T1", "helper": "helpers.chance"})
    claims = load_claims(path)
    assert list(claims) == ["waves-chance", "waves-fit", "tides"]
    assert claims["waves-fit"] == Claim(**ROW)
    assert claims["tides"].theorem == "T1"
    assert [claim.id for claim in chapter_claims("waves", path)] == ["waves-chance", "waves-fit"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROW, ROW], "id='waves-fit' is not allowed: id must be used once"),
        ([ROW | {"at_leats": 0.9}], r"key of the claim 'waves-fit'='at_leats' .* \(did you mean 'at_least'\?\)"),
        ([{k: v for k, v in ROW.items() if k != "at_least"}], "at_least=None .* given, or at_most, for .*'waves-fit'"),
        ([{k: v for k, v in ROW.items() if k != "sentence"}], r"claim='waves-fit' .* missing keys \['sentence'\]"),
        ([{k: v for k, v in ROW.items() if k != "id"}], r"claim=None .* missing keys \['id'\]"),
        ([ROW | {"whose": "theirs"}], "whose='theirs' is not allowed: whose must be one of paper, ours"),
        (
            [ROW | {"bound_from": "taste"}],
            "bound_from='taste' is not allowed: bound_from must be one of paper, theory, .*",
        ),
        ([ROW | {"at_most": 0.5}], r"at_least=0.99 is not allowed: at_least must be ≤ at_most=0.5 \(waves-fit\)"),
        ([ROW | {"at_least": math.nan}], "at_least=nan is not allowed: at_least must be a finite number, .* can fail"),
        (
            [ROW | {"at_least": -math.inf}],
            "at_least=-inf is not allowed: at_least must be a finite number, .* can fail",
        ),
        ([ROW | {"at_most": math.inf}], "at_most=inf is not allowed: at_most must be a finite number, .* can fail"),
        ([ROW | {"at_least": "0.99"}], "at_least='0.99' is not allowed: at_least must be a finite number, .* can fail"),
    ],
)
def test_a_table_that_is_wrong_is_refused_by_name(table, rows: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$") as error:
        load_claims(table(*rows))
    assert "\n" not in str(error.value)


def test_a_chapter_without_claims_is_named_with_those_that_have_some(table) -> None:
    with pytest.raises(
        ValueError, match=r"^chapter='wave' is not allowed: .* one of waves \(did you mean 'waves'\?\)$"
    ):
        chapter_claims("wave", table(ROW))


# Checking


def test_verdicts_are_printed_in_order_and_do_not_show_the_measured_number(table, capsys) -> None:
    check("waves", {"waves-fit": 0.9931, "waves-chance": 0.0625}, path=table(ROW, OTHER))
    assert capsys.readouterr().out == (
        "holds  waves-fit: Waves fit. [≥ 0.99]\nholds  waves-chance: Others guess. [in [0.04, 0.08]]\n"
    )


def test_all_failures_are_named_at_once(table, capsys) -> None:
    path, values = table(ROW, OTHER), {"waves-fit": 0.5}
    expected = [
        "waves: the claim waves-fit fails: 0.5 is not ≥ 0.99",
        "waves: the claim waves-chance was not measured",
    ]
    assert problems("waves", values, path) == expected
    with pytest.raises(ClaimFailed) as error:
        check("waves", values, path=path)
    assert str(error.value) == "; ".join(expected)


def test_a_lenient_check_prints_and_goes_on(table, capsys) -> None:
    check("waves", {"waves-fit": math.nan}, strict=False, path=table(ROW))
    assert capsys.readouterr().out == "FAILS  waves-fit: Waves fit. [≥ 0.99]\n"


# Through a notebook


def test_recorded_numbers_come_back_from_the_executed_notebook_to_the_last_bit(table, tmp_path: Path) -> None:
    path = table(ROW, OTHER)
    values = {"waves-fit": 0.1 + 0.2 + 0.6999999999999997, "waves-chance": 1 / 16, "extra": 1e-300}
    cells = [
        "from pathlib import Path\n\nfrom helpers.claims import check, measured",
        f"values = {values!r}\ntable = Path({str(path)!r})",
        "measured('waves', values, table)",
        "check('waves', values, path=table)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    nbformat.write(notebook, tmp_path / "waves.ipynb")

    assert read_records(tmp_path / "waves.ipynb") == values
    assert verify(tmp_path / "waves.ipynb", path) == []
    stricter = table(ROW | {"at_least": 1.1}, OTHER)
    assert verify(tmp_path / "waves.ipynb", stricter) == ["waves: the claim waves-fit fails: 1 is not ≥ 1.1"]
    shown = "".join(str(output.get("data", {}).get("text/plain", "")) for output in notebook.cells[2].outputs)
    for text in ("median accuracy", "≥ 0.99", "0.0625", "in [0.04, 0.08]"):
        assert text in shown


def test_measured_shows_every_claim_of_the_chapter_measured_or_not(table) -> None:
    shown = measured("waves", {}, table(ROW, OTHER))
    assert list(shown.index) == ["waves-fit", "waves-chance"]
    assert (shown.measured == "not measured").all()
    assert list(shown.bound) == ["≥ 0.99", "in [0.04, 0.08]"]
