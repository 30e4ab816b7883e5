"""Shift: repeat, at every position, the token a fixed number of steps before."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from helpers.tasks import registry
from helpers.tasks.base import IGNORE, Task
from helpers.validation import require_integer


@registry.register
@dataclass(frozen=True)
class Shift(Task):
    """Fixed-offset retrieval at every position: ``y[t] = x[t - offset]`` for ``t ≥ offset``, earlier ones unscored.

    The full-sequence form of the paper's task (arXiv 2607.18759). Tokens are independent and
    uniform, so nothing but position says where the answer is.
    """

    offset: int = 5

    name = "shift"
    title = "Shift"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("offset", self.offset, 0)

    @property
    def min_length(self) -> int:
        return self.offset + 1

    def labels(self, tokens: Int[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
        labels = torch.full_like(tokens, IGNORE)
        labels[:, self.offset :] = tokens[:, : tokens.shape[1] - self.offset]
        return labels
