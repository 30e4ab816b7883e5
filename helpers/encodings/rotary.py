"""Rotary positions (RoPE): queries and keys are rotated by their position, so logits see only the difference."""

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from helpers.encodings import registry
from helpers.encodings.base import Encoding, ModelShape, spread_over
from helpers.validation import require, require_choice

PAIRS = ("interleaved", "half")


def frequencies(head_dim: int, base: float = 10_000.0) -> Float[Tensor, "num_carriers"]:
    """θ_r = base^(−2r/head_dim), r = 0 … head_dim/2 − 1, in radians per token (Su et al., arXiv 2104.09864, §3.2.2)."""
    require(head_dim >= 2 and head_dim % 2 == 0, "head_dim", head_dim, "even and ≥ 2 (a carrier is a pair)")
    return base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def angles(
    positions: Int[Tensor, "*shape"], theta: Float[Tensor, "num_carriers"]
) -> Float[Tensor, "*shape num_carriers"]:
    """position · θ_r, in float64: at long range float32 angles would lose the phase.

    On the positions' device, but for MPS, which has no float64: then on the CPU.
    """
    device = "cpu" if positions.device.type == "mps" else positions.device
    return positions[..., None].to(device, torch.float64) * theta.to(device)


@registry.register
@dataclass(frozen=True)
class Rotary(Encoding):
    """Each pair (x_a, x_b) of a query or key at position p is turned by the angle p·θ_r (Su et al., eq. 34).

    ``pairs`` says which coordinates make a pair: ``"interleaved"`` (0,1), (2,3), … as in the paper, or ``"half"``
    (0, d/2), (1, d/2 + 1), … as in many public models. The two are equal up to a permutation of the coordinates.
    """

    base: float = 10_000.0
    pairs: str = "interleaved"

    name = "rotary"
    label = "rotary"
    colour = "#0173b2"
    relative = True

    def __post_init__(self) -> None:
        require(self.base > 1, "base", self.base, "a number > 1")
        require_choice("pairs", self.pairs, PAIRS)

    def validate(self, shape: ModelShape) -> None:
        require(shape.head_dim % 2 == 0, "head_dim", shape.head_dim, f"even for {self.name} (a carrier is a pair)")

    def frequencies(self, head_dim: int) -> Float[Tensor, "num_carriers"]:
        """The θ_r this encoding rotates by, in radians per token."""
        return frequencies(head_dim, self.base)

    def _as_complex(self, vectors: Float[Tensor, "*shape head_dim"]) -> Complex[Tensor, "*shape num_carriers"]:
        if self.pairs == "half":
            return torch.complex(*vectors.chunk(2, dim=-1))
        return torch.view_as_complex(vectors.unflatten(-1, (-1, 2)))

    def _as_real(self, pairs: Complex[Tensor, "*shape num_carriers"]) -> Float[Tensor, "*shape head_dim"]:
        if self.pairs == "half":
            return torch.cat([pairs.real, pairs.imag], dim=-1)
        return torch.view_as_real(pairs).flatten(-2)

    def rotate(
        self, vectors: Float[Tensor, "models *rest length head_dim"], positions: Int[Tensor, "models length"]
    ) -> Float[Tensor, "models *rest length head_dim"]:
        phase = angles(spread_over(positions, vectors), self.frequencies(vectors.shape[-1]))
        cos, sin = torch.complex(phase.cos(), 0 * phase), torch.complex(0 * phase, phase.sin())
        cos, sin = (part.to(vectors.device, vectors.dtype.to_complex()) for part in (cos, sin))
        pairs = self._as_complex(vectors)
        # Complex products are faster than real ones. One would do, but it is fused in some places of a tensor and not
        # in others, so that a seed's bits would depend on its batch; a real or imaginary factor leaves nothing to fuse.
        return self._as_real(pairs * cos + pairs * sin)

    def carrier_features(self, deltas: Int[Tensor, "*shape"], head_dim: int) -> Float[Tensor, "*shape head_dim"]:
        """φ(δ) = (cos θ_r δ)_r then (sin θ_r δ)_r, so that the kernel is ⟨(Re c, Im c), φ(δ)⟩."""
        phase = angles(deltas, self.frequencies(head_dim))
        return torch.cat([phase.cos(), phase.sin()], dim=-1)

    def carriers(
        self, query: Float[Tensor, "*models head_dim"], key: Float[Tensor, "*models head_dim"]
    ) -> Complex[Tensor, "*models num_carriers"]:
        """c_r = conj(q_r)·κ_r/√d, the complex amplitudes of f(δ) = Σ_r Re(c_r e^{−iθ_r δ}).

        Turning q by iθ_r and κ by jθ_r gives q·κ = Σ_r Re(q_r conj(κ_r) e^{iθ_r δ}) with δ = i − j; the conjugate of
        the product is the amplitude of e^{−iθ_r δ}, whose phase is θ_r k when the carrier peaks at offset k.
        """
        q, k = self._as_complex(query), self._as_complex(key)
        return q.conj() * k / query.shape[-1] ** 0.5
