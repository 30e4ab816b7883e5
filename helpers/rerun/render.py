"""A book of reruns: every run a page with its parameters, built like the book itself.

Runs of every chapter make a whole book, reader pages included, in the book's order. Otherwise the runs stand alone with
the pages that they lean on, and what they refer to in missing chapters becomes plain text.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import nbformat
import yaml

from helpers.rerun.book import Book, written
from helpers.rerun.collect import KeptRun
from helpers.rerun.errors import RequestError, RunError

MARKER = ".length-book"  # in every folder that we made, so that no other is ever replaced
INDEX = "reruns"
NEEDED = ("notation", "bibliography")  # the targets of {term} and {cite}
LABELS = re.compile(
    r"^:(?:label|name):\s*(\S+)\s*$|^\((?P<target>[\w-]+)\)=\s*$|\$\$\s*\((?P<equation>[\w-]+)\)", re.MULTILINE
)
DIRECTIVE = re.compile(
    r"^`{3,}\{[\w:]+\}[ \t]*(?P<title>[^\n]*)\n(?::[^\n]*\n)*?:label:\s*(?P<label>\S+)", re.MULTILINE
)
ROLE = re.compile(r"\{(?:prf:ref|ref|numref|eq|doc)\}`(?:(?P<text>[^`<]+?)\s*<)?(?P<target>[^`<>]+)>?`")
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<page>[\w-]+)\.(?:ipynb|md)(?:#[^)]*)?\)")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
LONGEST_TITLE = 60


def render(book: Book, runs: Sequence[KeptRun], out: Path, strict: bool = False) -> Path:
    """Build the book of ``runs`` in the folder ``out`` and return its first page.

    The folder appears when the book is complete, in place of one that an earlier call made. ``strict`` turns warnings
    into failures. Raises RequestError when ``out`` is in use for something else, RunError when the build fails.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MARKER).is_file())):
        raise RequestError(f"{out} exists and is no book of reruns: choose another --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as folder:
            source = Path(folder) / "source"
            write_source(book, runs, source)
            site = _build(source, Path(folder), strict)
            (site / MARKER).touch()
            if out.exists():
                shutil.rmtree(out)
            site.rename(out)
    except OSError as error:
        raise RunError(f"cannot make a book in {out}: {error.filename}: {error.strerror or error}") from None
    return out / "index.html"


def write_source(book: Book, runs: Sequence[KeptRun], source: Path) -> None:
    """Write what jupyter-book builds: configuration, table of contents, reader pages and a notebook for every run."""
    whole = {run.chapter for run in runs} == set(book.chapters)
    shutil.copytree(book.root / "book", source / "book", ignore=shutil.ignore_patterns("*.ipynb", ".*", "assignments"))
    pages = {path.stem for path in (source / "book").glob("*.md") if whole or path.stem in NEEDED}
    names = _page_names(runs)
    toc = yaml.safe_load((book.root / "_toc.yml").read_text(encoding="utf-8"))
    (source / "_toc.yml").write_text(yaml.safe_dump(_contents(toc, runs, names, pages, whole)), encoding="utf-8")
    config = yaml.safe_load((book.root / "_config.yml").read_text(encoding="utf-8"))
    (source / "_config.yml").write_text(yaml.safe_dump(_configuration(config)), encoding="utf-8")

    notebooks = {run.folder: nbformat.read(run.notebook, as_version=4) for run in runs}
    texts = [(source / "book" / f"{page}.md").read_text(encoding="utf-8") for page in sorted(pages)]
    texts += [cell.source for notebook in notebooks.values() for cell in notebook.cells]
    there = {label for text in texts for label in _labels(text)} | set(_figure_names(notebooks.values()))
    titles = _titles(book)
    varied = _varied(runs)
    linked = {*pages, *names.values(), INDEX}
    first = {run.chapter: names[run.folder] for run in reversed(runs)}  # a link to a chapter goes to its first run
    for page in pages:
        path = source / "book" / f"{page}.md"
        path.write_text(_unlink(path.read_text(encoding="utf-8"), there, titles, linked, first), encoding="utf-8")
    for run in runs:
        notebook = notebooks[run.folder]
        name = names[run.folder]
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = _unlink(cell.source, there, titles, linked, first)
        if name != first[run.chapter]:
            _relabel(notebook, f"-{run.id}")
        _introduce(notebook, book, run, varied[run.chapter])
        nbformat.write(notebook, source / "book" / f"{name}.ipynb")
    (source / "book" / f"{INDEX}.md").write_text(_index(book, runs, names, config.get("title", "")), encoding="utf-8")


def _build(source: Path, folder: Path, strict: bool) -> Path:
    program = Path(sys.executable).with_name("jupyter-book")
    options = ["--all", "-q", *(["-W", "--keep-going"] if strict else []), "--path-output", folder, source]
    plain = {**os.environ, "NO_COLOR": "1"}
    result = subprocess.run([program, "build", *options], capture_output=True, text=True, check=False, env=plain)
    site = folder / "_build" / "html"
    if result.returncode or not (site / "index.html").is_file():
        said = ANSI.sub("", result.stderr or result.stdout)
        found = re.search(r"^.*(?:error|warning):?\s+.*$", said, re.IGNORECASE | re.MULTILINE)
        reason = " ".join(found[0].split()) if found else f"exit status {result.returncode}"
        raise RunError(f"jupyter-book could not build the reruns: {reason}")
    return site


def _page_names(runs: Iterable[KeptRun]) -> dict[Path, str]:
    """Return a page name for every run: the chapter's, and for further runs of a chapter also the hash."""
    counts: Counter[str] = Counter()
    names = {}
    for run in runs:
        names[run.folder] = f"{run.chapter}-{run.id}" if counts[run.chapter] else run.chapter
        counts[run.chapter] += 1
    return names


def _contents(toc: dict, runs: Sequence[KeptRun], names: dict[Path, str], pages: set[str], whole: bool) -> dict:
    entries = {chapter: [] for chapter in dict.fromkeys(run.chapter for run in runs)}
    for run in runs:
        entries[run.chapter].append({"file": f"book/{names[run.folder]}"})
    index = {"file": f"book/{INDEX}"}
    if not whole:
        parts = [{"caption": "Reruns", "chapters": [entry for found in entries.values() for entry in found]}]
        needed = [{"file": f"book/{page}"} for page in NEEDED if page in pages]
        parts += [{"caption": "Reference", "chapters": needed}] if needed else []
        return {"format": "jb-book", "root": index["file"], "parts": parts}

    def replaced(node: object) -> object:
        if isinstance(node, list):
            found = []
            for item in node:
                name = Path(item["file"]).with_suffix("").name if isinstance(item, dict) and "file" in item else None
                found += entries.get(name, [replaced(item)])
            return found
        return {key: replaced(value) for key, value in node.items()} if isinstance(node, dict) else node

    contents = replaced(toc)
    front = {"caption": "Reruns", "chapters": [index]}
    if "parts" in contents:
        contents["parts"].insert(0, front)
    else:
        contents["chapters"].insert(0, index)
    return contents


def _configuration(config: dict) -> dict:
    """Return the book's configuration without the buttons that lead to the committed chapters."""
    html = config.get("html", {})
    buttons = ("use_repository_button", "use_issues_button", "use_edit_page_button")
    kept = {key: value for key, value in config.items() if key not in ("launch_buttons", "repository")}
    return kept | {
        "title": f"Reruns: {config.get('title', 'the book')}",
        "only_build_toc_files": True,
        "execute": {**config.get("execute", {}), "execute_notebooks": "off"},
        "html": {key: value for key, value in html.items() if key not in buttons},
    }


def _labels(text: str) -> list[str]:
    return [next(group for group in match.groups() if group) for match in LABELS.finditer(text)]


def _figure_names(notebooks: Iterable[nbformat.NotebookNode]) -> list[str]:
    figures = [cell.metadata.get("mystnb", {}).get("figure", {}) for notebook in notebooks for cell in notebook.cells]
    return [figure["name"] for figure in figures if "name" in figure]


def _titles(book: Book) -> dict[str, str]:
    """Return what to call every label and page of the committed chapters in plain text."""
    titles = {}
    for chapter in book.chapters:
        title = book.title(chapter)
        titles[chapter] = title
        cells = book.notebook(chapter).cells
        for cell in cells:
            titles |= dict.fromkeys(_labels(cell.source), f"the chapter “{title}”")
            named = {match["label"]: match["title"] for match in DIRECTIVE.finditer(cell.source) if match["title"]}
            titles |= {label: f"{name} (in “{title}”)" for label, name in named.items()}
        titles |= dict.fromkeys(_figure_names([book.notebook(chapter)]), f"a figure of “{title}”")
    return titles


def _unlink(text: str, there: set[str], titles: dict[str, str], linked: set[str], first: dict[str, str]) -> str:
    """Turn references to what is not in this book into text, and links to a chapter into links to its first run."""

    def role(match: re.Match) -> str:
        target = match["target"].strip()
        return match[0] if target in there | linked else (match["text"] or titles.get(target, target))

    def link(match: re.Match) -> str:
        page = first.get(match["page"], match["page"])
        return match[0] if page in linked else (match["text"] or titles.get(page, page))

    return LINK.sub(link, ROLE.sub(role, text))


def _relabel(notebook: nbformat.NotebookNode, suffix: str) -> None:
    """Give every label of a page a suffix, where it is defined and where the page refers to it: labels are unique."""
    labels = {label for cell in notebook.cells if cell.cell_type == "markdown" for label in _labels(cell.source)}
    labels |= set(_figure_names([notebook]))
    if not labels:
        return
    pattern = re.compile(rf"(?<![\w-])({'|'.join(sorted(map(re.escape, labels), key=len, reverse=True))})(?![\w-])")
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = pattern.sub(rf"\g<1>{suffix}", cell.source)
        figure = cell.metadata.get("mystnb", {}).get("figure", {})
        if "name" in figure:
            figure["name"] += suffix


def _varied(runs: Sequence[KeptRun]) -> dict[str, list[str]]:
    """Return for every chapter the parameters that its runs do not share."""
    values: dict[str, dict[str, set[str]]] = {run.chapter: {} for run in runs}
    for run in runs:
        for name, value in run.manifest["parameters"].items():
            values[run.chapter].setdefault(name, set()).add(written(value))
    return {chapter: [name for name, seen in found.items() if len(seen) > 1] for chapter, found in values.items()}


def _introduce(notebook: nbformat.NotebookNode, book: Book, run: KeptRun, varied: Sequence[str]) -> None:
    """Say below the title which parameters the page was computed with, and in it what tells it from its likes."""
    parameters = run.manifest["parameters"]
    changed = book.changed_parameters(run.chapter, parameters)
    title = ", ".join(f"{name}={written(parameters[name])}" for name in varied if name in parameters)
    title = title if len(title) <= LONGEST_TITLE else f"{title[: LONGEST_TITLE - 1]}…"
    rows = [
        f"| `{name}` | `{written(v)}` | {'' if d is None else f'`{written(d)}`'} |" for name, (v, d) in changed.items()
    ]
    git = run.manifest["git"]
    revision = (
        f"revision `{git['revision'][:12]}`{' with changes' if git['dirty'] else ''}, " if git["revision"] else ""
    )
    about = (
        f"Run `{run.chapter}/{run.id}`, {run.manifest['finished'][:10]}, {revision}{run.manifest['seconds']:.0f} s. "
        f"[All runs]({INDEX}.md)"
    )
    listed = (
        "\n".join(["| parameter | here | in the book |", "|---|---|---|", *rows]) if rows else "Default parameters."
    )
    box = f"```{{admonition}} A rerun\n:class: important\n\n{listed}\n\n{about}\n```"
    cell = next((cell for cell in notebook.cells if cell.cell_type == "markdown" and "# " in cell.source), None)
    if cell is None:
        notebook.cells.insert(0, nbformat.v4.new_markdown_cell(f"# {run.chapter}\n\n{box}"))
        return
    head, rest = re.match(r"(?s)(.*?^# [^\n]*)(.*)", cell.source, re.MULTILINE).groups()  # type: ignore[union-attr]
    cell.source = f"{head}{f': {title}' if title else ''}\n\n{box}\n{rest}"


def _index(book: Book, runs: Sequence[KeptRun], names: dict[Path, str], title: str) -> str:
    rows = [
        f"| [{book.title(run.chapter)}]({names[run.folder]}.ipynb) | `{run.id}` | "
        f"{book.changed_words(run.chapter, run.manifest['parameters'])} |"
        for run in runs
    ]
    head = f"# Reruns\n\nChapters of *{title}*, run again. Every page says which parameters it was computed with.\n\n"
    return head + "\n".join(["| chapter | run | changed parameters |", "|---|---|---|", *rows]) + "\n"
