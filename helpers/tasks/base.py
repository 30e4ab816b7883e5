"""What a task is."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from helpers.validation import require, require_integer

IGNORE = -100  # the label of a position that is not scored; torch's cross-entropy skips it


@dataclass(frozen=True)
class Task:
    """Samples sequences and says what the right answer is at each position.

    A subclass sets ``name`` and ``title``, and implements ``labels`` (and ``tokens``, if they are not uniform).
    """

    vocab_size: int = 16

    name: ClassVar[str]
    title: ClassVar[str]

    def __post_init__(self) -> None:
        require_integer("vocab_size", self.vocab_size, 2)

    @property
    def min_length(self) -> int:
        """The shortest sequence with a scored position."""
        return 1

    @property
    def chance(self) -> float:
        """The accuracy of a guess that ignores the sequence."""
        return 1 / self.vocab_size

    def sample(
        self, batch_size: int, length: int, generator: torch.Generator
    ) -> tuple[Int[Tensor, "batch length"], Int[Tensor, "batch length"]]:
        """``(tokens, labels)`` drawn from ``generator``; unscored positions have the label ``IGNORE``."""
        require(length >= self.min_length, "length", length, f"at least {self.min_length} for {self}")
        tokens = self.tokens(batch_size, length, generator)
        return tokens, self.labels(tokens)

    def tokens(self, batch_size: int, length: int, generator: torch.Generator) -> Int[Tensor, "batch length"]:
        """Independent uniform tokens."""
        return torch.randint(self.vocab_size, (batch_size, length), generator=generator)

    def labels(self, tokens: Int[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
        """The right answer at every position, ``IGNORE`` where there is none."""
        raise NotImplementedError
