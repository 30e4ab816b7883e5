"""A wrong value is one line that names the field, the value and what is allowed."""

import numpy as np
import pytest

from helpers.validation import require, require_choice, require_integer


def test_require_names_field_value_and_what_is_allowed() -> None:
    require(True, "steps", 3, "anything")
    with pytest.raises(ValueError, match=r"^steps=-1 is not allowed: steps must be an integer ≥ 0$"):
        require(False, "steps", -1, "an integer ≥ 0")


def test_require_choice_lists_the_choices_and_hints_at_the_closest() -> None:
    require_choice("optimiser", "adam", ("adam", "sgd"))
    with pytest.raises(ValueError, match=r"^optimiser='adm' .* one of adam, sgd \(did you mean 'adam'\?\)$"):
        require_choice("optimiser", "adm", ("adam", "sgd"))


def test_require_choice_gives_no_hint_when_nothing_is_close() -> None:
    with pytest.raises(ValueError, match=r"one of adam, sgd$"):
        require_choice("optimiser", "quasi-newton", iter(("adam", "sgd")))


@pytest.mark.parametrize("value", [0, 7, np.int64(7), np.uint8(7)])
def test_integers_are_accepted(value: object) -> None:
    require_integer("seed", value, 0)


@pytest.mark.parametrize("value", [-1, 1.0, np.float64(3), True, "3", None, float("nan")])
def test_anything_else_is_refused_by_name(value: object) -> None:
    with pytest.raises(ValueError, match=r"^seed=.* is not allowed: seed must be an integer ≥ 0$"):
        require_integer("seed", value, 0)
