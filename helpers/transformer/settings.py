"""What a transformer is made of."""

from dataclasses import dataclass, field

from helpers.encodings import Encoding, ModelShape, Rotary
from helpers.validation import require


@dataclass(frozen=True)
class TransformerSettings:
    """One decoder-only transformer.

    ``width`` is the size of the residual stream, split over ``num_heads`` heads in each of ``num_layers`` layers;
    the hidden layer of an MLP is ``mlp_ratio`` times as wide. ``seed`` sets the initial weights, and with them the
    streams of training and test data.
    """

    encoding: Encoding = field(default_factory=Rotary)
    vocab_size: int = 16
    width: int = 64
    num_heads: int = 4
    num_layers: int = 2
    mlp_ratio: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        require(isinstance(self.encoding, Encoding), "encoding", self.encoding, "an Encoding (see encodings.registry)")
        require(_counts(self.vocab_size, 2), "vocab_size", self.vocab_size, "an integer ≥ 2")
        require(_counts(self.num_heads, 1), "num_heads", self.num_heads, "an integer ≥ 1")
        whole = _counts(self.width, 1) and self.width % self.num_heads == 0
        require(whole, "width", self.width, f"a multiple of num_heads={self.num_heads}")
        require(_counts(self.num_layers, 1), "num_layers", self.num_layers, "an integer ≥ 1")
        require(_counts(self.mlp_ratio, 1), "mlp_ratio", self.mlp_ratio, "an integer ≥ 1")
        require(_counts(self.seed, 0), "seed", self.seed, "an integer ≥ 0")
        self.encoding.validate(self.shape)

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.width // self.num_heads

    @property
    def shape(self) -> ModelShape:
        """The sizes the encoding may need."""
        return ModelShape(self.width, self.head_dim, self.num_heads)

    @property
    def structure(self) -> tuple:
        """What models of one batch must share: everything but the seed."""
        names = ("encoding", "vocab_size", "width", "num_heads", "num_layers", "mlp_ratio")
        return tuple(getattr(self, name) for name in names)


def _counts(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
