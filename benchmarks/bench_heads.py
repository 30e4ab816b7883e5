"""Training 64 minimal heads as one batch, against the same 64 one after another in the same process.

The plain way differs in nothing but the loop: the same settings, seeds and steps, and bit for bit the same weights.
"""

import torch
from _timing import best_of

from helpers.encodings import Rotary
from helpers.heads import HeadSettings
from helpers.training import TrainSettings, train

STEPS = 100
HEADS = [HeadSettings(Rotary(), offset, seed=seed) for offset in (3, 5, 7, 9) for seed in range(16)]
TRAINING = TrainSettings(steps=STEPS)


def one_after_another() -> list[torch.Tensor]:
    """Each head in a batch of its own."""
    return [train([head], TRAINING)[0].batch.parameters["query"][0] for head in HEADS]


def together() -> torch.Tensor:
    """All heads in one batch."""
    return train(HEADS, TRAINING)[0].batch.parameters["query"]


def main() -> None:
    torch.set_num_threads(1)
    assert torch.equal(together(), torch.stack(one_after_another())), "the two ways must give the same weights"
    seconds = best_of({"one after another": one_after_another, "as one batch": together}, rounds=3)
    print(f"{len(HEADS)} rotary heads, {STEPS} steps, one thread, best of 3")
    for name, total in seconds.items():
        print(f"  {name:18} {total:7.3f} s   {1e6 * total / len(HEADS) / STEPS:7.1f} µs a head and step")
    print(f"  ratio {seconds['one after another'] / seconds['as one batch']:.1f} (wanted: at least 8)")


if __name__ == "__main__":
    main()
