"""Random streams: reproducible, and never the same for two purposes."""

from itertools import product

import numpy as np
import pytest
import torch

from helpers.seeding import STREAMS, generator


def first_draws(source: torch.Generator) -> tuple[int, ...]:
    return tuple(torch.randint(2**31, (4,), generator=source).tolist())


def test_the_same_arguments_give_the_same_stream() -> None:
    assert first_draws(generator(3, "data", 48)) == first_draws(generator(3, "data", 48))
    assert first_draws(generator(np.int64(3), "data")) == first_draws(generator(3, "data"))


def test_seeds_streams_and_paths_never_share_draws() -> None:
    """Four draws of 31 bits: two of these 1,620 streams would agree by accident with probability 3e-31."""
    seeds = [*range(60), 2**32, 2**32 + 1, 2**40 + 5]
    paths = [(), (0,), (1,), (0, 0), (48,), (0, 48)]
    streams = [first_draws(generator(s, stream, *path)) for s, stream, path in product(seeds, STREAMS, paths)]
    assert len(set(streams)) == len(streams)


def test_nearby_seeds_are_uncorrelated() -> None:
    """For independent normal rows of 1,000, |r| of a pair exceeds 6/√1000 with probability 2e-9."""
    rows = torch.stack([torch.randn(1000, generator=generator(seed, "model")) for seed in range(20)])
    correlations = torch.corrcoef(rows) - torch.eye(20)
    assert correlations.abs().max() < 6 / 1000**0.5


def test_torchs_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    torch.rand(3, generator=generator(0, "model"))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("seed", "stream", "message"),
    [
        (-1, "data", "seed=-1 is not allowed: seed must be an integer ≥ 0"),
        (1.5, "data", "seed=1.5 is not allowed: seed must be an integer ≥ 0"),
        (0, "dat", r"stream='dat' is not allowed: .* model, data, evaluation \(did you mean 'data'\?\)"),
    ],
)
def test_bad_seeds_and_streams_are_named(seed: object, stream: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generator(seed, stream)
