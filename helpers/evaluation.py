"""What trained heads do at any length: accuracy by sampling, and where their attention goes. Results are tidy rows."""

from collections.abc import Sequence

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from helpers.heads import HeadBatch, HeadSettings
from helpers.seeding import generator
from helpers.training import Trained
from helpers.validation import require, require_integer

MAX_ELEMENTS = 2**22  # token slots drawn at once
MAX_NESTED = 2**25  # the same for nested sequences, which are kept until all lengths are done


@torch.no_grad()
def correct(
    weights: Float[Tensor, "length"], vocab_size: int, offset: int, samples: int, source: torch.Generator
) -> Bool[Tensor, "samples"]:
    """For fresh random sequences, whether the head's most likely symbol is the right one.

    ``weights`` are a head's a_j (or linear scores) for keys j = 0 … length − 1 and a query at the last. The symbol is
    argmax_v Σ_j a_j 1[x_j = v]. A tie goes to the smaller symbol, which favours no symbol over sequences.
    """
    length = weights.shape[0]
    require(length > offset, "length", length, f"greater than offset={offset}")
    require_integer("samples", samples, 1)
    answers = []
    for start in range(0, samples, step := max(1, MAX_ELEMENTS // length)):
        size = min(step, samples - start)
        tokens = torch.randint(vocab_size, (size, length), generator=source).to(weights.device)
        mass = weights.new_zeros(size, vocab_size).scatter_add_(1, tokens, weights.expand(size, length))
        answers.append(mass.argmax(-1) == tokens[:, length - 1 - offset])
    return torch.cat(answers).cpu()


def sampled_accuracy(
    weights: Float[Tensor, "length"], vocab_size: int, offset: int, samples: int, source: torch.Generator
) -> tuple[float, float]:
    """``(accuracy, standard error)`` of ``correct`` over ``samples`` sequences.

    The error is that of a proportion under the Agresti–Coull correction, so that it is not 0 at accuracy 0 or 1. Both
    are NaN if the weights are not finite (a head that diverged).
    """
    if not bool(weights.isfinite().all()):
        return float("nan"), float("nan")
    right = int(correct(weights, vocab_size, offset, samples, source).sum())
    shrunk = (right + 2) / (samples + 4)
    return right / samples, (shrunk * (1 - shrunk) / (samples + 4)) ** 0.5


@torch.no_grad()
def accuracy_curves(
    kernels: Float[Tensor, "heads length"],
    vocab_size: int,
    offsets: Sequence[int],
    samples: int,
    sources: Sequence[torch.Generator],
) -> Float[Tensor, "heads length"]:
    """Accuracy of softmax heads with kernels f(0), f(1), … at every length n = 1 … length (entry n − 1), in one pass.

    The sequences are nested: a longer one has one more token in front, so that the step from n to n + 1 shows what the
    one new offset δ = n does. A symbol's score is Σ e^{f(δ) − f(k)}; the normaliser cancels in the arg-max. NaN where
    n ≤ k, and no task is defined. ``sources`` are one generator a head.
    """
    heads, length = kernels.shape
    require_integer("samples", samples, 1)
    require(max(offsets) < length, "length", length, f"greater than the largest offset, {max(offsets)}")
    group = max(1, MAX_NESTED // (length * samples))
    if heads > group:  # some heads at a time, so that memory does not grow with their number
        parts = [slice(start, start + group) for start in range(0, heads, group)]
        return torch.cat([accuracy_curves(kernels[p], vocab_size, offsets[p], samples, sources[p]) for p in parts])
    drawn = [torch.randint(vocab_size, (length, samples), generator=source) for source in sources]
    tokens = torch.stack(drawn, dim=1).to(kernels.device)[..., None]  # (length, heads, samples, 1)
    target = torch.as_tensor(offsets, device=kernels.device)
    answers = tokens[target, torch.arange(heads, device=kernels.device), :, 0]
    weights = (kernels - kernels.gather(1, target[:, None])).exp().T[..., None, None].expand(-1, -1, samples, 1)
    scores = kernels.new_zeros(heads, samples, vocab_size)
    curves = torch.full_like(kernels, torch.nan)
    for delta in range(length):
        scores.scatter_add_(-1, tokens[delta], weights[delta])
        accuracy = (scores.argmax(-1) == answers).to(kernels.dtype).mean(-1)
        curves[:, delta] = torch.where(target <= delta, accuracy, torch.nan)
    return curves


def describe(head: HeadSettings) -> dict[str, object]:
    """The columns that say which head a row is about."""
    return {
        "encoding": head.encoding.name,
        "query": head.query,
        "parameterisation": head.parameterisation,
        "normalisation": head.normalisation,
        "vocab_size": head.vocab_size,
        "head_dim": head.head_dim,
        "train_length": head.train_length,
        "offset": head.offset,
        "seed": head.seed,
    }


@torch.no_grad()
def evaluate(trained: Sequence[Trained], lengths: Sequence[int], samples: int = 2000) -> pd.DataFrame:
    """One row a head and length, test sequences drawn from the head's own ``evaluation`` stream.

    Columns besides those of ``describe``: ``status`` and ``loss`` of training; ``length``; ``accuracy`` and its
    ``standard_error``; ``in_range_accuracy`` (the accuracy at the training length); ``target_weight`` (a_k or f(k));
    ``peak_position`` (the arg-max key, from 0) and ``peak_delta`` (its distance from the query); ``mass_in_range`` (the
    weight on positions below the training length, softmax heads).
    """
    rows = []
    for result in trained:
        fitted = zip(result.status, result.final_loss().tolist(), strict=True)
        told = [describe(h) | {"status": s, "loss": x} for h, (s, x) in zip(result.batch.heads, fitted, strict=True)]
        in_range = accuracies(result.batch, result.batch.heads[0].train_length, samples)
        for length in lengths:
            measured = measure(result.batch, length, samples)
            rows += [
                a | {"length": length} | b | {"in_range_accuracy": c[0]}
                for a, b, c in zip(told, measured, in_range, strict=True)
            ]
    return pd.DataFrame(rows)


def accuracies(batch: HeadBatch, length: int, samples: int) -> list[tuple[float, float]]:
    """``sampled_accuracy`` of each head at one length."""
    return [
        sampled_accuracy(w, head.vocab_size, head.offset, samples, generator(head.seed, "evaluation", length))
        for w, head in zip(batch.attention(length), batch.heads, strict=True)
    ]


def measure(batch: HeadBatch, length: int, samples: int) -> list[dict[str, float]]:
    """Accuracy and attention of each head at one length."""
    weights = batch.attention(length)
    peak = weights.argmax(-1)
    rows = []
    for h, (accuracy, error) in enumerate(accuracies(batch, length, samples)):
        head = batch.heads[h]
        rows.append(
            {
                "accuracy": accuracy,
                "standard_error": error,
                "target_weight": float(weights[h, length - 1 - head.offset]),
                "peak_position": int(peak[h]),
                "peak_delta": length - 1 - int(peak[h]),
                "mass_in_range": float(weights[h, : head.train_length].sum()),
            }
        )
    return rows
