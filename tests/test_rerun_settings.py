"""What a user writes becomes values, and values become a grid; what makes no sense is refused in one line."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.rerun.book import ALL, Book, written
from helpers.rerun.errors import RequestError
from helpers.rerun.parameters import Parameter
from helpers.rerun.settings import PRESETS, grid, load_preset, read_file, read_options, values_of


def parameter(kind: str, default: object = None, comment: str = "help") -> Parameter:
    return Parameter("x", kind, default, comment)


@pytest.mark.parametrize(
    ("kind", "text", "values"),
    [
        ("int", "5", [5]),
        ("int", "-3,+4", [-3, 4]),
        ("int", " 3 , 5 ", [3, 5]),
        ("int", "0:8", list(range(8))),
        ("int", "16:65:16", [16, 32, 48, 64]),
        ("int", "3:0:-1", [3, 2, 1]),
        ("int", "1,4:6,9", [1, 4, 5, 9]),
        ("float", "0.1,1e-3,2", [0.1, 0.001, 2.0]),
        ("bool", "true,False", [True, False]),
        ("str", "adam,sgd", ["adam", "sgd"]),
        ("str", "'a,b',c", ["a,b", "c"]),
        ("str", '"[a"', ["[a"]),
        ("str", "ünï cödé", ["ünï cödé"]),
        ("list[int]", "16,32", [[16, 32]]),
        ("list[int]", "16:65:16", [[16, 32, 48, 64]]),
        ("list[int]", "[16,32]", [[16, 32]]),
        ("list[int]", "[16,32],[64]", [[16, 32], [64]]),
        ("list[int]", "[]", [[]]),
        ("list[float]", "0.1,1", [[0.1, 1.0]]),
        ("list[str]", "rotary,none", [["rotary", "none"]]),
    ],
)
def test_text_of_the_command_line(kind: str, text: str, values: list) -> None:
    assert repr(values_of(parameter(kind), text)) == repr(values)  # repr tells 1 from 1.0 and True


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("int", "five", "x=five is not allowed: x must be a whole number"),
        ("int", "5.0", "a whole number"),
        ("int", "1e3", "a whole number"),
        ("int", "9" * 5000, "a whole number"),
        ("int", "true", "a whole number"),
        ("int", "", "x has no values"),
        ("int", "3,,5", "without empty places"),
        ("int", "3,", "without empty places"),
        ("int", "5:5", "a range with at least one number"),
        ("int", "0:9:0", "a step that is not 0"),
        ("int", "0:99999999999", "at most 10,000"),
        ("int", "3,5,3", "x is given 3 twice"),
        ("int", "0:3,2", "x is given 2 twice"),
        ("int", "[3,5]", "a whole number"),
        ("float", "half", "a number"),
        ("float", "nan", "finite"),
        ("float", "1e999", "finite"),
        ("float", "0:3", "ranges are for whole numbers"),
        ("float", "1,1.0", "x is given 1.0 twice"),
        ("bool", "yes", "true or false"),
        ("list[int]", "16,[32]", "either one list, or only lists"),
        ("list[int]", "[[16]]", "none inside others"),
        ("list[int]", "[16", "brackets and quotes that close"),
        ("list[int]", "16]", "brackets that close"),
        ("list[int]", "a,b", "a whole number"),
        ("list[int]", "[16],[16]", "x is given [16] twice"),
        ("str", "'a", "brackets and quotes that close"),
    ],
)
def test_text_that_is_refused(kind: str, text: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        values_of(parameter(kind), text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    st.one_of(
        st.integers(-(10**17), 10**17).map(lambda value: ("int", value)),
        st.floats(allow_nan=False, allow_infinity=False).map(lambda value: ("float", value)),
        st.booleans().map(lambda value: ("bool", value)),
        st.lists(st.integers(-99, 99)).map(lambda value: ("list[int]", value)),
        st.lists(st.floats(allow_nan=False, allow_infinity=False)).map(lambda value: ("list[float]", value)),
    )
)
def test_what_is_written_is_read_back(case: tuple[str, object]) -> None:
    kind, value = case
    assert values_of(parameter(kind), written(value)) == [value]


FILES = [
    ("int", "x: 3", {"x": 3}, [3]),
    ("int", "x: [3, 5]", {"x": [3, 5]}, [3, 5]),
    ("int", "x: 1:8", {"x": "1:8"}, list(range(1, 8))),  # YAML 1.1 would read 68
    ("float", "x: 1e-3", {"x": 1e-3}, [0.001]),  # ... and a string
    ("bool", "x: [true, false]", {"x": [True, False]}, [True, False]),
    ("str", "x: 'a,b'", {"x": "a,b"}, ["a,b"]),
    ("str", "x: [on, 3]", {"x": ["on", "3"]}, ["on", "3"]),
    ("list[int]", "x: [16, 32]", {"x": [16, 32]}, [[16, 32]]),
    ("list[int]", "x: [[16, 32], [64]]", {"x": [[16, 32], [64]]}, [[16, 32], [64]]),
    ("list[str]", "x: [a, b]", {"x": ["a", "b"]}, [["a", "b"]]),
]


@pytest.mark.parametrize(("kind", "text", "content", "values"), FILES)
def test_a_file_means_the_same_in_yaml_and_in_json(
    tmp_path: Path, kind: str, text: str, content: dict, values: list
) -> None:
    (tmp_path / "ä grid.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "grid.json").write_text(json.dumps(content, indent="\t"), encoding="utf-8")
    for name in ("ä grid.yaml", "grid.json"):
        assert repr(values_of(parameter(kind), read_file(tmp_path / name)["x"])) == repr(values)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("no.yaml", None, "No such file"),
        ("bad.yaml", "a: [1", "not valid YAML or JSON"),
        ("bad.json", "{'a': 1}", "not valid YAML or JSON"),
        ("list.yaml", "- 1\n- 2", "must hold a mapping"),
        ("empty.yaml", "", "must hold a mapping"),
        ("twice.yaml", "a: 1\na: 2", "a is given twice"),
        ("twice.json", '{"a": 1, "a": 2}', "a is given twice"),
        ("binary.yaml", b"\xff\xfe\x00", "cannot read"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, name: str, text: str | bytes | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RequestError) as caught:
        read_file(tmp_path / name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_options_are_pairs() -> None:
    assert read_options(["a=1", "b=c=d", " e = 2 "]) == {"a": "1", "b": "c=d", "e": "2"}
    for options, message in [
        (["a"], "not of the form"),
        (["=1"], "not of the form"),
        (["a=1", "a=2"], "a is given twice"),
    ]:
        with pytest.raises(RequestError, match=message):
            read_options(options)


def test_a_grid_is_every_combination_with_the_other_parameters() -> None:
    parameters = {
        "offset": Parameter("offset", "int", 5, "steps; 0 < offset < train_length"),
        "train_length": Parameter("train_length", "int", 16, "tokens"),
        "rate": Parameter("rate", "float", 1, "step"),
        "strict_claims": Parameter("strict_claims", "bool", True, "strict"),
    }
    allowed, forbidden = grid(parameters, {"rate": 0.5}, {"offset": [3, 5, 9], "train_length": [4, 16]})
    assert [(v["offset"], v["train_length"]) for v in allowed] == [(3, 4), (3, 16), (5, 16), (9, 16)]
    assert {v["rate"] for v in allowed} == {0.5}
    assert forbidden == [
        "0 < offset < train_length (offset=5, train_length=4)",
        "0 < offset < train_length (offset=9, train_length=4)",
    ]
    strict = [
        ({}, {}, True),
        ({}, {"offset": [5]}, True),
        ({}, {"offset": [6]}, False),
        ({"rate": 0.5}, {}, False),
        ({}, {"offset": [6], "strict_claims": [True]}, True),
        ({}, {"strict_claims": [False]}, False),
    ]
    for preset, axes, expected in strict:
        assert grid(parameters, preset, axes)[0][0]["strict_claims"] is expected
    with pytest.raises(RequestError, match="20,000 runs"):
        grid(parameters, {}, {"offset": range(100), "train_length": range(200)})


def test_the_presets_suit_the_chapters(root: Path) -> None:
    book = Book.find(root)
    for chapter in book.select(ALL):
        parameters = book.parameters(chapter)
        for preset in PRESETS:
            allowed, forbidden = grid(parameters, load_preset(root, preset, chapter, parameters), {})
            assert (len(allowed), forbidden) == (1, []), f"[{preset}.{chapter}]"
