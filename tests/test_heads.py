"""Batches of minimal heads: their logits are those of THEORY's formulas, settings that make no sense are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.encodings import Learned, NoEncoding, Rotary, ShiftedLearned, Sinusoidal
from helpers.encodings.rotary import PAIRS
from helpers.heads import HeadBatch, HeadSettings, batches, initial_parameters

TABLE = Learned(table_length=40)


def weights_of(head: HeadBatch, index: int = 0) -> dict[str, np.ndarray]:
    return {name: value[index].numpy() for name, value in head.parameters.items()}


def rows_of(head: HeadBatch, length: int, index: int = 0) -> np.ndarray:
    """The rows added to the input at 0 … length − 1, in numpy."""
    if "table" in head.parameters:
        return weights_of(head, index)["table"][:length]
    width = head.heads[0].head_dim
    phase = np.outer(np.arange(length), [1e4 ** (-2 * (j // 2) / width) for j in range(width)])
    return np.where(np.arange(width) % 2 == 0, np.sin(phase), np.cos(phase))


# Logits, kernels, weights


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 16).map(lambda half: 2 * half),
    st.floats(1.5, 1e6),
    st.sampled_from(PAIRS),
    st.sampled_from(["direct", "factored"]),
    st.integers(0, 2**31),
)
def test_a_rotary_kernel_is_the_sum_of_its_carriers(w: int, base: float, pairs: str, how: str, seed: int) -> None:
    """f(δ) = Σ_r |c_r| cos(θ_r δ − arg c_r) with the carriers that the head reports."""
    head = HeadBatch([HeadSettings(Rotary(base, pairs), head_dim=w, parameterisation=how, seed=seed)])
    c = head.carriers()[0].numpy()
    theta = np.array([base ** (-2 * r / w) for r in range(w // 2)])
    expected = (np.abs(c) * np.cos(np.outer(np.arange(24), theta) - np.angle(c))).sum(-1)
    np.testing.assert_allclose(head.kernel(24)[0], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("encoding", [TABLE, Sinusoidal()], ids=["learned", "sinusoidal"])
@pytest.mark.parametrize("query", ["shared", "positional"])
def test_absolute_logits_are_those_of_the_definition(encoding, query: str) -> None:
    """ℓ(i, j) = (W_Q u_i) · (W_K p_j) / √d with u_i one vector, or the row p_i."""
    head = HeadBatch([HeadSettings(encoding, head_dim=8, query=query, seed=seed) for seed in (3, 4)])
    for n in (16, 20):
        logits = head.logits(torch.arange(n)[None], torch.tensor([n - 1, n - 1]))
        for h in range(2):
            w, rows = weights_of(head, h), rows_of(head, n, h)
            u = w["shared_query"] if query == "shared" else rows[n - 1]
            expected = rows @ w["w_key"].T @ (w["w_query"] @ u) / 8**0.5
            np.testing.assert_allclose(logits[h], expected, rtol=0, atol=1e-12)


def test_a_shared_query_gives_old_keys_the_same_logits_at_every_length() -> None:
    head = HeadBatch([HeadSettings(TABLE, query="shared")])
    torch.testing.assert_close(head.kernel(30).flip(-1)[:, :16], head.kernel(16).flip(-1), rtol=0, atol=1e-12)
    positional = HeadBatch([HeadSettings(TABLE, query="positional")])
    assert (positional.kernel(30).flip(-1)[:, :16] - positional.kernel(16).flip(-1)).abs().max() > 0.1


def test_a_rotary_head_reproduces_its_kernel_at_every_length() -> None:
    """T2: a longer sequence adds offsets and leaves the logits of the old ones as they were."""
    head = HeadBatch([HeadSettings(seed=seed) for seed in range(4)])
    torch.testing.assert_close(head.kernel(200)[:, :16], head.kernel(16), rtol=0, atol=1e-12)
    old, new = head.attention(16).flip(-1), head.attention(200).flip(-1)[:, :16]
    torch.testing.assert_close(new / new[:, :1], old / old[:, :1], rtol=1e-10, atol=0)


def test_weights_are_the_softmax_of_the_kernel_and_linear_scores_the_kernel() -> None:
    soft, linear = HeadBatch([HeadSettings()]), HeadBatch([HeadSettings(normalisation="linear")])
    f = soft.kernel(12)[0].flip(0).numpy()
    np.testing.assert_allclose(soft.attention(12)[0], np.exp(f) / np.exp(f).sum(), rtol=1e-12)
    assert torch.equal(linear.attention(12), linear.kernel(12).flip(-1))
    assert torch.equal(linear.kernel(12), soft.kernel(12))


def test_no_encoding_gives_equal_weights() -> None:
    attention = HeadBatch([HeadSettings(NoEncoding(), seed=seed) for seed in range(3)]).attention(7)
    torch.testing.assert_close(attention, torch.full((3, 7), 1 / 7, dtype=torch.float64), rtol=1e-14, atol=0)


def test_heads_of_a_batch_may_be_asked_at_different_queries() -> None:
    head = HeadBatch([HeadSettings(TABLE, query="positional", seed=seed) for seed in range(2)])
    both = head.logits(torch.arange(16)[None], torch.tensor([5, 11]))
    for h, last in enumerate((5, 11)):
        alone = HeadBatch([head.heads[h]]).logits(torch.arange(16)[None], torch.tensor([last]))
        torch.testing.assert_close(both[h], alone[0], rtol=0, atol=1e-13)


def test_the_two_pair_conventions_are_the_same_family_of_direct_heads() -> None:
    same = [HeadBatch([HeadSettings(Rotary(pairs=pairs), parameterisation="direct")]).kernel(20) for pairs in PAIRS]
    assert torch.equal(*same)


# Starting weights


def test_starting_weights_come_from_the_seed_alone() -> None:
    one, two = HeadSettings(seed=1), HeadSettings(seed=2)
    assert all(map(torch.equal, initial_parameters(one).values(), initial_parameters(one).values()))
    assert not torch.equal(initial_parameters(one)["query"], initial_parameters(two)["query"])
    longer = HeadSettings(seed=1, train_length=32, offset=9, vocab_size=4)
    assert torch.equal(initial_parameters(one)["query"], initial_parameters(longer)["query"])


@pytest.mark.parametrize(
    ("settings", "shapes"),
    [
        ({"parameterisation": "direct"}, {"amplitudes": (32,)}),
        ({}, {"query": (32,), "key": (32,)}),
        ({"encoding": NoEncoding()}, {"query": (32,), "key": (32,)}),
        ({"encoding": Sinusoidal()}, {"w_query": (32, 32), "w_key": (32, 32), "shared_query": (32,)}),
        ({"encoding": Sinusoidal(), "query": "positional"}, {"w_query": (32, 32), "w_key": (32, 32)}),
        (
            {"encoding": TABLE},
            {"table": (40, 32), "w_query": (32, 32), "w_key": (32, 32), "shared_query": (32,)},
        ),
    ],
)
def test_what_a_head_trains(settings: dict[str, object], shapes: dict[str, tuple[int, ...]]) -> None:
    parameters = initial_parameters(HeadSettings(**settings))
    assert {name: tuple(value.shape) for name, value in parameters.items()} == shapes
    stacked = HeadBatch([HeadSettings(**settings, seed=seed) for seed in range(3)], dtype=torch.float32).parameters
    assert {name: tuple(value.shape) for name, value in stacked.items()} == {n: (3, *s) for n, s in shapes.items()}
    assert all(value.dtype == torch.float32 for value in stacked.values())


def test_the_initial_scale_multiplies_the_weights() -> None:
    """Matrices have entries of variance init_std²/d, vectors init_std²: 6 standard errors of a sample variance."""
    small, large = initial_parameters(HeadSettings(TABLE, init_std=0.5)), initial_parameters(HeadSettings(TABLE))
    torch.testing.assert_close(small["w_key"] * 2, large["w_key"], rtol=1e-15, atol=0)
    for name in ("w_query", "w_key"):
        assert abs(float(large[name].var()) * 32 - 1) < 6 * (2 / 1024) ** 0.5
    queries = torch.stack([initial_parameters(HeadSettings(init_std=3.0, seed=seed))["query"] for seed in range(32)])
    assert abs(float(queries.var()) / 9 - 1) < 6 * (2 / 1024) ** 0.5
    zero = HeadBatch([HeadSettings(init_std=0.0)])
    assert torch.equal(zero.kernel(5), torch.zeros(1, 5, dtype=torch.float64))


# Batches


def test_heads_are_grouped_by_structure_in_order_of_appearance() -> None:
    a, b = {"encoding": Rotary()}, {"encoding": NoEncoding()}
    heads = [HeadSettings(**a, seed=0), HeadSettings(**b, seed=1), HeadSettings(**a, seed=2, offset=3)]
    assert batches(heads) == [[heads[0], heads[2]], [heads[1]]]
    assert batches([]) == []
    assert batches(iter(heads)) == batches(heads)


def test_heads_of_different_structure_do_not_stack() -> None:
    with pytest.raises(ValueError, match=r"^heads=2 is not allowed: heads must be of one structure"):
        HeadBatch([HeadSettings(), HeadSettings(head_dim=8)])
    with pytest.raises(ValueError, match=r"^heads=\[\] is not allowed: heads must be at least one HeadSettings$"):
        HeadBatch([])


def test_carriers_are_refused_to_encodings_without() -> None:
    for encoding in (TABLE, NoEncoding(), Sinusoidal()):
        with pytest.raises(ValueError, match=f"^encoding='{encoding.name}' is not allowed: .* one with carriers"):
            HeadBatch([HeadSettings(encoding)]).carriers()


def test_a_shared_query_ranks_rows_by_their_part_along_its_direction() -> None:
    """ℓ(i, j) = |W_Kᵀ W_Q u| p_j · û / √d."""
    head = HeadBatch([HeadSettings(TABLE, head_dim=8, seed=seed) for seed in range(3)])
    direction = head.query_direction()
    for h in range(3):
        w = weights_of(head, h)
        slope = w["w_key"].T @ w["w_query"] @ w["shared_query"]
        np.testing.assert_allclose(direction[h], slope / np.linalg.norm(slope), rtol=0, atol=1e-14)
        along = w["table"][:20] @ direction[h].numpy() * np.linalg.norm(slope) / 8**0.5
        np.testing.assert_allclose(head.attention(20)[h], np.exp(along) / np.exp(along).sum(), rtol=1e-10)
    for other in (HeadSettings(TABLE, query="positional"), HeadSettings()):
        with pytest.raises(ValueError, match=f"^query='{other.query}' is not allowed: query must be shared, with an"):
            HeadBatch([other]).query_direction()


def test_selected_heads_are_those_heads_and_share_no_memory() -> None:
    batch = HeadBatch([HeadSettings(offset=o, seed=o) for o in (2, 3, 5)])
    chosen = batch.select([2, 0, 2])
    assert [head.offset for head in chosen.heads] == chosen.offsets.tolist() == [5, 2, 5]
    assert torch.equal(chosen.kernel(9), batch.kernel(9)[[2, 0, 2]])
    before = batch.kernel(9)
    chosen.parameters["query"].zero_()
    assert torch.equal(batch.kernel(9), before)
    assert len(batch) == 3
    with pytest.raises(ValueError, match=r"^index=\[\] is not allowed: index must be at least one head$"):
        batch.select([])


def test_an_absent_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device='tpu' is not allowed"):
        HeadBatch([HeadSettings()], device="tpu")


# Wrong settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offset": 16}, r"offset=16 is not allowed: offset must be in 0 … train_length - 1 = 15"),
        ({"offset": 40}, r"offset=40 is not allowed: offset must be in 0 … train_length - 1 = 15"),
        ({"offset": -1}, "offset=-1 is not allowed: offset must be an integer ≥ 0"),
        ({"offset": 2.0}, "offset=2.0 is not allowed: offset must be an integer ≥ 0"),
        ({"train_length": 0}, "train_length=0 is not allowed: train_length must be an integer ≥ 1"),
        ({"vocab_size": 1}, "vocab_size=1 is not allowed: vocab_size must be an integer ≥ 2"),
        ({"vocab_size": -3}, "vocab_size=-3 is not allowed: vocab_size must be an integer ≥ 2"),
        ({"head_dim": 0}, "head_dim=0 is not allowed: head_dim must be an integer ≥ 1"),
        ({"head_dim": 7}, r"head_dim=7 is not allowed: head_dim must be even for rotary \(a carrier is a pair\)"),
        ({"head_dim": 7, "encoding": Sinusoidal()}, "width=7 is not allowed: width must be even for sinusoidal"),
        ({"encoding": "rotary"}, r"encoding='rotary' is not allowed: encoding must be an Encoding \(see .*registry\)"),
        ({"query": "share"}, r"query='share' .* one of shared, positional \(did you mean 'shared'\?\)"),
        ({"parameterisation": "dirct"}, r"parameterisation='dirct' .* factored, direct \(did you mean 'direct'\?\)"),
        ({"normalisation": "none"}, "normalisation='none' is not allowed: .* one of softmax, linear"),
        ({"init_std": -0.1}, "init_std=-0.1 is not allowed: init_std must be a number ≥ 0"),
        ({"init_std": float("nan")}, "init_std=nan is not allowed: init_std must be a number ≥ 0"),
        ({"seed": -1}, "seed=-1 is not allowed: seed must be an integer ≥ 0"),
        ({"seed": 0.5}, "seed=0.5 is not allowed: seed must be an integer ≥ 0"),
        *(
            (
                {"parameterisation": "direct", "encoding": encoding},
                f"parameterisation='direct' is not allowed: parameterisation must be factored for the encoding "
                f"'{encoding.name}', which has no carriers",
            )
            for encoding in (TABLE, ShiftedLearned(), Sinusoidal(), NoEncoding())
        ),
    ],
)
def test_wrong_settings_are_one_line_that_names_them(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$") as error:
        HeadSettings(**settings)
    assert "\n" not in str(error.value)
