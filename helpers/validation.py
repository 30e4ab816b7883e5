"""One way to say that a setting is wrong."""

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral


def require(ok: bool, field: str, value: object, allowed: str) -> None:
    """Raise ``ValueError`` naming the field, the value and what is allowed, unless ``ok``."""
    if not ok:
        raise ValueError(f"{field}={value!r} is not allowed: {field} must be {allowed}")


def require_integer(field: str, value: object, least: int) -> None:
    """Raise ``ValueError`` unless ``value`` is an integer ≥ ``least`` (numpy's count; ``True`` and ``2.0`` do not)."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    require(whole and value >= least, field, value, f"an integer ≥ {least}")


def require_choice(field: str, value: str, choices: Iterable[str]) -> None:
    """Raise ``ValueError`` listing ``choices`` (and the closest one) unless ``value`` is among them."""
    choices = list(choices)
    close = get_close_matches(str(value), choices, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    require(value in choices, field, value, "one of " + ", ".join(choices) + hint)
