"""What a positional encoding may do, and where."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class ModelShape:
    """The sizes an encoding may need: of the residual stream, of a head, and how many heads and layers share it."""

    width: int
    head_dim: int
    num_heads: int = 1


@dataclass(frozen=True)
class Encoding:
    """A positional encoding, for one model or for several stacked along a leading ``models`` axis.

    It may act in four places, each a method that by default does nothing: the position ids, the input, the queries and
    keys, the logits. ``positions`` always has the shape ``(models, length)``, or ``(1, length)`` when the models agree.
    A subclass sets ``name`` (its key in the registry), ``label`` and ``colour`` (for figures) and ``relative`` (the
    logits depend on positions through ``i - j`` alone).
    """

    name: ClassVar[str]
    label: ClassVar[str]
    colour: ClassVar[str]
    relative: ClassVar[bool]

    def validate(self, shape: ModelShape) -> None:
        """``ValueError`` if the encoding cannot work in a model of this shape."""

    def initial_parameters(self, shape: ModelShape, generator: torch.Generator) -> Parameters:
        """What the encoding learns, for one model, float64; stacked by the caller. Empty if nothing."""
        return {}

    def position_ids(
        self, length: int, generator: torch.Generator | None = None, draws: int = 1
    ) -> Int[Tensor, "draws length"]:
        """The ids of a sequence's positions, 0 … length − 1 by default.

        ``generator`` is given in training (``draws`` batches at once) and absent at test: an encoding with randomised
        positions draws from it.
        """
        return torch.arange(length).expand(draws, length)

    def rows(
        self, positions: Int[Tensor, "models length"], parameters: Parameters, width: int
    ) -> Float[Tensor, "models length width"] | None:
        """What is added to the input embedding at each position; None for nothing."""
        return None

    def rotate(
        self, vectors: Float[Tensor, "models *rest length head_dim"], positions: Int[Tensor, "models length"]
    ) -> Float[Tensor, "models *rest length head_dim"]:
        """What happens to queries and keys at their positions."""
        return vectors

    def bias(
        self,
        queries: Int[Tensor, "models queries"],
        keys: Int[Tensor, "models keys"],
        parameters: Parameters,
        num_heads: int,
    ) -> Float[Tensor, "models heads queries keys"] | None:
        """What is added to the logits, on top of q·k/√d; None for nothing."""
        return None

    def carrier_features(self, deltas: Int[Tensor, "*shape"], head_dim: int) -> Float[Tensor, "*shape head_dim"] | None:
        """φ(δ) of an encoding whose constant-content kernel is ⟨w, φ(δ)⟩ (rotary ones); None for the others."""
        return None

    def carriers(
        self, query: Float[Tensor, "*models head_dim"], key: Float[Tensor, "*models head_dim"]
    ) -> Tensor | None:
        """The complex amplitudes c_r of the kernel of constant ``query`` and ``key`` vectors; None if not rotary."""
        return None


def spread_over(positions: Tensor, like: Tensor) -> Tensor:
    """Reshape ``(models, length)`` so that it broadcasts against ``like``'s ``(models, *rest, length, ...)``."""
    return positions.reshape(positions.shape[0], *(1,) * (like.ndim - 3), positions.shape[1])
