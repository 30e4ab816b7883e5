"""The transformer's forward pass: against two independent implementations, under shifted positions, with hooks."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from x_transformers import Decoder, TransformerWrapper

from helpers.encodings import Encoding, Learned, NoEncoding, Rotary, Sinusoidal, registry
from helpers.transformer import SITES, TransformerBatch, TransformerSettings, initial_parameters, site

SMALL = TransformerSettings(vocab_size=7, width=16, num_heads=2, num_layers=2)


@dataclass(frozen=True)
class Tilted(Encoding):
    """A learned bias for the tests: slope_h · (i − j), a slope for each head."""

    name = "tilted"
    label = "tilted"
    colour = "#000000"
    relative = True

    def initial_parameters(self, shape, generator):
        return {"slopes": torch.randn(shape.num_heads, generator=generator, dtype=torch.float64)}

    def bias(self, queries, keys, parameters, num_heads):
        return parameters["slopes"][:, :, None, None] * (queries[:, None, :, None] - keys[:, None, None, :])


def make(encoding: Encoding, seeds: int = 2, **changes) -> TransformerBatch:
    """Models in float64 with every parameter random, those that start at zero included."""
    models = [replace(SMALL, encoding=encoding, seed=seed, **changes) for seed in range(seeds)]
    batch = TransformerBatch(models, dtype=torch.float64)
    noise = torch.Generator().manual_seed(5)
    for value in batch.parameters.values():
        value += 0.2 * torch.randn(value.shape, generator=noise, dtype=value.dtype)
    return batch


def tokens_of(batch: TransformerBatch, length: int = 12, batch_size: int = 3) -> Tensor:
    shape = (len(batch), batch_size, length)
    return torch.randint(batch.settings.vocab_size, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 10, "num_heads": 4}, "width=10 is not allowed: width must be a multiple of num_heads=4"),
        ({"width": 6, "num_heads": 2}, "head_dim=3 is not allowed: head_dim must be even"),
        ({"encoding": "rotary"}, "encoding='rotary' is not allowed"),
        ({"vocab_size": 1}, "vocab_size=1 is not allowed: vocab_size must be an integer ≥ 2"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_heads": 2.0}, "num_heads=2.0"),
        ({"mlp_ratio": True}, "mlp_ratio=True"),
        ({"embedding_std": 0.0}, "embedding_std=0.0 is not allowed: embedding_std must be a number > 0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_a_wrong_setting_is_named(changes, message):
    with pytest.raises(ValueError, match="is not allowed") as error:
        replace(SMALL, **changes)
    assert message in str(error.value)


def test_models_of_a_batch_differ_in_their_seed_alone():
    with pytest.raises(ValueError, match="one structure"):
        TransformerBatch([SMALL, replace(SMALL, width=32)])
    with pytest.raises(ValueError, match="at least one"):
        TransformerBatch([])


@pytest.mark.parametrize("encoding", [NoEncoding(), Learned(table_length=12), Sinusoidal(), Tilted()])
def test_equals_torch_transformer_encoder_with_the_same_weights(encoding):
    batch = make(encoding, num_heads=4)
    tokens = tokens_of(batch)
    for m, model in enumerate(batch.models):
        p = {name: value[m] for name, value in batch.parameters.items()}
        layer = nn.TransformerEncoderLayer(
            model.width, model.num_heads, 4 * model.width, 0.0, "relu", batch_first=True, norm_first=True, bias=False
        )
        norm = nn.LayerNorm(model.width, elementwise_affine=False)
        encoder = nn.TransformerEncoder(layer, model.num_layers, norm, enable_nested_tensor=False).double().train()
        for i, block in enumerate(encoder.layers):
            block.load_state_dict(
                {
                    "self_attn.in_proj_weight": p[f"{i}.qkv"].T,
                    "self_attn.out_proj.weight": p[f"{i}.out"].T,
                    "linear1.weight": p[f"{i}.up"].T,
                    "linear2.weight": p[f"{i}.down"].T,
                    **{f"norm{n}.weight": torch.ones(model.width) for n in (1, 2)},
                }
            )
        ids = batch.positions(tokens.shape[-1])
        own = {name: value[m : m + 1] for name, value in batch.encoding_parameters().items()}
        rows = encoding.rows(ids, own, model.width)
        x = p["embedding"][tokens[m]] + (0 if rows is None else rows[0])
        mask = torch.full((len(ids[0]),) * 2, -torch.inf, dtype=torch.float64).triu(1)
        bias = encoding.bias(ids, ids, own, model.num_heads)
        if bias is not None:
            mask = (mask + bias[0]).repeat(tokens.shape[1], 1, 1)  # sequences outermost, then heads
        torch.testing.assert_close(batch(tokens)[m], encoder(x, mask=mask) @ p["read_out"], atol=1e-11, rtol=1e-11)


def test_equals_x_transformers_with_rotary_and_the_same_weights():
    batch = make(Rotary(), width=128, num_heads=2)  # x-transformers wants rotary heads of at least 32
    tokens = tokens_of(batch)
    for m, model in enumerate(batch.models):
        p = {name: value[m] for name, value in batch.parameters.items()}
        decoder = Decoder(
            dim=model.width,
            depth=model.num_layers,
            heads=model.num_heads,
            attn_dim_head=model.head_dim,
            rotary_pos_emb=True,
            rotary_emb_dim=model.head_dim,
            ff_mult=model.mlp_ratio,
            ff_no_bias=True,
            ff_custom_activation=nn.ReLU(),
        )
        other = TransformerWrapper(
            num_tokens=model.vocab_size, max_seq_len=64, use_abs_pos_emb=False, attn_layers=decoder
        ).double()
        with torch.no_grad():
            other.token_emb.emb.weight.copy_(p["embedding"])
            other.to_logits.weight.copy_(p["read_out"].T)
            for i in range(model.num_layers):
                attention, perceptron = decoder.layers[2 * i][1], decoder.layers[2 * i + 1][1].ff
                parts = p[f"{i}.qkv"].T.chunk(3)
                for linear, weight in zip((attention.to_q, attention.to_k, attention.to_v), parts, strict=True):
                    linear.weight.copy_(weight)
                attention.to_out.weight.copy_(p[f"{i}.out"].T)
                perceptron[0][0].weight.copy_(p[f"{i}.up"].T)
                perceptron[2].weight.copy_(p[f"{i}.down"].T)
            # Its angles come from float32 frequencies.
            torch.testing.assert_close(batch(tokens)[m], other(tokens[m]), atol=1e-5, rtol=1e-5)


def test_a_seed_alone_equals_the_same_seed_in_a_batch():
    batch = TransformerBatch([replace(SMALL, seed=seed) for seed in (3, 1, 4)], dtype=torch.float64)
    tokens = tokens_of(batch)
    for m, model in enumerate(batch.models):
        alone = TransformerBatch([model], dtype=torch.float64)
        for name, value in initial_parameters(model).items():
            assert torch.equal(batch.parameters[name][m], value)
        torch.testing.assert_close(alone(tokens[m : m + 1])[0], batch(tokens)[m], atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("name", [name for name in registry if registry[name].relative])
@settings(max_examples=15, deadline=None)
@given(shift=st.integers(1, 1000))
def test_relative_encodings_give_the_same_output_at_shifted_positions(name, shift):
    """T3, at every layer."""
    batch = make(registry.make(name))
    tokens, ids = tokens_of(batch), batch.positions(12)
    at_home, away = recorded(batch, tokens, ids), recorded(batch, tokens, ids + shift)
    for place, value in at_home.items():
        assert (value - away[place]).abs().max() < 1e-9, place


@pytest.mark.parametrize("encoding", [Learned(), Sinusoidal()])
@settings(max_examples=15, deadline=None)
@given(shift=st.integers(1, 1000))
def test_absolute_encodings_do_not(encoding, shift):
    batch = make(encoding)
    tokens, ids = tokens_of(batch), batch.positions(12)
    assert (batch(tokens, ids) - batch(tokens, ids + shift)).abs().max() > 1e-2


def recorded(batch: TransformerBatch, tokens: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """The value at the end of every layer, and the output."""
    values: dict[str, Tensor] = {}
    places = [site(layer, "residual") for layer in range(batch.settings.num_layers)] + ["final"]
    values["output"] = batch(tokens, ids, {place: keeper(values, place) for place in places})
    return values


def keeper(values: dict[str, Tensor], place: str) -> Callable[[Tensor], None]:
    def keep(value: Tensor) -> None:
        values[place] = value

    return keep


def test_each_model_may_have_its_own_positions():
    batch = make(Rotary(), seeds=2)
    tokens = tokens_of(batch)
    ids = torch.stack([torch.arange(12), torch.arange(12) ** 2])
    apart = torch.cat([batch(tokens, row[None])[m : m + 1] for m, row in enumerate(ids)])
    torch.testing.assert_close(batch(tokens, ids), apart, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("encoding", [Rotary(), Learned(), Tilted()])
def test_no_position_sees_a_later_token(encoding):
    batch = make(encoding)
    tokens = tokens_of(batch)
    changed = tokens.clone()
    changed[..., 7] = (changed[..., 7] + 1) % SMALL.vocab_size
    before, after = batch(tokens), batch(changed)
    torch.testing.assert_close(before[..., :7, :], after[..., :7, :], atol=1e-13, rtol=0)
    assert (before[..., 7, :] - after[..., 7, :]).abs().max() > 1e-3


@pytest.mark.parametrize("encoding", [Rotary(), Tilted()])
def test_hooks_see_what_the_fast_path_computes(encoding):
    batch = make(encoding)
    tokens, seen = tokens_of(batch), {}
    places = [site(layer, name) for layer in range(2) for name in SITES] + ["final"]
    hooked = batch(tokens, hooks={place: keeper(seen, place) for place in places})
    torch.testing.assert_close(hooked, batch(tokens), atol=1e-12, rtol=1e-12)
    later = torch.ones(12, 12, dtype=torch.bool).triu(1)
    for layer in range(2):
        part = {name: seen[site(layer, name)] for name in SITES}
        weights = part["logits"].masked_fill(later, -torch.inf).softmax(-1)
        torch.testing.assert_close(part["weights"], weights, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(part["heads"], weights @ part["values"], atol=1e-12, rtol=1e-12)
        stream = part["residual"] + part["attention"] + part["mlp"]
        following = seen["final"] if layer == 1 else seen[site(1, "residual")]
        torch.testing.assert_close(stream, following, atol=1e-12, rtol=1e-12)


def test_a_hook_replaces_the_value():
    batch = make(Rotary())
    tokens = tokens_of(batch)
    silent = batch(tokens, hooks={site(0, "heads"): torch.zeros_like, site(0, "mlp"): torch.zeros_like})
    rest = make(Rotary())
    for name in ("0.out", "0.down"):
        rest.parameters[name].zero_()
    torch.testing.assert_close(silent, rest(tokens), atol=1e-12, rtol=1e-12)


def test_a_hook_on_an_unknown_site_is_refused():
    batch = make(Rotary())
    with pytest.raises(ValueError, match=r"site='2\.weights' is not allowed"):
        batch(tokens_of(batch), hooks={"2.weights": torch.zeros_like})
    with pytest.raises(ValueError, match="site='pattern' is not allowed"):
        site(0, "pattern")


def test_a_table_that_is_too_short_is_refused_before_anything_is_computed():
    batch = make(Learned(table_length=10))
    batch.require_length(10)
    with pytest.raises(ValueError, match="position=10 is not allowed: position must be below table_length=10"):
        batch.require_length(11)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_gives_the_same_outputs():
    for encoding in (Rotary(), Learned(), Tilted()):
        models = [replace(SMALL, encoding=encoding, seed=seed) for seed in range(2)]
        tokens = tokens_of(TransformerBatch(models))
        outputs = [TransformerBatch(models, device, torch.float64)(tokens).cpu() for device in ("cpu", "cuda")]
        torch.testing.assert_close(*outputs, atol=1e-10, rtol=1e-10)
