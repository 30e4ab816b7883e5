"""No positional encoding (NoPE)."""

from dataclasses import dataclass

from helpers.encodings import registry
from helpers.encodings.base import Encoding


@registry.register
@dataclass(frozen=True)
class NoEncoding(Encoding):
    """No positional signal but the causal mask (Kazemnejad et al., arXiv 2305.19466)."""

    name = "none"
    label = "none (NoPE)"
    colour = "#949494"
    relative = True
