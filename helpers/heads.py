"""The minimal head, as a batch: one position-only attention head a (seed, offset, setting), trained side by side.

The head of the paper's §1 has one-hot values and an identity read-out, so its output distribution is
p(v) = Σ_j a_j 1[x_j = v]: attention is the only thing that can learn. Its logits depend on positions alone.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import groupby

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from helpers.devices import resolve_device
from helpers.encodings import Encoding, ModelShape, Rotary
from helpers.encodings.base import Parameters
from helpers.seeding import generator
from helpers.tasks import FixedOffsetRetrieval
from helpers.validation import require, require_choice, require_integer

QUERIES = ("shared", "positional")
PARAMETERISATIONS = ("factored", "direct")
NORMALISATIONS = ("softmax", "linear")


@dataclass(frozen=True)
class HeadSettings:
    """One minimal head.

    ``query``: what the query is made of when the encoding adds rows to the input, a vector that is the same at every
    length (``shared``) or the row of the last position (``positional``). ``parameterisation``: query and key vectors
    (``factored``) or the carriers themselves (``direct``, rotary only). ``normalisation``: ``softmax`` attention, or
    the ``linear`` control, whose output Σ_j f e_{x_j} is not normalised. ``init_std`` scales the trained vectors at
    the start, in units of 1/√d for matrices.
    """

    encoding: Encoding = field(default_factory=Rotary)
    offset: int = 5
    train_length: int = 16
    vocab_size: int = 16
    head_dim: int = 32
    query: str = "shared"
    parameterisation: str = "factored"
    normalisation: str = "softmax"
    init_std: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(isinstance(self.encoding, Encoding), "encoding", self.encoding, "an Encoding (see encodings.registry)")
        require_integer("train_length", self.train_length, 1)
        require_integer("offset", self.offset, 0)
        last = self.train_length - 1
        require(self.offset <= last, "offset", self.offset, f"in 0 … train_length - 1 = {last}")
        require_integer("head_dim", self.head_dim, 1)
        require(self.init_std >= 0, "init_std", self.init_std, "a number ≥ 0")
        require_integer("seed", self.seed, 0)
        require_choice("query", self.query, QUERIES)
        require_choice("parameterisation", self.parameterisation, PARAMETERISATIONS)
        require_choice("normalisation", self.normalisation, NORMALISATIONS)
        self.encoding.validate(ModelShape(self.head_dim, self.head_dim))
        has_carriers = self.encoding.carrier_features(torch.zeros(1, dtype=torch.long), self.head_dim) is not None
        allowed = f"factored for the encoding {self.encoding.name!r}, which has no carriers"
        require(has_carriers or self.parameterisation != "direct", "parameterisation", self.parameterisation, allowed)
        FixedOffsetRetrieval(self.vocab_size, self.offset)  # validates vocab_size

    @property
    def task(self) -> FixedOffsetRetrieval:
        return FixedOffsetRetrieval(vocab_size=self.vocab_size, offset=self.offset)

    @property
    def structure(self) -> tuple:
        """What heads of one batch must share; they may differ in offset, initial scale and seed."""
        names = ("encoding", "vocab_size", "head_dim", "train_length", "query", "parameterisation", "normalisation")
        return tuple(getattr(self, name) for name in names)


def initial_parameters(head: HeadSettings) -> Parameters:
    """The weights of one head before training, float64, from its seed alone."""
    draw = generator(head.seed, "model")
    d = head.head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    if head.parameterisation == "direct":
        return {"amplitudes": head.init_std * normal(d)}
    shape = ModelShape(width=d, head_dim=d)
    parameters = head.encoding.initial_parameters(shape, draw)
    if head.encoding.rows(torch.zeros(1, 1, dtype=torch.long), {k: v[None] for k, v in parameters.items()}, d) is None:
        return parameters | {"query": head.init_std * normal(d), "key": head.init_std * normal(d)}
    parameters |= {"w_query": head.init_std * normal(d, d) / d**0.5, "w_key": head.init_std * normal(d, d) / d**0.5}
    return parameters | ({"shared_query": normal(d)} if head.query == "shared" else {})


class HeadBatch:
    """Minimal heads of one structure, stacked along a leading ``heads`` axis; see the module's docstring.

    ``parameters`` maps names to tensors of shape (heads, …). ``ValueError`` if the heads differ in structure.
    """

    def __init__(
        self, heads: Sequence[HeadSettings], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64
    ) -> None:
        require(len(heads) > 0, "heads", list(heads), "at least one HeadSettings")
        same = len({head.structure for head in heads}) == 1
        require(same, "heads", len(heads), "of one structure (HeadSettings.structure)")
        self.heads, self.device = tuple(heads), resolve_device(device, dtype)
        single = [initial_parameters(head) for head in heads]
        self.parameters: Parameters = {
            name: torch.stack([parameters[name] for parameters in single]).to(self.device, dtype) for name in single[0]
        }
        self.encoding = heads[0].encoding
        self.offsets = torch.tensor([head.offset for head in heads], device=self.device)

    def __len__(self) -> int:
        return len(self.heads)

    def logits(
        self, positions: Int[Tensor, "heads length"], query_index: Int[Tensor, "heads"]
    ) -> Float[Tensor, "heads length"]:
        """ℓ(i, j) for the query at ``query_index`` and every key j; keys after the query get −∞ in ``weights``."""
        p = self.parameters
        at_query = positions.expand(len(self), -1).gather(1, query_index[:, None])
        if "amplitudes" in p:
            features = self.encoding.carrier_features(at_query - positions, p["amplitudes"].shape[-1])
            return (features.to(p["amplitudes"]) * p["amplitudes"][:, None]).sum(-1)
        d = self.heads[0].head_dim
        rows = self.encoding.rows(positions, p, d)
        if rows is None:
            query, keys = p["query"][:, None], p["key"][:, None].expand(-1, positions.shape[1], -1)
        else:
            rows = rows.to(p["w_key"])
            at_end = rows.expand(len(self), -1, -1).gather(1, query_index[:, None, None].expand(-1, 1, d))
            query = (p["shared_query"][:, None] if "shared_query" in p else at_end) @ p["w_query"].mT
            keys = rows @ p["w_key"].mT
        query, keys = self.encoding.rotate(query, at_query), self.encoding.rotate(keys, positions)
        logits = (query * keys).sum(-1) / d**0.5
        bias = self.encoding.bias(at_query, positions, p, num_heads=1)
        return logits if bias is None else logits + bias[:, 0, 0]

    def attention(self, length: int) -> Float[Tensor, "heads length"]:
        """The weights a_j (softmax) or scores f (linear) at one test length, for keys j = 0 … length − 1."""
        logits = self.kernel(length).flip(-1)
        return logits.softmax(-1) if self.heads[0].normalisation == "softmax" else logits

    def kernel(self, length: int) -> Float[Tensor, "heads length"]:
        """f(δ) for δ = 0 … length − 1: the logit of the key δ steps before the last position."""
        require_integer("length", length, 1)
        positions = self.encoding.position_ids(length).to(self.device)
        return self.logits(positions, torch.full((len(self),), length - 1, device=self.device)).flip(-1)

    def carriers(self) -> Complex[Tensor, "heads num_carriers"]:
        """The complex amplitudes c_r of each rotary head's kernel; ``ValueError`` for an encoding without carriers."""
        if "amplitudes" in self.parameters:
            real, imaginary = self.parameters["amplitudes"].chunk(2, dim=-1)
            return torch.complex(real, imaginary)
        has_content = "query" in self.parameters
        carriers = self.encoding.carriers(self.parameters["query"], self.parameters["key"]) if has_content else None
        require(carriers is not None, "encoding", self.encoding.name, "one with carriers (a rotary one)")
        return carriers

    def query_direction(self) -> Float[Tensor, "heads width"]:
        """û, the unit vector along W_Kᵀ W_Q u: a head with a shared query ranks position rows by p_j·û (T5).

        ``ValueError`` for heads whose query is not shared or not made of rows.
        """
        p = self.parameters
        require("shared_query" in p, "query", self.heads[0].query, "shared, with an encoding that adds rows")
        direction = (p["shared_query"][:, None] @ p["w_query"].mT @ p["w_key"]).squeeze(1)
        return direction / direction.norm(dim=-1, keepdim=True)

    def select(self, index: Sequence[int]) -> "HeadBatch":
        """The heads at ``index``, in that order and with repeats, as a batch that shares no memory with this one."""
        require(len(index) > 0, "index", index, "at least one head")
        chosen = copy(self)
        chosen.heads = tuple(self.heads[i] for i in index)
        where = torch.as_tensor(index, device=self.device)
        chosen.parameters = {name: value.detach()[where] for name, value in self.parameters.items()}
        chosen.offsets = self.offsets[where]
        return chosen


def batches(heads: Iterable[HeadSettings]) -> list[list[HeadSettings]]:
    """Heads grouped by structure, in order of first appearance."""
    order: dict[tuple, int] = {}
    heads = list(heads)
    for head in heads:
        order.setdefault(head.structure, len(order))
    ranked = sorted(heads, key=lambda head: order[head.structure])
    return [list(group) for _, group in groupby(ranked, key=lambda head: head.structure)]
