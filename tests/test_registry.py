"""The registry: a member is one new file, found without touching another; a name is taken once."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from helpers import encodings, tasks
from helpers.heads import HeadBatch, HeadSettings
from helpers.registry import Registry

ZIGZAG = """
    from dataclasses import dataclass

    import torch

    from helpers.encodings import registry
    from helpers.encodings.base import Encoding


    @registry.register
    @dataclass(frozen=True)
    class Zigzag(Encoding):
        slope: float = 0.5

        name = "zigzag"
        label = "zigzag"
        colour = "#123456"
        relative = True

        def bias(self, queries, keys, parameters, num_heads):
            delta = queries[:, None, :, None] - keys[:, None, None, :]
            return (-self.slope * (delta % 2)).expand(-1, num_heads, -1, -1)
"""

LAST = """
    from dataclasses import dataclass

    import torch

    from helpers.tasks import registry
    from helpers.tasks.base import IGNORE, Task


    @registry.register
    @dataclass(frozen=True)
    class Last(Task):
        name = "say-the-last"
        title = "Say the last token"

        def labels(self, tokens):
            return torch.cat([torch.full_like(tokens[:, :-1], IGNORE), tokens[:, -1:]], dim=1)
"""


@pytest.fixture
def add_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """Return a function that puts one new module beside those of a package; all traces are removed afterwards."""
    added = []

    def add(package, module: str, source: str, name: str) -> None:
        (tmp_path / f"{module}.py").write_text(dedent(source))
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        importlib.invalidate_caches()
        added.append((package, module, name))

    yield add
    for package, module, name in added:
        package.registry.remove(name)
        del sys.modules[f"{package.__name__}.{module}"]
        delattr(package, module)


def test_an_encoding_is_one_new_file(add_member) -> None:
    assert "zigzag" not in encodings.registry
    add_member(encodings, "zigzag", ZIGZAG, "zigzag")
    assert "zigzag" in encodings.registry
    encoding = encodings.registry.make("zigzag", slope=2.0)
    kernel = HeadBatch([HeadSettings(encoding=encoding, init_std=0.0)]).kernel(6)
    assert torch.equal(kernel, torch.tensor([[0.0, -2.0, 0.0, -2.0, 0.0, -2.0]], dtype=torch.float64))


def test_a_task_is_one_new_file(add_member) -> None:
    add_member(tasks, "last", LAST, "say-the-last")
    task = tasks.registry.make("say-the-last", vocab_size=3)
    tokens, labels = task.sample(4, 5, torch.Generator().manual_seed(0))
    assert torch.equal(labels[:, -1], tokens[:, -1])


def test_members_are_forgotten_afterwards() -> None:
    assert "zigzag" not in encodings.registry
    assert "say-the-last" not in tasks.registry


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """A registry of a throw-away package with two members, each in its own file."""
    package = tmp_path / "throwaway_shapes"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from helpers.registry import Registry\nregistry = Registry('shape', __name__)\n"
    )
    for name in ("square", "circle"):
        (package / f"{name}.py").write_text(
            f"from throwaway_shapes import registry\n\n\n@registry.register\nclass {name.title()}:\n"
            f"    name = {name!r}\n\n    def __init__(self, size=1):\n        self.size = size\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("throwaway_shapes").registry
    for module in [name for name in sys.modules if name.startswith("throwaway_shapes")]:
        del sys.modules[module]


def test_members_are_listed_in_order_and_made_with_settings(shapes: Registry) -> None:
    assert list(shapes) == ["circle", "square"]
    assert shapes.make("square", size=3).size == 3


def test_an_unknown_name_lists_the_known_ones(shapes: Registry) -> None:
    with pytest.raises(
        ValueError, match=r"^shape='sqare' is not allowed: .* one of circle, square \(did .* 'square'\?\)"
    ):
        shapes["sqare"]


def test_a_name_is_taken_once(shapes: Registry) -> None:
    list(shapes)
    second = type("Second", (), {"name": "circle"})
    with pytest.raises(ValueError, match=r"^shape name='circle' is not allowed: .* new, but .*Circle.* has it$"):
        shapes.register(second)
    assert shapes["circle"].__name__ == "Circle"


def test_a_removed_name_is_free_again(shapes: Registry) -> None:
    shapes.remove("circle")
    assert list(shapes) == ["square"]
    second = type("Second", (), {"name": "circle"})
    assert shapes.register(second) is second
    assert shapes["circle"] is second
    with pytest.raises(ValueError, match="shape='triangle' is not allowed"):
        shapes.remove("triangle")


def test_a_broken_member_says_so(shapes: Registry, tmp_path: Path) -> None:
    (tmp_path / "throwaway_shapes" / "broken.py").write_text("import no_such_module_anywhere\n")
    importlib.invalidate_caches()
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        shapes["circle"]
