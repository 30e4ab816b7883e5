"""Copy: repeat a whole string after a separator."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from helpers.tasks import registry
from helpers.tasks.base import IGNORE, Task
from helpers.validation import require_integer


@registry.register
@dataclass(frozen=True)
class Copy(Task):
    """A string, a separator, the string again: from the separator on, name the symbol that comes next.

    A sequence of ``length`` tokens holds a string of ``m = length // 2`` independent uniform symbols
    ``0 … vocab_size − 2``, the separator ``vocab_size − 1``, and the string once more without its last symbol (with
    it, if ``length`` is odd; that last position is unscored). ``y[m + i] = x[i]``: the answer is always ``m`` steps
    back, so the offset grows with the length.
    """

    name = "copy"
    title = "Copy"

    def __post_init__(self) -> None:
        require_integer("vocab_size", self.vocab_size, 3)  # two symbols and the separator

    @property
    def min_length(self) -> int:
        return 2

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 1)

    def tokens(self, batch_size: int, length: int, generator: torch.Generator) -> Int[Tensor, "batch length"]:
        string = torch.randint(self.vocab_size - 1, (batch_size, length // 2), generator=generator)
        separator = torch.full((batch_size, 1), self.vocab_size - 1)
        return torch.cat([string, separator, string], dim=1)[:, :length]

    def labels(self, tokens: Int[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
        labels = torch.full_like(tokens, IGNORE)
        size = tokens.shape[1] // 2
        labels[:, size : 2 * size] = tokens[:, :size]
        return labels
