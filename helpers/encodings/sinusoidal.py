"""Sinusoidal absolute positions."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from helpers.encodings import registry
from helpers.encodings.base import Encoding, ModelShape, Parameters
from helpers.encodings.rotary import angles, frequencies
from helpers.validation import require


@registry.register
@dataclass(frozen=True)
class Sinusoidal(Encoding):
    """Fixed rows (sin θ_r j, cos θ_r j), interleaved, added to the input (Vaswani et al. 2017, §3.5).

    θ_r = base^(−2r/width) radians per token. The model's width must be even.
    """

    base: float = 10_000.0

    name = "sinusoidal"
    label = "sinusoidal absolute"
    colour = "#cc78bc"
    relative = False

    def __post_init__(self) -> None:
        require(self.base > 1, "base", self.base, "a number > 1")

    def validate(self, shape: ModelShape) -> None:
        require(shape.width % 2 == 0, "width", shape.width, f"even for {self.name}")

    def rows(
        self, positions: Int[Tensor, "models length"], parameters: Parameters, width: int
    ) -> Float[Tensor, "models length width"]:
        phase = angles(positions, frequencies(width, self.base))
        return torch.stack([phase.sin(), phase.cos()], dim=-1).flatten(-2)
