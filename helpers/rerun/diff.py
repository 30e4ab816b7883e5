"""A run against the committed chapter: the numbers in a table, the figures side by side on a page."""

import html
import math
from pathlib import Path

import nbformat
import pandas as pd

from helpers.records import read_records
from helpers.rerun.collect import KeptRun
from helpers.rerun.errors import RunError
from helpers.rerun.runs import read_numbers

RTOL, ATOL = 0.05, 0.01  # training in float32 differs by some per cent between processors
STYLE = """
:root { color-scheme: light dark; font-family: system-ui, sans-serif; }
body { max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } th, td { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #8886; }
th:first-child, td:first-child { text-align: left; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; } .pair img { width: 100%; background: white; }
@media (max-width: 50rem) { .pair { grid-template-columns: 1fr; } }
"""


def compare(run: KeptRun, chapter: Path, rtol: float = RTOL, atol: float = ATOL) -> pd.DataFrame:
    """Return a row for every number that the run or the committed chapter recorded.

    ``within`` says whether |run − committed| ≤ atol + rtol · |committed|; a number that only one of them has is not.
    """
    ours, theirs = read_numbers(run.folder), read_records(chapter)
    if not theirs:
        raise RunError(f"the committed {chapter.name} has recorded no numbers: length-book execute {chapter.stem}")
    rows = []
    for name in dict.fromkeys([*theirs, *ours]):
        committed, here = theirs.get(name, math.nan), ours.get(name, math.nan)
        same = committed == here or abs(here - committed) <= atol + rtol * abs(committed)
        rows.append({"name": name, "committed": committed, "run": here, "difference": here - committed, "within": same})
    return pd.DataFrame(rows)


def page(run: KeptRun, chapter: Path, numbers: pd.DataFrame, changed: str, rtol: float, atol: float) -> str:
    """Return an HTML page, complete in one file, with the numbers and every figure of both notebooks."""
    committed, here = (figures(nbformat.read(path, as_version=4)) for path in (chapter, run.notebook))
    pairs = []
    for name in dict.fromkeys([*committed, *here]):
        caption = (committed.get(name) or here[name])[0]
        columns = "".join(
            f"<figure><figcaption>{label}</figcaption>{_image(found.get(name), caption)}</figure>"
            for label, found in (("committed", committed), (f"run {run.id}", here))
        )
        pairs.append(f"<h3>{html.escape(name)}</h3><p>{html.escape(caption)}</p><div class='pair'>{columns}</div>")
    title = html.escape(f"{run.chapter}: run {run.id} against the committed chapter")
    counts = f"{int(numbers['within'].sum())} of {len(numbers)} numbers agree within {atol:g} + {rtol:g} · |committed|."
    return (
        f"<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'><style>{STYLE}</style></head><body>"
        f"<h1>{title}</h1><p>{html.escape(changed)}</p><h2>Numbers</h2><p>{counts}</p>"
        f"{numbers.to_html(index=False, border=0, float_format='%.6g')}"
        f"<h2>Figures</h2>{''.join(pairs) or '<p>Neither has figures.</p>'}</body></html>\n"
    )


def figures(notebook: nbformat.NotebookNode) -> dict[str, tuple[str, str]]:
    """Return caption and base64 PNG of every figure by name; a figure without a name is called by its number."""
    found: dict[str, tuple[str, str]] = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if png := output.get("data", {}).get("image/png"):
                about = cell.metadata.get("mystnb", {}).get("figure", {})
                name = about.get("name") or f"figure {len(found) + 1}"
                found[name if name not in found else f"{name} {len(found) + 1}"] = (about.get("caption", ""), png)
    return found


def _image(figure: tuple[str, str] | None, caption: str) -> str:
    if figure is None:
        return "<p>not there</p>"
    return f"<img alt='{html.escape(caption, quote=True)}' src='data:image/png;base64,{''.join(figure[1].split())}'>"
