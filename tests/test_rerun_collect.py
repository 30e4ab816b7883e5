"""What is done with finished runs: one table, a comparison with the committed chapter, a book of reruns."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import nbformat
import pandas as pd
import pytest
import yaml
from bs4 import BeautifulSoup
from nbclient import NotebookClient

from helpers.rerun import collect, diff, render
from helpers.rerun.book import Book
from helpers.rerun.cli import main
from helpers.rerun.errors import RequestError, RunError

WAVES = """\
# Tiny waves

Waves as in {{cite:p}}`Fourier` go on for ever.

```{{prf:theorem}} T1, for ever
:label: thm-tiny

$a_k$ stays.
```

$$ a = b $$ (eq-tiny)

See {{prf:ref}}`thm-tiny`, {{eq}}`eq-tiny`, {{numref}}`fig-white`, {other}.

```{{exercise}}
:label: ex-tiny-1

Why?
```

```{{solution}} ex-tiny-1
:class: dropdown

Because of {{prf:ref}}`thm-tiny`.
```
"""


def finished_folders(book: Book) -> list[Path]:
    """Return the folders of the finished runs."""
    return [run.folder for run in collect.finished(book, ["tiny"])[0]]


def value(offset: int, seed: int, rate: float = 0.5) -> float:
    """What the tiny chapter computes."""
    return math.sin(offset * rate + seed)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory, make_tiny_book: Callable[[Path], Path]) -> Book:
    """Return a book of two chapters that refer to each other, with four finished runs and a failed one."""
    root = make_tiny_book(tmp_path_factory.mktemp("collect") / "tiny bøok")
    tiny = nbformat.read(root / "book/tiny.ipynb", as_version=4)
    tiny.cells[0].source = WAVES.format(other="{prf:ref}`thm-other` of [the other](other.ipynb)")
    tiny.cells[3].source += "assert seed != 13, 'an unlucky seed'\n"
    nbformat.write(tiny, root / "book/tiny.ipynb")
    tiny.cells[0].source = WAVES.replace("tiny", "other").replace("waves", "others").format(other="{prf:ref}`thm-tiny`")
    tiny.cells[0].source = tiny.cells[0].source.replace("fig-white", "fig-black")
    tiny.cells[1].source = tiny.cells[1].source.replace("rate: float = 0.5", "rate: float = 1.5")
    tiny.cells[4].metadata.mystnb.figure.name = "fig-black"
    nbformat.write(tiny, root / "book/other.ipynb")
    for name, text in {
        "_toc.yml": "format: jb-book\nroot: book/intro\nparts:\n  - caption: All\n    chapters:\n"
        "      - file: book/tiny\n      - file: book/other\n      - file: book/bibliography\n",
        "_config.yml": (root / "_config.yml").read_text(encoding="utf-8")
        + "bibtex_bibfiles: [book/references.bib]\nlaunch_buttons: {binderhub_url: https://mybinder.org}\n"
        "html: {use_edit_page_button: true}\nrepository: {url: https://example.org/book}\n"
        "sphinx: {extra_extensions: [sphinx_proof, sphinx_exercise], config: {bibtex_reference_style: author_year}}\n",
        "book/references.bib": "@book{Fourier, author={J. Fourier}, title={Heat}, year={1822}, publisher={Didot}}\n",
        "book/bibliography.md": "# Bibliography\n\n```{bibliography}\n```\n",
    }.items():
        (root / name).write_text(text, encoding="utf-8")
    found = Book.find(root)
    found.sweep("tiny", jobs=2, offset=[3, 5], seed=range(2))
    with pytest.raises(RunError, match=r"1 of 1 runs failed; tiny/.*: cell In .* AssertionError: an unlucky seed"):
        found.run("tiny", seed=13)
    return found


def test_the_table_is_tidy(book: Book) -> None:
    frame = book.collect("tiny")
    assert list(frame.columns) == [
        *("chapter", "run", "seconds", "offset", "train_length", "rate", "lengths", "optimiser", "fast", "seed"),
        *("strict_claims", "name", "value"),
    ]
    assert len(frame) == 4 * 3
    rows = frame[frame.name == "value"]
    assert {(r.offset, r.seed): r.value for r in rows.itertuples()} == {
        (offset, seed): value(offset, seed) for offset in (3, 5) for seed in (0, 1)
    }
    assert set(frame.lengths) == {"[16, 32]"}
    wide = book.collect(wide=True)
    assert len(wide) == 4
    assert list(wide.columns[-3:]) == ["value", "longest", "threads"]
    pd.testing.assert_frame_equal(
        book.run("tiny", offset=3), frame[(frame.offset == 3) & (frame.seed == 0)], check_like=True
    )


def test_list_names_the_runs_and_old_ones_are_remarked(
    tmp_path: Path, make_tiny_book: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_tiny_book(tmp_path / "old")
    assert main(["list", "tiny", "--root", str(root)]) == 0
    assert capsys.readouterr() == ("\n", "tiny has no runs yet: length-book run tiny\n")
    assert main(["run", "tiny", "-p", "seed=1", "-q", "--root", str(root)]) == 0
    assert main(["list", "tiny", "--root", str(root)]) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["run", "status", "seconds", "parameters"]
    assert re.fullmatch(r"tiny/\w{12}  finished  [\d.]+ +seed=1", row)
    (root / "requirements.lock").write_text("torch==3\n")
    assert main(["list", "all", "--json", "--root", str(root)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["status"] == "lock file changed since"
    assert main(["collect", "--root", str(root)]) == 0
    assert capsys.readouterr().err == "tiny: old runs: 1 (lock file changed since; run or sweep makes them again)\n"


def test_a_notebook_gets_the_table_of_its_sweep(book: Book) -> None:
    before = set(book.runs.rglob("*"))
    frame = book.sweep("tiny", offset=[3, 5], seed=range(2))
    pd.testing.assert_frame_equal(
        frame.sort_values(["offset", "seed", "name"], ignore_index=True),
        book.collect("tiny").sort_values(["offset", "seed", "name"], ignore_index=True),
    )
    assert set(book.runs.rglob("*")) == before
    for wrong in ({"ofset": 3}, {"offset": 30}, {"offset": "x"}, {"lengths": 3}, {"offset": []}):
        with pytest.raises(RequestError):
            book.sweep("tiny", **wrong)


def test_a_sweep_runs_inside_a_notebook(book: Book, tmp_path: Path) -> None:
    cells = [
        "from pathlib import Path\nfrom helpers.rerun.book import Book",
        f"book = Book.find(Path({str(book.root)!r}), Path({str(tmp_path / 'runs')!r}))",
        "print(len(book.run('tiny', seed=3)), len(book.sweep('tiny', seed=[3, 4], jobs=2)))",
    ]
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    (printed,) = notebook.cells[-1].outputs
    assert printed.text == "3 6\n"


def test_csv_and_parquet_hold_the_same(book: Book, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = ["--root", str(book.root)]
    for name in ("tidy ü.csv", "tidy.parquet"):
        assert main(["collect", "tiny", *root, "--out", str(tmp_path / name)]) == 0
        out, err = capsys.readouterr()
        assert out == f"{tmp_path / name}\n"
        assert re.fullmatch(r"tiny/\w+ failed and is left out: cell In .* an unlucky seed\n", err)
    csv, parquet = pd.read_csv(tmp_path / "tidy ü.csv"), pd.read_parquet(tmp_path / "tidy.parquet")
    pd.testing.assert_frame_equal(csv, parquet, check_dtype=False)
    assert main(["collect", *root]) == 0
    assert capsys.readouterr().out == (tmp_path / "tidy ü.csv").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tidy ü.csv", "tidy.parquet"]


def test_runs_are_named_in_many_ways(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(*selectors: str) -> list[str]:
        return [run.id for run in collect.finished(book, selectors)[0]]

    ids = chosen("all")
    assert len(ids) == 4
    assert chosen("tiny") == ids
    assert chosen(f"tiny/{ids[1][:6]}", f"tiny/{ids[0]}", f"tiny/{ids[1]}") == ids[:2]
    manifests = [run.manifest["parameters"] for run in collect.finished(book, ["tiny"])[0]]
    assert [(p["offset"], p["seed"]) for p in manifests] == [(3, 0), (3, 1), (5, 0), (5, 1)]
    monkeypatch.chdir(book.runs)
    assert chosen("tiny", ".") == ids
    assert chosen(f"tiny/{ids[2]}/") == [ids[2]]
    assert chosen(str(book.runs / "tiny")) == ids


def test_chapters_with_different_parameters_share_a_table(tmp_path: Path) -> None:
    kept = []
    for chapter, parameters in [("a", {"n": 3, "x": 1}), ("b", {"n": "many", "y": [1.5]}), ("c", {"x": 0.5})]:
        (tmp_path / chapter).mkdir()
        (tmp_path / chapter / "records.json").write_text('{"r": 1, "s": "nan"}')
        kept.append(
            collect.KeptRun(
                tmp_path / chapter, {"chapter": chapter, "run": "0", "seconds": 1.0, "parameters": parameters}
            )
        )
    frame = collect.table(kept)
    assert frame.n.fillna("-").tolist() == ["3", "3", "many", "many", "-", "-"]
    assert frame.x.fillna(-1).tolist() == [1, 1, -1, -1, 0.5, 0.5]
    assert frame.value.isna().tolist() == [False, True] * 3
    for name in ("t.csv", "t.parquet"):
        collect.write(frame, tmp_path / name)
    kept[0].manifest["parameters"]["value"] = 1
    with pytest.raises(RunError, match="called like columns of the table: value"):
        collect.table(kept)


def spoil(book: Book, name: str, text: str | None) -> Path:
    """Copy one run and break a file of the copy."""
    source = finished_folders(book)[0]
    folder = book.root.parent / "spoilt"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    (folder / name).unlink() if text is None else (folder / name).write_text(text)
    return folder


BAD = {
    "no such run": (["collect", "tiny/fff"], 2, "there is no run tiny/fff: length-book list tiny lists"),
    "no such chapter": (["collect", "tinny"], 2, "did you mean tiny?"),
    "ambiguous": (["diff", "tiny/"], 2, "unknown run or chapter 'tiny/'"),
    "no runs": (["collect", "other"], 2, "other has no runs yet: length-book run other"),
    "an empty folder": (["collect", "."], 2, "no runs in ."),
    "odd ending": (["collect", "tiny", "--out", "table.xls"], 2, "must end in .csv or .parquet"),
    "no such folder": (["collect", "tiny", "--out", "no/table.csv"], 1, "cannot write no/table.csv"),
    "diff of many": (["diff", "tiny"], 2, "tiny has 4 runs and diff takes one"),
    "negative tolerance": (["diff", "tiny", "--rtol", "-1"], 2, "Invalid value for '--rtol'"),
    "never executed": (["diff", "RUN"], 1, "has recorded no numbers: length-book execute tiny"),
    "book in use": (["render", "RUN", "--out", ".."], 2, "exists and is no book of reruns"),
    "book over a file": (["render", "RUN", "--out", "file"], 2, "exists and is no book of reruns"),
    "broken manifest": (["collect", "SPOILT manifest.json"], 1, "manifest.json is broken (JSONDecodeError): delete"),
    "broken records": (["collect", "SPOILT records.json"], 1, "records.json is broken (JSONDecodeError): delete"),
    "unknown to execute": (["execute", "tinny"], 2, "unknown chapter 'tinny'; did you mean tiny?"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_one_line(
    book: Book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    arguments, status, message = BAD[case]
    (tmp_path / "here").mkdir()
    (tmp_path / "here/file").touch()
    monkeypatch.chdir(tmp_path / "here")
    arguments = [str(spoil(book, word.split()[1], "{")) if word.startswith("SPOILT") else word for word in arguments]
    arguments = [str(finished_folders(book)[0]) if word == "RUN" else word for word in arguments]
    assert main([*arguments, "--root", str(book.root)]) == status
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if "unlucky" not in line and "building" not in line]
    assert line.startswith("error: ")
    assert message in line
    assert out == ""
    assert sorted(path.name for path in Path().iterdir()) == ["file"]


def test_diff_compares_with_the_committed_chapter(
    book: Book, tmp_path: Path, capsys: pytest.CaptureFixture[str], make_tiny_book: Callable[[Path], Path]
) -> None:
    root = make_tiny_book(tmp_path / "executed")
    assert main(["execute", "--check", "--root", str(root)]) == 1
    assert main(["execute", "tiny", "--root", str(root)]) == 0
    assert main(["execute", "--check", "--root", str(root)]) == 0
    here = Book.find(root)
    here.sweep("tiny", seed=[0, 1])
    same, other = sorted(
        here.run_folders("tiny"),
        key=lambda folder: json.loads((folder / "manifest.json").read_text())["parameters"]["seed"],
    )
    capsys.readouterr()
    command = ["--root", str(root), "--exit-code", "--out"]
    page = tmp_path / "diff ü.html"
    assert main(["diff", str(same), *command, str(page)]) == 0
    assert "3 of 3 numbers are within 0.01 + 0.05 × |committed|" in capsys.readouterr().out
    assert main(["diff", str(other), *command, str(page)]) == 1
    assert "2 of 3 numbers" in capsys.readouterr().out
    assert main(["diff", str(other), *command, str(page), "--json", "--rtol", "2"]) == 0
    numbers = {row["name"]: row for row in json.loads(capsys.readouterr().out)["numbers"]}
    expected = {"committed": value(5, 0), "run": value(5, 1), "difference": value(5, 1) - value(5, 0)}
    assert numbers["value"] == {"name": "value", "within": True, **expected}
    soup = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")
    assert "seed=1" in soup.body.p.text
    assert [heading.text for heading in soup.find_all("h3")] == ["fig-white"]
    assert [image["alt"] for image in soup.find_all("img")] == ["White.", "White."]
    assert not soup.find_all(["script", "link"])


def test_numbers_that_only_one_side_has_are_not_within(tmp_path: Path) -> None:
    (tmp_path / "records.json").write_text('{"a": 1.035, "b": "nan", "c": 2, "z": "inf"}')
    run = collect.KeptRun(tmp_path, {"chapter": "tiny", "run": "0"})
    cells = []
    for name, number in {"a": 1.0, "b": 1.0, "d": 1.0, "z": math.inf}.items():
        data = {"application/papermill.record/text/plain": repr(number)}
        output = nbformat.v4.new_output("display_data", data=data, metadata={"scrapbook": {"name": name}})
        cells.append(nbformat.v4.new_code_cell("1", outputs=[output]))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "tiny.ipynb")
    frame = diff.compare(run, tmp_path / "tiny.ipynb", rtol=0.05, atol=0)
    assert dict(zip(frame.name, frame.within, strict=True)) == {
        "a": True,
        "b": False,
        "d": False,
        "z": True,
        "c": False,
    }
    frame = diff.compare(run, tmp_path / "tiny.ipynb", rtol=0.03, atol=0.01)
    assert frame.within[0]
    assert not diff.compare(run, tmp_path / "tiny.ipynb", rtol=0.03, atol=0)["within"][0]


def pages_of(site: Path) -> dict[str, BeautifulSoup]:
    """Return the pages of a site by their path; every link inside it leads somewhere."""
    pages = {
        path.relative_to(site).as_posix(): BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
        for path in site.rglob("*.html")
        if "_static" not in path.parts
    }
    for name, soup in pages.items():
        for link in soup.select("article a[href]"):
            path, _, anchor = link["href"].partition("#")
            if "://" in path or (link.has_attr("class") and "headerlink" in link["class"]):
                continue
            target = (site / name).parent.joinpath(path).resolve() if path else site / name
            assert target.is_file(), f"{name}: {link['href']}"
            found = pages.get(target.relative_to(site).as_posix())
            if anchor and found:
                assert found.find(id=anchor), f"{name}: {link['href']}"
    return pages


def test_some_runs_make_a_small_book(book: Book, tmp_path: Path) -> None:
    runs, _ = collect.finished(book, ["tiny"])
    out = tmp_path / "reruns ü"
    assert render.render(book, runs, out, strict=True) == out / "index.html"
    pages = pages_of(out)
    names = {"tiny": 0} | {f"tiny-{run.id}": index for index, run in enumerate(runs) if index}
    assert {f"book/{name}.html" for name in [*names, "reruns", "bibliography"]} <= set(pages)
    assert "book/intro.html" not in pages
    for name, index in names.items():
        parameters = runs[index].manifest["parameters"]
        article = pages[f"book/{name}.html"].article
        box = article.select_one(".admonition.important")
        cells = [[cell.text for cell in row.find_all("td")] for row in box.select("tbody tr")]
        changed = [
            [n, str(parameters[n]), default]
            for n, default in (("offset", "5"), ("seed", "0"))
            if str(parameters[n]) != default
        ]
        assert cells == changed
        assert article.h1.text.startswith(f"Tiny waves: offset={parameters['offset']}, seed={parameters['seed']}")
        assert "T1, for ever (in “Tiny others”) of the other" in article.text  # there is no page to link to
        assert len(article.select("div.theorem")) == len(article.select("figure img")) == 1
    assert len(pages["book/reruns.html"].article.select("tbody tr")) == 4
    assert [path.name for path in tmp_path.iterdir()] == ["reruns ü"]


def test_runs_of_every_chapter_make_a_whole_book(
    book: Book, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "all", "-p", "rate=2", "--root", str(book.root), "--runs", str(tmp_path / "runs")]) == 0
    folders = capsys.readouterr().out.split("\n")[:-1]
    assert len(folders) == 2
    assert main(["render", *folders, "--root", str(book.root), "--out", str(tmp_path / "site")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'site' / 'index.html'}\n"
    pages = pages_of(tmp_path / "site")
    sidebar = [link["href"] for link in pages["book/intro.html"].select("nav.bd-links a")]
    assert sidebar == ["#", "reruns.html", "tiny.html", "other.html", "bibliography.html"]
    tiny = pages["book/tiny.html"]
    (box,) = tiny.select(".admonition.important")
    assert "rate 2.0 0.5" in " ".join(box.text.split())
    (link,) = [link for link in tiny.select("article a") if link.text == "the other"]
    assert link["href"] == "other.html"
    assert tiny.find("a", href=re.compile("other.html#thm-other"))
    assert not tiny.find("a", href=re.compile("example.org|mybinder"))


def test_a_book_replaces_an_earlier_one_when_it_is_complete(
    book: Book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(source: Path, folder: Path, strict: bool) -> Path:
        site = folder / "html"
        site.mkdir()
        for path in [*source.rglob("*.ipynb"), source / "index.html"]:
            (site / path.name).touch()
        return site

    runs, _ = collect.finished(book, ["tiny"])
    site, real = tmp_path / "site", render._build
    monkeypatch.setattr(render, "_build", build)
    render.render(book, runs, site)
    assert (site / f"tiny-{runs[1].id}.ipynb").exists()
    render.render(book, runs[:1], site)
    first = sorted(path.name for path in site.iterdir())
    assert first == [".length-book", "index.html", "tiny.ipynb"]

    monkeypatch.setattr(render, "_build", real)
    broken = tmp_path / "broken"
    shutil.copytree(book.root, broken)
    config = yaml.safe_load((broken / "_config.yml").read_text(encoding="utf-8"))
    config["sphinx"]["extra_extensions"] = ["no_such_extension"]
    (broken / "_config.yml").write_text(yaml.safe_dump(config))
    with pytest.raises(RunError, match=r"could not build the reruns: .*no_such_extension"):
        render.render(Book.find(broken), runs, site)
    assert sorted(path.name for path in site.iterdir()) == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "site"]
