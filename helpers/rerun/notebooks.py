"""A notebook's cells and metadata as they stand in the file: what nbformat reads, without its two seconds of import."""

import json
from pathlib import Path
from types import SimpleNamespace

from helpers.rerun.errors import RequestError


def read_plain(path: Path) -> SimpleNamespace:
    """Return an object with ``metadata`` and ``cells`` (type, source, metadata). Raises RequestError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        cells = [
            SimpleNamespace(
                cell_type=cell["cell_type"], source="".join(cell["source"]), metadata=cell.get("metadata", {})
            )
            for cell in content["cells"]
        ]
        return SimpleNamespace(cells=cells, metadata=content["metadata"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{path} is not a readable notebook ({type(error).__name__}: {error})") from None
