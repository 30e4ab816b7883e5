"""Random streams: every draw comes from a generator that says what it is for."""

import numpy as np
import torch

from helpers.validation import require_choice, require_integer

STREAMS = ("model", "data", "evaluation")


def generator(seed: int, stream: str, *path: int) -> torch.Generator:
    """A CPU generator for one purpose of one run.

    ``stream`` separates initial weights (``model``) from training data (``data``) from test data (``evaluation``), so
    the same ``seed`` never feeds two of them. ``path`` separates further draws of one stream (a length, say). Streams
    are derived with numpy's ``SeedSequence``, so nearby seeds are unrelated; stream and path are its spawn key, because
    entropy alone is padded with zeros and would make the path () equal to (0,). torch's CPU generator uses 32 bits.
    """
    require_integer("seed", seed, 0)
    require_choice("stream", stream, STREAMS)
    sequence = np.random.SeedSequence(seed, spawn_key=(STREAMS.index(stream), *path))
    return torch.Generator().manual_seed(int(sequence.generate_state(1)[0]))
