"""Random streams: every draw comes from a generator that says what it is for."""

import numpy as np
import torch

from helpers.validation import require, require_choice

STREAMS = ("model", "data", "evaluation")


def generator(seed: int, stream: str, *path: int) -> torch.Generator:
    """A CPU generator for one purpose of one run.

    ``stream`` separates initial weights (``model``) from training data (``data``) from test data (``evaluation``), so
    the same ``seed`` never feeds two of them. ``path`` separates further draws of one stream (a length, say). Streams
    are derived with numpy's ``SeedSequence``, so nearby seeds are unrelated.
    """
    require(isinstance(seed, int) and seed >= 0, "seed", seed, "an integer ≥ 0")
    require_choice("stream", stream, STREAMS)
    state = np.random.SeedSequence([seed, STREAMS.index(stream), *path]).generate_state(2, np.uint32)
    return torch.Generator().manual_seed((int(state[0]) << 31) | (int(state[1]) >> 1))
