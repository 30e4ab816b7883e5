"""A decoder-only transformer, as a batch: models that differ in their seed alone, stacked along a leading axis.

Every parameter and every activation has that leading ``models`` axis, so one program of batched matrix products runs
them all. There is one definition of the forward pass: what it computes on the way is named (``SITES``), and a hook on
a name sees the value and may replace it.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from helpers.devices import require_dtype
from helpers.encodings.base import Parameters
from helpers.seeding import generator
from helpers.transformer.settings import TransformerSettings
from helpers.validation import require, require_choice

Hook = Callable[[Tensor], Tensor | None]
Hooks = Mapping[str, Hook]

SITES = ("residual", "queries", "keys", "values", "logits", "weights", "heads", "attention", "mlp")
"""What can be hooked in each layer, as ``"{layer}.{site}"`` with layers counted from 0.

``residual``: the stream that enters the layer, (models, batch, length, width). ``queries``, ``keys`` (both after
rotation) and ``values``: (models, batch, heads, length, head_dim). ``logits``: ℓ(i, j) = q·κ/√d + bias before the
causal mask, and ``weights``, their softmax over j ≤ i: (models, batch, heads, queries, keys). ``heads``: what each
head reads, Σ_j a_j v_j, (models, batch, heads, length, head_dim). ``attention`` and ``mlp``: what the two blocks add to
the stream. ``"final"`` is the stream that leaves the last layer.
"""


def site(layer: int, name: str) -> str:
    """The key of a hook on ``name``, one of ``SITES``, in ``layer`` (from 0)."""
    require_choice("site", name, SITES)
    return f"{layer}.{name}"


def initial_parameters(settings: TransformerSettings) -> Parameters:
    """The weights of one model before training, float64, from its seed alone.

    Embedding rows are N(0, embedding_std²), matrices N(0, 1/fan-in), and the two that write to the stream are divided
    by √(2·num_layers) besides, so that the stream keeps its size with depth (Radford et al. 2019, §2.3).
    """
    draw = generator(settings.seed, "model")
    width, hidden = settings.width, settings.mlp_ratio * settings.width

    def normal(rows: int, columns: int, std: float) -> Tensor:
        return std * torch.randn(rows, columns, generator=draw, dtype=torch.float64)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return normal(rows, columns, scale * rows**-0.5)

    parameters = {"embedding": normal(settings.vocab_size, width, settings.embedding_std)}
    residual = (2 * settings.num_layers) ** -0.5
    for layer in range(settings.num_layers):
        parameters |= {
            f"{layer}.qkv": matrix(width, 3 * width),
            f"{layer}.out": matrix(width, width, residual),
            f"{layer}.up": matrix(width, hidden),
            f"{layer}.down": matrix(hidden, width, residual),
        }
    parameters["read_out"] = matrix(width, settings.vocab_size)
    own = settings.encoding.initial_parameters(settings.shape, draw)
    return parameters | {f"encoding.{name}": value for name, value in own.items()}


class TransformerBatch:
    """Transformers of one structure, stacked along a leading ``models`` axis; see the module's docstring.

    ``parameters`` maps names to tensors of shape (models, …): the models' initial weights, or those given.
    ``ValueError`` if the models differ in more than their seed. Pre-norm: x + attention(norm(x)), then
    x + mlp(norm(x)). There are no biases, and the norm has no gain: the matrix that follows it would absorb one.
    """

    def __init__(
        self,
        models: Sequence[TransformerSettings],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        parameters: Parameters | None = None,
    ) -> None:
        require(len(models) > 0, "models", list(models), "at least one TransformerSettings")
        require(len({m.structure for m in models}) == 1, "models", len(models), "of one structure, seeds apart")
        self.models, self.device, self.dtype = tuple(models), torch.device(device), dtype
        require_dtype(self.device, dtype)
        if parameters is None:
            single = [initial_parameters(model) for model in models]
            parameters = {name: torch.stack([weights[name] for weights in single]) for name in single[0]}
        self.parameters = {name: value.to(self.device, dtype) for name, value in parameters.items()}

    def __len__(self) -> int:
        return len(self.models)

    @property
    def settings(self) -> TransformerSettings:
        """What all the models share; its seed is the first one's."""
        return self.models[0]

    def select(self, models: slice) -> "TransformerBatch":
        """A batch of some of the models, with copies of their parameters."""
        parameters = {name: value[models].detach().clone() for name, value in self.parameters.items()}
        return TransformerBatch(self.models[models], self.device, self.dtype, parameters)

    def encoding_parameters(self) -> Parameters:
        """What the encoding learns, under the encoding's own names."""
        prefix = "encoding."
        return {name.removeprefix(prefix): p for name, p in self.parameters.items() if name.startswith(prefix)}

    def positions(self, length: int) -> Int[Tensor, "1 length"]:
        """The position ids of a test sequence."""
        return self.settings.encoding.position_ids(length).to(self.device)

    def require_length(self, length: int) -> None:
        """``ValueError`` if the encoding has no position ids, rows or biases for sequences of this length."""
        encoding, parameters, ids = self.settings.encoding, self.encoding_parameters(), self.positions(length)
        encoding.rows(ids, parameters, self.settings.width)
        encoding.bias(ids[:, -1:], ids, parameters, self.settings.num_heads)

    def forward(
        self,
        tokens: Int[Tensor, "models batch length"],
        positions: Int[Tensor, "#models length"] | None = None,
        hooks: Hooks | None = None,
    ) -> Float[Tensor, "models batch length vocab_size"]:
        """The logits of the next answer at every position; position t sees tokens 0 … t.

        ``positions`` are the encoding's ids, by default those of a test sequence; any ids are taken. ``hooks`` maps
        sites (``site(layer, name)`` or ``"final"``) to functions of their value; what one returns, unless None,
        replaces the value. ``ValueError`` for a site that does not exist.
        """
        hooks = hooks or {}
        require_sites(hooks, self.settings.num_layers)
        positions = self.positions(tokens.shape[-1]) if positions is None else positions.to(self.device)
        x = self.embed(tokens.to(self.device), positions)
        bias = self.bias(positions)
        for layer in range(self.settings.num_layers):
            x = visit(hooks, f"{layer}.residual", x)
            x = x + visit(hooks, f"{layer}.attention", self.attention(layer, normalise(x), positions, bias, hooks))
            x = x + visit(hooks, f"{layer}.mlp", self.mlp(layer, normalise(x)))
        x = visit(hooks, "final", x)
        return multiply(normalise(x), self.parameters["read_out"])

    __call__ = forward

    def embed(
        self, tokens: Int[Tensor, "models batch length"], positions: Int[Tensor, "#models length"]
    ) -> Float[Tensor, "models batch length width"]:
        """The stream that enters the first layer: a row a token, and the encoding's row of its position."""
        table = self.parameters["embedding"]
        first = torch.arange(len(self), device=self.device)[:, None, None] * table.shape[1]
        x = F.embedding(tokens + first, table.flatten(0, 1))
        rows = self.settings.encoding.rows(positions, self.encoding_parameters(), self.settings.width)
        return x if rows is None else x + rows.to(x.dtype)[:, None]

    def bias(self, positions: Int[Tensor, "#models length"]) -> Float[Tensor, "#models 1 heads length length"] | None:
        """What the encoding adds to the logits of every layer."""
        s = self.settings
        bias = s.encoding.bias(positions, positions, self.encoding_parameters(), s.num_heads)
        return None if bias is None else bias.to(self.dtype)[:, None]

    def attention(
        self,
        layer: int,
        x: Float[Tensor, "models batch length width"],
        positions: Int[Tensor, "#models length"],
        bias: Float[Tensor, "#models 1 heads length length"] | None,
        hooks: Hooks,
    ) -> Float[Tensor, "models batch length width"]:
        """One layer of causal self-attention."""
        s = self.settings
        mixed = multiply(x, self.parameters[f"{layer}.qkv"]).unflatten(-1, (3, s.num_heads, s.head_dim))
        queries, keys, values = (part.transpose(2, 3) for part in mixed.unbind(3))
        queries = visit(hooks, f"{layer}.queries", s.encoding.rotate(queries, positions))
        keys = visit(hooks, f"{layer}.keys", s.encoding.rotate(keys, positions))
        values = visit(hooks, f"{layer}.values", values)
        if bias is None and f"{layer}.logits" not in hooks and f"{layer}.weights" not in hooks:
            flat = (part.flatten(0, 1) for part in (queries, keys, values))
            read = F.scaled_dot_product_attention(*flat, is_causal=True).unflatten(0, x.shape[:2])
        else:
            logits = (queries * s.head_dim**-0.5) @ keys.mT
            logits = visit(hooks, f"{layer}.logits", logits if bias is None else logits + bias)
            read = visit(hooks, f"{layer}.weights", (logits + causal_mask(logits)).softmax(-1)) @ values
        read = visit(hooks, f"{layer}.heads", read).transpose(2, 3).flatten(-2)
        return multiply(read, self.parameters[f"{layer}.out"])

    def mlp(
        self, layer: int, x: Float[Tensor, "models batch length width"]
    ) -> Float[Tensor, "models batch length width"]:
        """One layer's two-matrix perceptron."""
        hidden = F.relu(multiply(x, self.parameters[f"{layer}.up"]))
        return multiply(hidden, self.parameters[f"{layer}.down"])


def visit(hooks: Hooks, name: str, value: Tensor) -> Tensor:
    """``value``, or what the hook on ``name`` puts in its place."""
    changed = hooks[name](value) if name in hooks else None
    return value if changed is None else changed


def require_sites(hooks: Hooks, num_layers: int) -> None:
    """``ValueError`` naming the first hook on a site that no layer has."""
    if hooks:
        known = [site(layer, name) for layer in range(num_layers) for name in SITES] + ["final"]
        for name in hooks:
            require_choice("site", name, known)


def normalise(x: Float[Tensor, "*shape width"]) -> Float[Tensor, "*shape width"]:
    """Layer normalisation over the width, without gain and shift."""
    return F.layer_norm(x, x.shape[-1:])


def multiply(
    x: Float[Tensor, "models batch length rows"], matrix: Float[Tensor, "models rows columns"]
) -> Float[Tensor, "models batch length columns"]:
    """Each model's activations times its own matrix."""
    return (x.flatten(1, 2) @ matrix).unflatten(1, x.shape[1:3])


def causal_mask(logits: Float[Tensor, "*shape length length"]) -> Float[Tensor, "length length"]:
    """0 where the key is not after the query, −∞ where it is."""
    size = logits.shape[-1]
    return torch.full((size, size), -torch.inf, dtype=logits.dtype, device=logits.device).triu(1)
