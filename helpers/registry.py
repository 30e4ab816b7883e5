"""A registry that fills itself from the modules of a package: adding a member touches one new file."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Generic, TypeVar

from helpers.validation import require, require_choice

T = TypeVar("T")


class Registry(Generic[T]):
    """Named classes of one kind, discovered in ``package``.

    A class joins with ``@registry.register``; its ``name`` class attribute is its key. A name taken twice is a
    ``ValueError``, so is a lookup of an unknown one (the message lists the known names).
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind, self.package = kind, package
        self._members: dict[str, type[T]] = {}

    def register(self, cls: type[T]) -> type[T]:
        taken = self._members.get(cls.name)
        require(taken is None, f"{self.kind} name", cls.name, f"new, but {taken} has it")
        self._members[cls.name] = cls
        return cls

    def remove(self, name: str) -> None:
        """Forget ``name`` (for throw-away members)."""
        del self._members[self[name].name]

    def _discover(self) -> dict[str, type[T]]:
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        return self._members

    def __getitem__(self, name: str) -> type[T]:
        members = self._discover()
        require_choice(self.kind, name, sorted(members))
        return members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._discover()))

    def make(self, name: str, **settings: object) -> T:
        """The member called ``name``, built with ``settings``."""
        return self[name](**settings)
