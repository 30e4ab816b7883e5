"""What a transformer is made of."""

from dataclasses import dataclass, field

from helpers.encodings import Encoding, ModelShape, Rotary
from helpers.validation import require, require_integer


@dataclass(frozen=True)
class TransformerSettings:
    """One decoder-only transformer.

    ``width`` is the size of the residual stream, split over ``num_heads`` heads in each of ``num_layers`` layers;
    the hidden layer of an MLP is ``mlp_ratio`` times as wide. The rows of the token embedding start as
    N(0, ``embedding_std``² I): small ones leave more of the stream to what the heads write. ``seed`` sets the initial
    weights and the streams of training and test data.
    """

    encoding: Encoding = field(default_factory=Rotary)
    vocab_size: int = 16
    width: int = 64
    num_heads: int = 4
    num_layers: int = 2
    mlp_ratio: int = 4
    embedding_std: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        require(isinstance(self.encoding, Encoding), "encoding", self.encoding, "an Encoding (see encodings.registry)")
        for name, least in (("vocab_size", 2), ("num_heads", 1), ("width", 1), ("num_layers", 1), ("mlp_ratio", 1)):
            require_integer(name, getattr(self, name), least)
        require_integer("seed", self.seed, 0)
        whole = self.width % self.num_heads == 0
        require(whole, "width", self.width, f"a multiple of num_heads={self.num_heads}")
        require(self.embedding_std > 0, "embedding_std", self.embedding_std, "a number > 0")
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
        names = ("encoding", "vocab_size", "width", "num_heads", "num_layers", "mlp_ratio", "embedding_std")
        return tuple(getattr(self, name) for name in names)
