"""What counts as a parameter, and which values it takes; the guard's self-test has the refused cells."""

import pytest

from helpers.rerun.parameters import Parameter, parse


def test_a_cell_declares_name_type_default_and_help() -> None:
    source = "# the task\noffset: int = -5  # steps, # counted back\nrates: list[float] = [1, 0.5]  # per step\n"
    assert parse(source) == [
        Parameter("offset", "int", -5, "steps, # counted back"),
        Parameter("rates", "list[float]", [1, 0.5], "per step"),
    ]


@pytest.mark.parametrize(
    ("kind", "accepted", "refused"),
    [
        ("int", [1, -3], [1.0, True, "1", [1]]),
        ("float", [1, 0.5], [True, "1"]),
        ("str", ["a"], [1, ["a"]]),
        ("bool", [True], [1, "True"]),
        ("list[int]", [[], [1, 2]], [1, [1.5], [True], ["1"]]),
        ("list[str]", [["a"]], ["a", [1]]),
    ],
)
def test_a_parameter_accepts_values_of_its_type(kind: str, accepted: list[object], refused: list[object]) -> None:
    parameter = Parameter("x", kind, None, "")
    assert all(map(parameter.accepts, accepted))
    assert not any(map(parameter.accepts, refused))
