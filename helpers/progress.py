"""Progress on a terminal, silence everywhere else."""

import sys
from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress(items: Iterable[T], label: str, total: int | None = None) -> Iterable[T]:
    """Iterate over ``items`` with a bar on standard error if that is a terminal; notebooks and logs see nothing."""
    return tqdm(items, desc=label, total=total, leave=False, disable=not sys.stderr.isatty())
