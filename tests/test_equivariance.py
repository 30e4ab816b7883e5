"""T1 and T2 on the minimal head: the kernel of a rotary head, and odds that no longer sequence changes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.encodings import Encoding, Learned, NoEncoding, Rotary, Sinusoidal
from helpers.heads import HeadBatch, HeadSettings

PRECISIONS = {torch.float64: 1e-10, torch.float32: 1e-4}


def head(encoding: Encoding, dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 1.0) -> HeadBatch:
    common = {"offset": 3, "train_length": 8, "head_dim": 8, "query": "positional", "init_std": scale}
    return HeadBatch([HeadSettings(encoding=encoding, seed=seed, **common)], dtype=dtype)


@settings(deadline=None, max_examples=40)
@given(
    query=st.integers(0, 40),
    back=st.integers(0, 40),
    shift=st.integers(0, 4000),
    base=st.floats(2, 1e6),
    seed=st.integers(0, 9),
    dtype=st.sampled_from(list(PRECISIONS)),
)
def test_t1_a_rotary_logit_is_the_wave_of_its_carriers_at_any_shift(query, back, shift, base, seed, dtype) -> None:
    key = max(0, query - back)
    batch = head(Rotary(base=base), dtype, seed)
    ids = torch.arange(query + 1)[None] + shift
    logit = float(batch.logits(ids, torch.tensor([query]))[0, key])
    # By hand: the paper's angles, and complex pairs of adjacent coordinates.
    theta = base ** (-2 * np.arange(4) / 8)
    q, kappa = (batch.parameters[name][0].double().numpy() for name in ("query", "key"))
    carriers = np.conj(q[0::2] + 1j * q[1::2]) * (kappa[0::2] + 1j * kappa[1::2]) / np.sqrt(8)
    wave = np.real(carriers * np.exp(-1j * theta * (query - key))).sum()
    assert logit == pytest.approx(wave, abs=PRECISIONS[dtype])


@pytest.mark.parametrize("encoding", [Rotary(), NoEncoding()])
@pytest.mark.parametrize("length", [9, 64, 1000])
def test_t2_longer_sequences_keep_the_odds_and_scale_all_old_weights_alike(encoding: Encoding, length: int) -> None:
    batch = head(encoding, scale=2.0)
    old, new = batch.attention(8)[0].flip(-1), batch.attention(length)[0].flip(-1)[:8]
    assert torch.allclose(new[:, None] / new, old[:, None] / old, rtol=1e-10, atol=0)
    total = batch.kernel(length)[0].exp()
    assert torch.allclose(new, old * total[:8].sum() / total.sum(), rtol=1e-10, atol=0)
    assert torch.allclose(batch.kernel(length)[0, :8], batch.kernel(8)[0], atol=1e-10)


@pytest.mark.parametrize("encoding", [Learned(), Sinusoidal()])
def test_t2_absolute_rows_do_not(encoding: Encoding) -> None:
    batch = head(encoding)
    old, new = batch.attention(8)[0].flip(-1), batch.attention(64)[0].flip(-1)[:8]
    assert float((new.log() - old.log()).std()) > 1e-3  # kept odds would leave 0, to rounding
