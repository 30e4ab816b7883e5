"""Positional encodings against independent libraries, the papers' formulas, and the properties they are used for."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rotary_embedding_torch import RotaryEmbedding
from transformers import LlamaConfig
from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings
from transformers.models.llama import modeling_llama as llama
from x_transformers import x_transformers

from helpers.encodings import Encoding, Learned, ModelShape, NoEncoding, Rotary, ShiftedLearned, Sinusoidal, registry
from helpers.encodings.base import spread_over
from helpers.encodings.rotary import PAIRS, angles, frequencies
from helpers.heads import HeadBatch, HeadSettings

BASES = (100.0, 10_000.0, 500_000.0)
WIDTHS = (4, 6, 32)
widths = st.integers(1, 16).map(lambda half: 2 * half)
bases = st.floats(1.5, 1e6)
seeds = st.integers(0, 2**31)


def vectors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def paper_frequencies(width: int, base: float) -> np.ndarray:
    """θ_i = base^{−2(i−1)/d}, i = 1 … d/2 (Su et al., §3.2.2), written out on its own."""
    return np.array([base ** (-2 * (i - 1) / width) for i in range(1, width // 2 + 1)])


def half_order(width: int) -> list[int]:
    """Where the half convention keeps the coordinates 0 … width − 1 of the interleaved one."""
    return [*range(0, width, 2), *range(1, width, 2)]


def complex_rotation(x: torch.Tensor, positions: np.ndarray, base: float) -> np.ndarray:
    """Interleaved rotary as multiplication by e^{ipθ}, in numpy."""
    pairs = x.numpy().astype(np.float64).reshape(*x.shape[:-1], -1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(
        1j * np.outer(positions, paper_frequencies(x.shape[-1], base))
    )
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


# Rotary: which rotation


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("width", WIDTHS)
def test_frequencies_are_the_papers_and_those_of_three_libraries(width: int, base: float) -> None:
    ours = frequencies(width, base)
    assert ours.dtype == torch.float64
    np.testing.assert_allclose(ours, paper_frequencies(width, base), rtol=1e-14)
    config = LlamaConfig(head_dim=width, rope_parameters={"rope_theta": base, "rope_type": "default"})
    for theirs in (
        RotaryEmbedding(width, theta=base).freqs,
        x_transformers.RotaryEmbedding(width, base=base).inv_freq,
        llama.LlamaRotaryEmbedding(config).inv_freq,
    ):
        torch.testing.assert_close(ours.float(), theirs.detach().float(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rotary_interleaved_equals_rotary_embedding_torch(width: int, base: float) -> None:
    x = vectors(2, 3, 64, width)
    library = RotaryEmbedding(
        width, custom_freqs=torch.from_numpy(paper_frequencies(width, base)), cache_if_possible=False
    )
    ours = Rotary(base).rotate(x, torch.arange(64)[None])
    torch.testing.assert_close(ours, library.rotate_queries_or_keys(x).detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rotary_interleaved_equals_x_transformers(width: int, base: float) -> None:
    x, library = vectors(2, 3, 64, width), x_transformers.RotaryEmbedding(width)
    library.inv_freq = torch.from_numpy(paper_frequencies(width, base))
    freqs, scale = library.forward_from_seq_len(64)
    ours = Rotary(base).rotate(x, torch.arange(64)[None])
    torch.testing.assert_close(ours, x_transformers.apply_rotary_pos_emb(x, freqs, scale), rtol=0, atol=1e-10)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rotary_half_equals_the_llama_of_transformers(width: int, base: float) -> None:
    query, key, positions = vectors(2, 3, 64, width), vectors(2, 3, 64, width, seed=1), torch.arange(64)[None]
    phase = np.tile(np.outer(np.arange(64), paper_frequencies(width, base)), 2)
    cos, sin = torch.from_numpy(np.cos(phase))[None], torch.from_numpy(np.sin(phase))[None]
    encoding = Rotary(base, pairs="half")
    for ours, theirs in zip((query, key), llama.apply_rotary_pos_emb(query, key, cos, sin), strict=True):
        torch.testing.assert_close(encoding.rotate(ours, positions), theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rotary_half_equals_rotary_embedding_torch_in_the_other_order(width: int, base: float) -> None:
    x, order = vectors(2, 3, 64, width), half_order(width)
    library = RotaryEmbedding(
        width, custom_freqs=torch.from_numpy(paper_frequencies(width, base)), cache_if_possible=False
    )
    ours = Rotary(base, pairs="half").rotate(x[..., order], torch.arange(64)[None])
    theirs = library.rotate_queries_or_keys(x).detach()[..., order]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("width", WIDTHS)
def test_float32_agrees_with_the_libraries_as_they_come(width: int) -> None:
    """The libraries take angles in float32, so the phase is off by up to position × 6e-8: compare close to 0."""
    x = torch.nn.functional.normalize(vectors(1, 1, 8, width, dtype=torch.float32), dim=-1)
    positions = torch.arange(8)[None]
    interleaved, half = Rotary().rotate(x, positions), Rotary(pairs="half").rotate(x, positions)
    assert interleaved.dtype == half.dtype == torch.float32
    freqs, scale = x_transformers.RotaryEmbedding(width).forward_from_seq_len(8)
    cos, sin = llama.LlamaRotaryEmbedding(
        LlamaConfig(head_dim=width, rope_parameters={"rope_theta": 1e4, "rope_type": "default"})
    )(x, positions)
    expected = [
        (interleaved, RotaryEmbedding(width).rotate_queries_or_keys(x).detach()),
        (interleaved, x_transformers.apply_rotary_pos_emb(x, freqs, scale)),
        (half, llama.apply_rotary_pos_emb(x, x, cos, sin)[0]),
    ]
    for ours, theirs in expected:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("position", [0, 1, 512, 100_000, 1_000_000])
def test_float32_vectors_keep_their_phase_far_out(position: int) -> None:
    """Angles are float64, so float32 vectors at a million are as exact as at 1 (float32 angles are off by 0.03)."""
    x = torch.nn.functional.normalize(vectors(1, 1, 32, dtype=torch.float32), dim=-1)
    ours = Rotary().rotate(x, torch.tensor([[position]]))
    np.testing.assert_allclose(ours, complex_rotation(x, np.array([position]), 1e4), rtol=0, atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(widths, bases, seeds, st.integers(0, 5000))
def test_the_two_pair_conventions_are_one_rotation_in_two_orders(w: int, base: float, seed: int, start: int) -> None:
    x, positions, order = vectors(1, 5, w, seed=seed), start + torch.arange(5)[None], half_order(w)
    interleaved = Rotary(base).rotate(x, positions)
    half = Rotary(base, pairs="half").rotate(x[..., order], positions)
    torch.testing.assert_close(half, interleaved[..., order], rtol=0, atol=1e-12)


def test_without_the_permutation_the_conventions_differ_by_order_one() -> None:
    x = torch.nn.functional.normalize(vectors(1, 16, 8), dim=-1)
    positions = torch.arange(16)[None]
    apart = Rotary().rotate(x, positions) - Rotary(pairs="half").rotate(x, positions)
    assert apart.norm(dim=-1).max() > 0.5


def test_the_conventions_agree_on_a_single_pair_and_at_position_zero() -> None:
    x, positions = vectors(1, 9, 2), torch.arange(9)[None]
    assert torch.equal(Rotary().rotate(x, positions), Rotary(pairs="half").rotate(x, positions))
    assert torch.equal(Rotary().rotate(x[:, :1], positions[:, :1]), x[:, :1])


# Rotary: what it is for


@settings(deadline=None, max_examples=40)
@given(widths, bases, st.sampled_from(PAIRS), seeds, st.integers(0, 10**6))
def test_rotation_keeps_the_norm(w: int, base: float, pairs: str, seed: int, position: int) -> None:
    x = vectors(1, 1, w, seed=seed)
    turned = Rotary(base, pairs).rotate(x, torch.tensor([[position]]))
    torch.testing.assert_close(turned.norm(), x.norm(), rtol=1e-12, atol=0)


@settings(deadline=None, max_examples=40)
@given(widths, bases, st.sampled_from(PAIRS), seeds, st.integers(0, 100_000))
def test_logits_depend_on_the_difference_of_positions_alone(w: int, base: float, pairs: str, seed: int, s: int) -> None:
    """T1, to 1e-10 in float64."""
    encoding, ids = Rotary(base, pairs), torch.arange(12)[None]
    query, key = vectors(1, 12, w, seed=seed), vectors(1, 12, w, seed=seed + 1)
    at_zero = encoding.rotate(query, ids) @ encoding.rotate(key, ids).mT
    shifted = encoding.rotate(query, ids + s) @ encoding.rotate(key, ids + s).mT
    torch.testing.assert_close(shifted, at_zero, rtol=0, atol=1e-10 * w)


@settings(deadline=None, max_examples=30)
@given(widths, st.sampled_from(PAIRS), seeds)
def test_rotations_add_up(w: int, pairs: str, seed: int) -> None:
    encoding, x = Rotary(pairs=pairs), vectors(1, 1, w, seed=seed)
    twice = encoding.rotate(encoding.rotate(x, torch.tensor([[17]])), torch.tensor([[25]]))
    torch.testing.assert_close(twice, encoding.rotate(x, torch.tensor([[42]])), rtol=0, atol=1e-12)


def test_rotate_takes_any_number_of_axes_and_one_row_of_positions_or_one_a_model() -> None:
    x, positions = vectors(2, 3, 4, 5, 8), torch.stack([torch.arange(5), 7 + torch.arange(5)])
    both = Rotary().rotate(x, positions)
    for model in range(2):
        for first in range(3):
            alone = Rotary().rotate(x[model : model + 1, first], positions[model : model + 1])
            torch.testing.assert_close(both[model, first], alone[0], rtol=0, atol=1e-15)
    agreed = Rotary().rotate(x, positions[:1])
    assert torch.equal(agreed[0], both[0])
    assert spread_over(positions, x).shape == (2, 1, 1, 5)


# Carriers


@settings(deadline=None, max_examples=40)
@given(widths, bases, st.sampled_from(PAIRS), seeds)
def test_carriers_give_the_kernel_of_the_logits(w: int, base: float, pairs: str, seed: int) -> None:
    """f(δ) = Σ_r Re(c_r e^{−iθ_r δ}), the definition, against q_i · k_j / √d."""
    encoding, n = Rotary(base, pairs), 20
    query, key = vectors(1, 1, w, seed=seed), vectors(1, 1, w, seed=seed + 1)
    ids = torch.arange(n)[None]
    rotated = encoding.rotate(query, ids[:, -1:]) @ encoding.rotate(key.expand(1, n, w), ids).mT / w**0.5
    kernel = rotated[0, 0].flip(-1).numpy()
    carriers = encoding.carriers(query[0, 0], key[0, 0]).numpy()
    waves = np.exp(-1j * np.outer(np.arange(n), paper_frequencies(w, base)))
    np.testing.assert_allclose((waves * carriers).real.sum(-1), kernel, rtol=0, atol=1e-11)
    features = encoding.carrier_features(torch.arange(n), w).numpy()
    np.testing.assert_allclose(features @ np.concatenate([carriers.real, carriers.imag]), kernel, rtol=0, atol=1e-11)


def test_carrier_features_are_cosines_then_sines() -> None:
    features = Rotary(100.0).carrier_features(torch.arange(6).reshape(2, 3), 8)
    phase = np.arange(6).reshape(2, 3, 1) * paper_frequencies(8, 100.0)
    np.testing.assert_allclose(features, np.concatenate([np.cos(phase), np.sin(phase)], -1), rtol=0, atol=1e-14)


def test_a_carrier_of_phase_theta_k_peaks_at_offset_k() -> None:
    """Turning a constant key by −k before use makes q · key largest at offset k, with arg c_r = θ_r k."""
    encoding, k, w = Rotary(), 3, 8
    query = vectors(1, 1, w)
    key = encoding.rotate(query, torch.tensor([[k]]))
    carriers = encoding.carriers(query[0, 0], key[0, 0])
    np.testing.assert_allclose(np.angle(carriers), paper_frequencies(w, 1e4) * k, rtol=0, atol=1e-12)
    kernel = encoding.carrier_features(torch.arange(16), w) @ torch.cat([carriers.real, carriers.imag])
    assert int(kernel.argmax()) == k


def test_angles_are_float64_whatever_the_positions() -> None:
    phase = angles(torch.arange(3, dtype=torch.int32), torch.ones(2, dtype=torch.float32))
    assert phase.dtype == torch.float64
    assert phase.shape == (3, 2)


# Sinusoidal


@pytest.mark.parametrize("width", [2, 6, 32])
@pytest.mark.parametrize("base", [100.0, 10_000.0])
def test_sinusoidal_rows_are_those_of_the_paper(width: int, base: float) -> None:
    """PE(pos, 2i) = sin(pos / base^{2i/d}), PE(pos, 2i + 1) = cos(pos / base^{2i/d}) (Vaswani et al., §3.5)."""
    expected = np.zeros((1, 50, width))
    for pos in range(50):
        for i in range(width // 2):
            expected[0, pos, 2 * i] = np.sin(pos / base ** (2 * i / width))
            expected[0, pos, 2 * i + 1] = np.cos(pos / base ** (2 * i / width))
    rows = Sinusoidal(base).rows(torch.arange(50)[None], {}, width)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-12)


def test_sinusoidal_rows_are_those_of_transformers() -> None:
    theirs = create_sinusoidal_embeddings(40, 24, torch.empty(40, 24))
    rows = Sinusoidal().rows(torch.arange(40)[None], {}, 24)[0]
    torch.testing.assert_close(rows.float(), theirs, rtol=0, atol=1e-7)


@settings(deadline=None, max_examples=30)
@given(widths, st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 10_000))
def test_two_sinusoidal_rows_overlap_by_their_distance_alone(w: int, i: int, j: int, s: int) -> None:
    """p_i · p_j = Σ cos θ_r(i − j), the property the paper chose them for."""
    rows = Sinusoidal().rows(torch.tensor([[i, j, i + s, j + s]]), {}, w)[0]
    expected = np.cos((i - j) * paper_frequencies(w, 1e4)).sum()
    np.testing.assert_allclose([rows[0] @ rows[1], rows[2] @ rows[3]], expected, rtol=0, atol=1e-9)


# Learned rows


def table_of(encoding: Learned, width: int, models: int = 1) -> dict[str, torch.Tensor]:
    draws = [
        encoding.initial_parameters(ModelShape(width, width), torch.Generator().manual_seed(m)) for m in range(models)
    ]
    return {"table": torch.stack([draw["table"] for draw in draws])}


def test_learned_rows_are_those_of_the_table_at_each_models_positions() -> None:
    encoding, positions = Learned(table_length=20), torch.tensor([[0, 5, 19], [3, 3, 1], [7, 8, 9]])
    parameters = table_of(encoding, 4, models=3)
    rows = encoding.rows(positions, parameters, 4)
    for model, place in enumerate(positions.tolist()):
        assert torch.equal(rows[model], parameters["table"][model][place])
    agreed = encoding.rows(positions[:1], parameters, 4)
    assert torch.equal(agreed, parameters["table"][:, [0, 5, 19]])


def test_learned_rows_start_normal_with_the_given_spread() -> None:
    """20,000 entries: the mean is off by more than 6σ/√N, or the variance by 6√(2/N), with probability 4e-9."""
    table = table_of(Learned(table_length=1000, row_std=2.0), 20)["table"] / 2.0
    assert abs(float(table.mean())) < 6 / 20_000**0.5
    assert abs(float(table.var()) - 1) < 6 * (2 / 20_000) ** 0.5
    assert table.dtype == torch.float64


def test_rows_that_are_not_looked_up_have_exactly_zero_gradient() -> None:
    encoding = Learned(table_length=12)
    table = table_of(encoding, 4)["table"].requires_grad_()
    rows = encoding.rows(torch.arange(7)[None], {"table": table}, 4)
    (gradient,) = torch.autograd.grad(rows.square().sum(), table)
    assert torch.equal(gradient[0, 7:], torch.zeros(5, 4, dtype=torch.float64))
    assert bool((gradient[0, :7] != 0).all())


@pytest.mark.parametrize("length", [9, 10, 1000])
def test_a_length_beyond_the_table_is_named(length: int) -> None:
    encoding = Learned(table_length=8)
    with pytest.raises(ValueError, match=f"^position={length - 1} is not allowed: .* below table_length=8$"):
        encoding.rows(encoding.position_ids(length), table_of(encoding, 4), 4)
    head = HeadBatch([HeadSettings(encoding=encoding, offset=2, train_length=6)])
    with pytest.raises(ValueError, match=f"^position={length - 1} is not allowed"):
        head.attention(length)


def test_the_whole_table_may_be_used() -> None:
    assert HeadBatch([HeadSettings(encoding=Learned(table_length=8), offset=2, train_length=6)]).attention(8).shape == (
        1,
        8,
    )


def test_shifted_ids_are_consecutive_in_range_and_reach_every_row() -> None:
    """400 draws over 6 places miss one with probability 6 · (5/6)^400 < 1e-30."""
    encoding = ShiftedLearned(table_length=8)
    ids = encoding.position_ids(3, torch.Generator().manual_seed(0), draws=400)
    assert ids.shape == (400, 3)
    assert bool((ids.diff(dim=1) == 1).all())
    assert sorted(set(ids[:, 0].tolist())) == [0, 1, 2, 3, 4, 5]
    assert int(ids.max()) == 7


def test_shifted_ids_are_not_shifted_at_test_or_when_nothing_is_free() -> None:
    encoding = ShiftedLearned(table_length=8)
    assert encoding.position_ids(5).tolist() == [[0, 1, 2, 3, 4]]
    assert encoding.position_ids(8, torch.Generator().manual_seed(0), draws=50).unique(dim=0).tolist() == [[*range(8)]]


def test_a_training_length_beyond_the_shifted_table_is_named() -> None:
    with pytest.raises(ValueError, match=r"^length=9 is not allowed: length must be at most table_length=8$"):
        ShiftedLearned(table_length=8).position_ids(9, torch.Generator())


# Every encoding of the registry


@pytest.mark.parametrize("name", list(registry))
def test_every_encoding_describes_itself(name: str) -> None:
    encoding = registry.make(name)
    assert isinstance(encoding, Encoding)
    assert encoding.name == name
    assert encoding.label
    assert isinstance(encoding.relative, bool)
    assert len({registry[other].label for other in registry}) == len(list(registry))
    assert hash(encoding) == hash(registry.make(name)), "settings of one batch are compared"


@pytest.mark.parametrize("name", list(registry))
def test_logits_of_an_encoding_are_shift_invariant_exactly_if_it_says_so(name: str) -> None:
    head = HeadBatch([HeadSettings(encoding=registry.make(name), query="positional", seed=seed) for seed in range(3)])
    ids, last = torch.arange(12)[None], torch.full((3,), 11)
    change = (head.logits(ids + 9, last) - head.logits(ids, last)).abs().max()
    assert (change < 1e-10) if head.encoding.relative else (change > 1e-2)


@pytest.mark.parametrize("name", list(registry))
def test_test_ids_are_deterministic_and_need_no_generator(name: str) -> None:
    encoding = registry.make(name)
    assert torch.equal(encoding.position_ids(7), encoding.position_ids(7))
    assert encoding.position_ids(7).shape == (1, 7)


def test_no_encoding_leaves_everything_alone() -> None:
    encoding, x, ids = NoEncoding(), vectors(1, 5, 4), torch.arange(5)[None]
    assert encoding.rotate(x, ids) is x
    assert encoding.rows(ids, {}, 4) is None
    assert encoding.bias(ids, ids, {}, 1) is None
    assert encoding.carrier_features(ids, 4) is None
    assert encoding.carriers(x, x) is None
    assert encoding.initial_parameters(ModelShape(4, 4), torch.Generator()) == {}


# Wrong settings


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rotary(base=1.0), "base=1.0 is not allowed: base must be a number > 1"),
        (lambda: Rotary(base=float("nan")), "base=nan is not allowed: base must be a number > 1"),
        (lambda: Rotary(pairs="halves"), r"pairs='halves' .* one of interleaved, half \(did you mean 'half'\?\)"),
        (
            lambda: Rotary().validate(ModelShape(14, 7)),
            "head_dim=7 is not allowed: head_dim must be even for rotary .*",
        ),
        (lambda: frequencies(0), "head_dim=0 is not allowed: head_dim must be even and ≥ 2 .*"),
        (lambda: Sinusoidal(base=0.5), "base=0.5 is not allowed: base must be a number > 1"),
        (lambda: Sinusoidal().validate(ModelShape(7, 7)), "width=7 is not allowed: width must be even for sinusoidal"),
        (lambda: Learned(table_length=0), "table_length=0 is not allowed: table_length must be an integer ≥ 1"),
        (lambda: Learned(table_length=9.5), "table_length=9.5 is not allowed: table_length must be an integer ≥ 1"),
        (lambda: Learned(row_std=0.0), "row_std=0.0 is not allowed: row_std must be a number > 0"),
        (lambda: registry["rotery"], r"encoding='rotery' is not allowed: .* \(did you mean 'rotary'\?\)"),
        (
            lambda: registry.make("sinus"),
            "encoding='sinus' is not allowed: encoding must be one of .*learned.*rotary.*",
        ),
    ],
)
def test_wrong_settings_are_named(make, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        make()
