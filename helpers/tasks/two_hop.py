"""Two hops: the token a fixed number of steps back says how much further back the answer is."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from helpers.tasks import registry
from helpers.tasks.base import IGNORE, Task
from helpers.validation import require, require_integer


@registry.register
@dataclass(frozen=True)
class TwoHop(Task):
    """An offset of an offset: ``y[t] = x[s - 1 - (x[s] mod reach)]`` with ``s = t - offset``.

    The first hop goes a fixed ``offset`` back, the second 1 … ``reach`` steps further, as the token found there says.
    Tokens are independent and uniform. No single look back answers it, for where to look depends on a token elsewhere:
    one that does not read that token is right about once in ``reach`` times.
    """

    offset: int = 3
    reach: int = 4

    name = "two-hop"
    title = "Two hops"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("offset", self.offset, 0)
        require_integer("reach", self.reach, 1)
        require(self.reach <= self.vocab_size, "reach", self.reach, f"in 1 … vocab_size = {self.vocab_size}")

    @property
    def min_length(self) -> int:
        return self.offset + self.reach + 1

    def labels(self, tokens: Int[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
        labels = torch.full_like(tokens, IGNORE)
        first = self.min_length - 1
        middle = torch.arange(first, tokens.shape[1], device=tokens.device) - self.offset
        source = middle - 1 - tokens[:, middle] % self.reach
        labels[:, first:] = tokens.gather(1, source)
        return labels
