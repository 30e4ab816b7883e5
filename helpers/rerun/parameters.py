"""The parameters of a chapter: the typed, commented assignments of its one cell tagged ``parameters``.

A comment says what the parameter means and may go on with conditions, each after a semicolon:
``offset: int = 5  # steps back from the query; 0 < offset < train_length``. A condition is a comparison, or several
joined by and, or, not, between the cell's parameters and literals, with arithmetic and the functions ``FUNCTIONS``.
papermill does not understand a line with a second equals sign: write ≥, ≤, ``is`` (equal) and ``is not`` (different).
"""

import ast
import io
import math
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helpers.rerun.errors import RequestError

if TYPE_CHECKING:
    import nbformat

TAG = "parameters"
STRICT = "strict_claims"
TYPES = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
}
ALLOWED = [*TYPES, "list[int]", "list[float]", "list[str]"]
FUNCTIONS = {"len": len, "min": min, "max": max, "set": set, "abs": abs}
SIGNS = str.maketrans({"≥": ">=", "≤": "<="})
CONDITION_NODES = (
    *(ast.Expression, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop, ast.BinOp),
    *(ast.operator, ast.Call, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.List, ast.Set),
)


@dataclass(frozen=True)
class Parameter:
    """One line ``name: type = default  # help; condition; ...`` of a parameters cell; ``help`` is the whole comment."""

    name: str
    type: str
    default: object
    help: str

    @property
    def summary(self) -> str:
        """The comment up to the first condition."""
        return self.help.split(";")[0].strip()

    @property
    def conditions(self) -> list[str]:
        """The conditions in the comment."""
        return [condition.strip() for condition in self.help.split(";")[1:]]

    @property
    def item(self) -> str:
        """The type of one number, string or boolean: ``int`` for ``int`` and for ``list[int]``."""
        return self.type.removeprefix("list[").removesuffix("]")

    @property
    def is_list(self) -> bool:
        """Whether a value is a list."""
        return self.type.startswith("list[")

    def accepts(self, value: object) -> bool:
        """Whether ``value`` has the declared type (an int passes for a float, a bool never for a number)."""
        if self.is_list:
            return isinstance(value, list) and all(_is(item, self.item) for item in value)
        return _is(value, self.type)

    def coerce(self, value: object) -> object:
        """Return ``value`` as a chapter would write it: floats as floats, numpy's scalars as Python's, lists as lists.

        Raises RequestError unless the value has the declared type and every number is finite.
        """
        if not self.is_list:
            return self.coerce_item(value)
        if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
            raise self.refused(value, f"of type {self.type}")
        return [self.coerce_item(item) for item in value]

    def coerce_item(self, value: object) -> int | float | str | bool:
        """``coerce`` for one number, string or boolean, such as one item of a list."""
        plain = value.item() if hasattr(value, "item") else value
        if not _is(plain, self.item):
            raise self.refused(value, f"of type {self.type}")
        if self.item == "float":
            plain = float(plain)  # type: ignore[arg-type]
            if not math.isfinite(plain):
                raise self.refused(value, "finite")
        return plain  # type: ignore[return-value]

    def refused(self, value: object, allowed: str) -> RequestError:
        """Return the error that names the parameter, a value and what is allowed."""
        shown = value if isinstance(value, str) else repr(value)
        return RequestError(f"{self.name}={shown} is not allowed: {self.name} must be {allowed}")


def parameters_of(notebook: "nbformat.NotebookNode") -> list[Parameter]:
    """Return a notebook's parameters. Raises ValueError unless exactly one code cell is tagged ``parameters``."""
    tagged = [cell for cell in notebook.cells if TAG in cell.metadata.get("tags", [])]
    if len(tagged) != 1 or tagged[0].cell_type != "code":
        raise ValueError(f"{len(tagged)} cells are tagged {TAG!r}, exactly one code cell must be")
    return parse(tagged[0].source)


def parse(source: str) -> list[Parameter]:
    """Return the parameters that a cell's source declares.

    Raises ValueError, with the line, for anything but a one-line ``name: type = default  # help`` of an allowed type,
    for what stands after a semicolon and is no condition, and for a default that breaks a condition.
    """
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.lstrip("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found: dict[str, Parameter] = {}
    for node in ast.parse(source).body:
        line = lines[node.lineno - 1]
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value):
            raise ValueError(f"{line!r} is not of the form 'name: type = default  # help'")
        if node.end_lineno != node.lineno or not comments.get(node.lineno):
            raise ValueError(f"{line!r} needs a comment that explains it, on one line with it")
        declared = ast.unparse(node.annotation)
        if declared not in ALLOWED:
            raise ValueError(f"{line!r}: the type must be one of {', '.join(ALLOWED)}")
        try:
            default = ast.literal_eval(node.value)
        except ValueError:
            raise ValueError(f"{line!r}: the default must be a literal") from None
        parameter = Parameter(node.target.id, declared, default, comments[node.lineno])
        if not parameter.accepts(default):
            raise ValueError(f"{line!r}: the default is not of type {declared}")
        if parameter.name in found:
            raise ValueError(f"{line!r}: {parameter.name} is declared twice")
        found[parameter.name] = parameter
    for parameter in found.values():
        for condition in parameter.conditions:
            _require_condition(parameter, condition, set(found))
    for parameter, condition in broken(found.values(), {name: p.default for name, p in found.items()}):
        raise ValueError(f"the default of {parameter.name} breaks its condition {condition!r}")
    return list(found.values())


def broken(parameters: Iterable[Parameter], values: Mapping[str, object]) -> list[tuple[Parameter, str]]:
    """Return the conditions, each with the parameter that states it, that ``values`` do not meet."""
    return [(p, condition) for p in parameters for condition in p.conditions if not _holds(condition, values)]


def explain(condition: str, values: Mapping[str, object]) -> str:
    """Return the condition with the values it is about: ``0 < offset < train_length (offset=20, train_length=16)``."""
    shown = ", ".join(f"{name}={values[name]!r}" for name in names_in(condition))
    return f"{condition} ({shown})"


def names_in(condition: str) -> list[str]:
    """Return the parameters that a condition is about, in order."""
    nodes = [node for node in ast.walk(_tree(condition)) if isinstance(node, ast.Name)]
    nodes.sort(key=lambda node: node.col_offset)
    return list(dict.fromkeys(node.id for node in nodes if node.id not in FUNCTIONS))


def _require_condition(parameter: Parameter, condition: str, known: set[str]) -> None:
    where = f"the comment of {parameter.name}: {condition!r} after a semicolon"
    if "=" in condition:
        raise ValueError(f"{where} has an equals sign, which papermill does not understand: write ≥, ≤, is or is not")
    try:
        tree = _tree(condition)
    except SyntaxError:
        raise ValueError(f"{where} is not a condition, such as '0 < {parameter.name}'") from None
    decides = isinstance(tree.body, ast.Compare | ast.BoolOp) or (
        isinstance(tree.body, ast.UnaryOp) and isinstance(tree.body.op, ast.Not)
    )
    if not decides:
        raise ValueError(f"{where} is not a comparison")
    for node in ast.walk(tree):
        calls_known = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
        if not isinstance(node, CONDITION_NODES) or (isinstance(node, ast.Call) and not calls_known):
            raise ValueError(f"{where} may only compare parameters and literals, with {', '.join(FUNCTIONS)}")
    if unknown := [name for name in names_in(condition) if name not in known]:
        raise ValueError(f"{where} names {unknown[0]!r}, which is no parameter")


def _tree(condition: str) -> ast.Expression:
    tree = ast.parse(condition.translate(SIGNS), mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            node.ops = [{ast.Is: ast.Eq, ast.IsNot: ast.NotEq}.get(type(op), type(op))() for op in node.ops]
    return tree


def _holds(condition: str, values: Mapping[str, object]) -> bool:
    try:
        # Only what _require_condition let through; chapters are code of this book anyway.
        code = compile(_tree(condition), "<condition>", "eval")
        return bool(eval(code, {"__builtins__": {}, **FUNCTIONS}, dict(values)))
    except (ArithmeticError, TypeError, ValueError):  # max([]), 1 % 0: the values make no sense together
        return False


def _is(value: object, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))
