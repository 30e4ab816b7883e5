"""Learned absolute positions: a table with one trained row a position."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from helpers.encodings import registry
from helpers.encodings.base import Encoding, ModelShape, Parameters
from helpers.validation import require, require_integer


@registry.register
@dataclass(frozen=True)
class Learned(Encoding):
    """Row ``p_j`` of a learned table is added to the input at position ``j``.

    ``table_length`` rows are made at the start, each N(0, ``row_std``² I); a position beyond them is a ``ValueError``.
    """

    table_length: int = 1024
    row_std: float = 1.0

    name = "learned"
    label = "learned absolute"
    colour = "#d55e00"
    relative = False

    def __post_init__(self) -> None:
        require_integer("table_length", self.table_length, 1)
        require(self.row_std > 0, "row_std", self.row_std, "a number > 0")

    def initial_parameters(self, shape: ModelShape, generator: torch.Generator) -> Parameters:
        rows = torch.randn(self.table_length, shape.width, generator=generator, dtype=torch.float64)
        return {"table": self.row_std * rows}

    def rows(
        self, positions: Int[Tensor, "models length"], parameters: Parameters, width: int
    ) -> Float[Tensor, "models length width"]:
        last = int(positions.max())
        require(last < self.table_length, "position", last, f"below table_length={self.table_length}")
        table = parameters["table"]
        if positions.shape[0] == 1:
            return table[:, positions[0]]
        return table[torch.arange(table.shape[0], device=table.device)[:, None], positions]


@registry.register
@dataclass(frozen=True)
class ShiftedLearned(Learned):
    """Learned rows trained under a random shift: in training, position ids start at a random place in the table.

    Every row is then seen, though no training sequence is longer than before. One shift is drawn a batch, uniformly
    over the places where the sequence fits; at test ids start at 0.
    """

    table_length: int = 128

    name = "learned-shifted"
    label = "learned, random shift"
    colour = "#de8f05"

    def position_ids(
        self, length: int, generator: torch.Generator | None = None, draws: int = 1
    ) -> Int[Tensor, "draws length"]:
        ids = super().position_ids(length, generator, draws)
        if generator is None:
            return ids
        require(length <= self.table_length, "length", length, f"at most table_length={self.table_length}")
        return ids + torch.randint(self.table_length - length + 1, (draws, 1), generator=generator)
