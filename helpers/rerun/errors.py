"""What can go wrong with a request or a run; every message is one line that says what to do."""

import difflib
from collections.abc import Iterable

REST = "finished runs are kept, the same command does the rest"


class RequestError(Exception):
    """The request names something that does not exist or is not allowed: exit status 2."""


class RunError(Exception):
    """The request was right, and carrying it out failed: exit status 1."""


def require_known(kind: str, name: str, known: Iterable[str], plural: str = "") -> None:
    """Raise RequestError, with the close names or else all of them, unless ``name`` is among ``known``."""
    known = list(known)
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(close)}?" if close else f"{plural or kind + 's'}: {', '.join(known) or 'none yet'}"
    )
    raise RequestError(f"unknown {kind} {name!r}; {hint}")


def first_line(text: str) -> str:
    """The first line of a message, for errors that come from elsewhere."""
    return (text.strip().splitlines() or [""])[0]
