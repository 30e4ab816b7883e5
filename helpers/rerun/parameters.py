"""The parameters of a chapter: the typed, commented assignments of its one cell tagged ``parameters``."""

import ast
import io
import tokenize
from dataclasses import dataclass

import nbformat

TAG = "parameters"
TYPES = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
}
ALLOWED = [*TYPES, "list[int]", "list[float]", "list[str]"]


@dataclass(frozen=True)
class Parameter:
    """One line ``name: type = default  # help`` of a parameters cell."""

    name: str
    type: str
    default: object
    help: str

    def accepts(self, value: object) -> bool:
        """Whether ``value`` has the declared type (an int passes for a float, a bool never for a number)."""
        if self.type.startswith("list["):
            return isinstance(value, list) and all(_is(item, self.type[5:-1]) for item in value)
        return _is(value, self.type)


def parameters_of(notebook: nbformat.NotebookNode) -> list[Parameter]:
    """Return a notebook's parameters. Raises ValueError unless exactly one code cell is tagged ``parameters``."""
    tagged = [cell for cell in notebook.cells if TAG in cell.metadata.get("tags", [])]
    if len(tagged) != 1 or tagged[0].cell_type != "code":
        raise ValueError(f"{len(tagged)} cells are tagged {TAG!r}, exactly one code cell must be")
    return parse(tagged[0].source)


def parse(source: str) -> list[Parameter]:
    """Return the parameters that a cell's source declares.

    Raises ValueError, with the line, for anything but a one-line ``name: type = default  # help`` of an allowed type.
    """
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.lstrip("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = []
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
        found.append(parameter)
    return found


def _is(value: object, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))
