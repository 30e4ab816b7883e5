"""What counts as a parameter, and which values it takes; the guard's self-test has the refused cells."""

import re

import numpy as np
import pytest

from helpers.rerun.errors import RequestError
from helpers.rerun.parameters import Parameter, broken, explain, parse


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


def test_a_comment_may_state_conditions_after_semicolons() -> None:
    source = (
        "offset: int = 5  # steps back; 0 < offset < train_length\n"
        "train_length: int = 16  # tokens\n"
        "head_dim: int = 32  # width; head_dim % 2 is 0; head_dim ≥ 2\n"
        "lengths: list[int] = [16, 32]  # tokens; len(set(lengths)) is len(lengths) and min(lengths) > offset\n"
        'names: list[str] = ["a"]  # encodings; set(names) ≤ {"a", "b"}\n'
    )
    parameters = parse(source)
    assert [p.summary for p in parameters] == ["steps back", "tokens", "width", "tokens", "encodings"]
    assert parameters[2].conditions == ["head_dim % 2 is 0", "head_dim ≥ 2"]
    values = {p.name: p.default for p in parameters}
    assert broken(parameters, values) == []
    for change, conditions in [
        ({"offset": 16}, ["0 < offset < train_length", parameters[3].conditions[0]]),
        ({"train_length": 5}, ["0 < offset < train_length"]),
        ({"head_dim": -1}, ["head_dim % 2 is 0", "head_dim ≥ 2"]),
        ({"lengths": [16, 16]}, parameters[3].conditions),
        ({"lengths": []}, parameters[3].conditions),  # min([]) raises: not allowed either
        ({"names": ["c"]}, parameters[4].conditions),
    ]:
        assert [condition for _, condition in broken(parameters, values | change)] == conditions
    assert explain("0 < offset < train_length", values) == "0 < offset < train_length (offset=5, train_length=16)"


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("at most 3", "not a condition"),
        ("later", "not a comparison"),
        ("offset", "not a comparison"),
        ("", "not a condition"),
        ("offset >= 2", "has an equals sign, which papermill does not understand"),
        ("offset < L", "names 'L', which is no parameter"),
        ("open('x') < 1", "may only compare"),
        ("offset.real < 9", "may only compare"),
        ("[n for n in (1, 2)] < []", "may only compare"),
        ("(lambda: 1)() < 2", "may only compare"),
        ("offset > 5", "the default of offset breaks its condition 'offset > 5'"),
    ],
)
def test_what_is_no_condition_is_refused(condition: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(f"offset: int = 5  # steps back; {condition}")


def test_a_parameter_declared_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="offset is declared twice"):
        parse("offset: int = 5  # steps\noffset: int = 6  # steps")


def test_coerce_gives_what_the_chapter_would_write() -> None:
    rates = Parameter("rates", "list[float]", [], "")
    assert rates.coerce((np.float32(0.5), 1)) == [0.5, 1.0]
    assert all(type(value) is float for value in rates.coerce(np.array([1, 2])))
    assert type(Parameter("n", "int", 1, "").coerce(np.int64(3))) is int
    for bad in ("12", {"a": 1}, 3, [float("nan")], [True]):
        with pytest.raises(RequestError, match="rates must be"):
            rates.coerce(bad)
