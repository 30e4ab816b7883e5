"""Fixed-offset retrieval: name the token a fixed number of steps before the last one."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from helpers.tasks import registry
from helpers.tasks.base import IGNORE, Task
from helpers.validation import require_integer


@registry.register
@dataclass(frozen=True)
class FixedOffsetRetrieval(Task):
    """The paper's minimal task (arXiv 2607.18759, §1): ``y = x[n - 1 - offset]`` for a query at the last position.

    Tokens are independent and uniform, so the tokens say nothing about where the answer is: only position can.
    """

    offset: int = 5

    name = "retrieval"
    title = "Fixed-offset retrieval"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_integer("offset", self.offset, 0)

    @property
    def min_length(self) -> int:
        return self.offset + 1

    def labels(self, tokens: Int[Tensor, "batch length"]) -> Int[Tensor, "batch length"]:
        labels = torch.full_like(tokens, IGNORE)
        labels[:, -1] = tokens[:, -1 - self.offset]
        return labels
