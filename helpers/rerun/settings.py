"""From what a user writes to the parameters of runs: options, files, presets and grids."""

import itertools
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from helpers.rerun.errors import RequestError, first_line, require_known
from helpers.rerun.parameters import STRICT, Parameter, broken, explain

PRESETS = ("smoke", "book", "paper")
PRESETS_FILE = "book/presets.toml"
COST = "cost"
MOST_RUNS = 10_000
SHOWN = 3
INTEGER = re.compile(r"[+-]?\d{1,18}")
RANGE = re.compile(r"([+-]?\d{1,18}):([+-]?\d{1,18})(?::([+-]?\d{1,18}))?")


class _TextLoader(yaml.BaseLoader):
    """Reads every scalar as text, so ``1:8`` and ``1e-3`` mean what they mean on the command line."""


def _unique_mapping(loader: _TextLoader, node: yaml.MappingNode) -> dict[str, object]:
    pairs = [(loader.construct_object(k, deep=True), loader.construct_object(v, deep=True)) for k, v in node.value]
    return _unique(pairs)


_TextLoader.add_constructor("tag:yaml.org,2002:map", _unique_mapping)


def read_options(options: Iterable[str]) -> dict[str, str]:
    """Return ``name=value`` options as a mapping; RequestError when one has no ``=`` or a name comes twice."""
    pairs = []
    for option in options:
        name, equals, text = option.partition("=")
        if not equals or not name.strip():
            raise RequestError(f"-p {option!r} is not of the form name=value")
        pairs.append((name.strip(), text.strip()))
    return _unique(pairs)


def read_file(path: Path) -> dict[str, list]:
    """Return the mapping of a YAML or JSON file, every value in a list; RequestError says what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {path}: {_reason(error)}") from None
    try:
        if path.suffix == ".json":
            content = json.loads(text, object_pairs_hook=_unique)
        else:
            content = yaml.load(text, _TextLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise RequestError(f"{path} is not valid YAML or JSON: {' '.join(str(error).split())}") from None
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(f"{path} must hold a mapping of parameters to values, such as 'offset: [3, 5]'")
    return {str(name): value if isinstance(value, list) else [value] for name, value in content.items()}


def values_of(parameter: Parameter, given: str | list) -> list:
    """Return the values that a user gives a parameter: text of the command line, or a list from a file or a notebook.

    Text is a list with commas; whole numbers may be ranges, ``0:8`` or ``0:8:2``, without their end as in Python. For a
    parameter that is itself a list, ``16,32`` is one value and ``[16,32],[64]`` are two.
    """
    items = _split(parameter, given) if isinstance(given, str) else given
    nested = [isinstance(item, list) or (isinstance(item, str) and item.startswith("[")) for item in items]
    if not parameter.is_list:
        values = [value for item in items for value in _scalars(parameter, item, isinstance(given, str))]
    elif any(nested):
        if not all(nested):
            raise parameter.refused(given, "either one list, or only lists in brackets")
        values = [_one_list(parameter, item) for item in items]
    else:
        values = [_one_list(parameter, items)]
    if not values:
        raise RequestError(f"{parameter.name} has no values: give at least one")
    value, times = Counter(map(repr, values)).most_common(1)[0]
    if times > 1:
        raise RequestError(f"{parameter.name} is given {value} twice")
    return values


def load_preset(root: Path, preset: str, chapter: str, parameters: Mapping[str, Parameter]) -> dict[str, object]:
    """Return the parameters that a preset changes in a chapter, checked against the chapter."""
    require_known("preset", preset, PRESETS)
    if preset == "book":
        return {}
    table = _presets_table(root)
    if chapter not in table.get(preset, {}):
        raise RequestError(f"{PRESETS_FILE} has no [{preset}.{chapter}]")
    changed = table[preset][chapter]
    for name, value in changed.items():
        if name not in parameters or not parameters[name].accepts(value):
            allowed = parameters[name].type if name in parameters else "a parameter of the chapter"
            raise RequestError(f"{PRESETS_FILE}: [{preset}.{chapter}] {name} = {value!r}: {name} must be {allowed}")
    return {name: parameters[name].coerce(value) for name, value in changed.items()}


def expected_minutes(root: Path, preset: str, chapter: str) -> float | None:
    """Return what one run of a chapter costs with a preset, in minutes on one core, or None if nobody measured it."""
    minutes = _presets_table(root).get(COST, {}).get(preset, {}).get(chapter) if preset != "book" else None
    return None if minutes is None else float(minutes)


def grid(
    parameters: Mapping[str, Parameter], preset: Mapping[str, object], axes: Mapping[str, Sequence]
) -> tuple[list[dict[str, object]], list[str]]:
    """Return every allowed combination of ``axes`` with the other parameters, and a line per forbidden one.

    A run whose parameters are not the chapter's defaults does not stop at a failed claim, unless asked to: the bounds
    of the claims belong to the defaults.
    """
    size = math.prod(len(values) for values in axes.values())
    if size > MOST_RUNS:
        raise RequestError(f"the grid has {size:,} runs, more than {MOST_RUNS:,}: sweep it in parts")
    defaults = {name: parameter.coerce(parameter.default) for name, parameter in parameters.items()}
    allowed, forbidden = [], []
    for combination in itertools.product(*axes.values()):
        given = {**preset, **dict(zip(axes, combination, strict=True))}
        values = {**defaults, **given}
        if STRICT in defaults and STRICT not in given:
            values[STRICT] = bool(defaults[STRICT]) and values == defaults
        if failed := broken(parameters.values(), values):
            forbidden.append(explain(failed[0][1], values))
        else:
            allowed.append(values)
    return allowed, forbidden


def forbidden_message(chapter: str, forbidden: Sequence[str], total: int) -> str:
    """Return in one line which combinations a chapter does not allow."""
    different = list(dict.fromkeys(forbidden))
    more = f"; and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
    listed = "; ".join(different[:SHOWN]) + more
    if total == 1:
        return f"{chapter} needs {listed}"
    return f"{chapter}: {len(forbidden)} of {total} combinations are not allowed (see --skip-forbidden): {listed}"


def _presets_table(root: Path) -> dict:
    try:
        return tomllib.loads((root / PRESETS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot read {PRESETS_FILE}: {_reason(error)}") from None


def _split(parameter: Parameter, text: str) -> list[str]:
    """Split at the commas that stand outside brackets and quotes."""
    items, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[]":
            depth += 1 if character == "[" else -1
        if depth < 0 or depth > 1:
            raise parameter.refused(text, "with brackets that close, and none inside others")
        if character == "," and not depth and not quote:
            items.append("")
        else:
            items[-1] += character
    if depth or quote:
        raise parameter.refused(text, "with brackets and quotes that close")
    items = [item.strip() for item in items]
    if items == [""]:
        return []
    if "" in items:
        raise parameter.refused(text, "without empty places between commas")
    return items


def _one_list(parameter: Parameter, item: str | list) -> list:
    inside = isinstance(item, str)
    items = _split(parameter, item.removeprefix("[").removesuffix("]")) if isinstance(item, str) else item
    return [value for part in items for value in _scalars(parameter, part, inside)]


def _scalars(parameter: Parameter, item: object, quoted: bool) -> list:
    """Return the value that ``item`` is or writes, or the values of a range; ``quoted`` strings may stand in quotes."""
    kind = parameter.item
    if not isinstance(item, str):
        return [parameter.coerce_item(item)]
    if kind == "str":
        in_quotes = quoted and len(item) > 1 and item[0] == item[-1] and item[0] in "\"'"
        return [item[1:-1] if in_quotes else item]
    if kind == "bool":
        if item.lower() not in ("true", "false"):
            raise parameter.refused(item, "true or false")
        return [item.lower() == "true"]
    if found := RANGE.fullmatch(item):
        return _range(parameter, item, *found.groups())
    if kind == "int":
        if not INTEGER.fullmatch(item):
            raise parameter.refused(item, "a whole number, such as 5")
        return [int(item)]
    try:
        return [parameter.coerce_item(float(item))]
    except ValueError:
        raise parameter.refused(item, "a number, such as 0.5") from None


def _range(parameter: Parameter, text: str, start: str, stop: str, step: str | None) -> list[int]:
    if parameter.item != "int":
        raise parameter.refused(text, "listed value by value: ranges are for whole numbers")
    if step is not None and int(step) == 0:
        raise parameter.refused(text, "a range with a step that is not 0")
    numbers = range(int(start), int(stop), int(step or 1))
    if not numbers:
        raise parameter.refused(text, "a range with at least one number, and its end is left out")
    if len(numbers) > MOST_RUNS:
        raise parameter.refused(text, f"a range of at most {MOST_RUNS:,} numbers")
    return list(numbers)


def _unique(pairs: Iterable[tuple]) -> dict:
    found: dict = {}
    for name, value in pairs:
        if name in found:
            raise RequestError(f"{name} is given twice")
        found[name] = value
    return found


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else first_line(str(error))
