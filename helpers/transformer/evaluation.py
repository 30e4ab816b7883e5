"""What trained transformers answer at any length: per sequence and per position. Results are tidy rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from helpers.seeding import generator
from helpers.tasks import IGNORE, Task
from helpers.transformer.model import Hooks, TransformerBatch
from helpers.transformer.parts import in_parts
from helpers.transformer.settings import TransformerSettings
from helpers.transformer.training import TrainedTransformers
from helpers.validation import require_integer

MAX_TOKENS = 2**13  # tokens a model reads at once


@dataclass(frozen=True)
class Answers:
    """Where models were right, and which positions count: (models, samples, length). ``right`` implies ``scored``."""

    right: Bool[Tensor, "models samples length"]
    scored: Bool[Tensor, "models samples length"]

    def accuracy(self) -> Float[Tensor, "models"]:
        """The share of scored positions answered right (whole-sequence accuracy)."""
        return self.right.sum((1, 2)) / self.scored.sum((1, 2))

    def exact(self) -> Float[Tensor, "models"]:
        """The share of sequences with every scored position right."""
        return (self.right == self.scored).all(-1).float().mean(-1)

    def by_position(self) -> Float[Tensor, "models length"]:
        """The share of sequences answered right at each position; NaN where none is scored."""
        return self.right.sum(1) / self.scored.sum(1)


def fresh_sequences(
    models: Sequence[TransformerSettings], task: Task, length: int, samples: int
) -> tuple[Int[Tensor, "models samples length"], Int[Tensor, "models samples length"]]:
    """``(tokens, labels)``, each model's from its own ``evaluation`` stream."""
    require_integer("samples", samples, 1)
    drawn = [task.sample(samples, length, generator(model.seed, "evaluation", length)) for model in models]
    tokens, labels = zip(*drawn, strict=True)
    return torch.stack(tokens), torch.stack(labels)


@torch.no_grad()
def answers(batch: TransformerBatch, task: Task, length: int, samples: int, hooks: Hooks | None = None) -> Answers:
    """The answers of the models to fresh sequences, under ``hooks`` if there are any; a tie goes to the smaller symbol.

    Sequences are read in groups of as equal size as can be, at most ``MAX_TOKENS`` tokens each (but one sequence).
    """
    tokens, labels = fresh_sequences(batch.models, task, length, samples)
    groups = min(samples, -(-samples * length // MAX_TOKENS))
    given = [batch(part, hooks=hooks).argmax(-1).cpu() for part in tokens.tensor_split(groups, dim=1)]
    scored = labels != IGNORE
    return Answers((torch.cat(given, dim=1) == labels) & scored, scored)


def answer_in_parts(batch: TransformerBatch, task: Task, length: int, samples: int) -> Answers:
    """``answers``, on all cores."""
    parts = in_parts(batch, lambda part, stop: answers(part, task, length, samples))
    return Answers(torch.cat([part.right for part in parts]), torch.cat([part.scored for part in parts]))


def describe_models(trained: TrainedTransformers, samples: int) -> list[dict[str, object]]:
    """The columns that say which model a row is about, one dict a model.

    ``status`` and ``loss`` tell how its training ended, ``in_range_accuracy`` is its accuracy at the training length: a
    model that is not ``fitted`` says nothing about extrapolation.
    """
    training, settings = trained.training, trained.batch.settings
    shared = {
        "encoding": settings.encoding.name,
        "task": training.task.name,
        "width": settings.width,
        "num_heads": settings.num_heads,
        "num_layers": settings.num_layers,
        "train_length": training.train_length,
        "chance": training.task.chance,
    }
    in_range = answer_in_parts(trained.batch, training.task, training.train_length, samples).accuracy()
    own = zip(trained.batch.models, trained.status, trained.final_loss().tolist(), in_range.tolist(), strict=True)
    return [
        shared | {"seed": model.seed, "status": status, "loss": loss, "in_range_accuracy": accuracy}
        for model, status, loss, accuracy in own
    ]


def evaluate_transformers(
    trained: Sequence[TrainedTransformers], lengths: Sequence[int], samples: int = 128
) -> pd.DataFrame:
    """One row a model and length.

    Columns besides those of ``describe_models``: ``length``; ``accuracy``, the share of scored positions answered
    right; ``exact``, the share of sequences without any error. ``ValueError`` before any work if an encoding cannot
    place the longest sequence.
    """
    for result in trained:
        result.batch.require_length(max(lengths))
    rows = []
    for result in trained:
        about = describe_models(result, samples)
        for length in lengths:
            found = answer_in_parts(result.batch, result.training.task, length, samples)
            numbers = zip(found.accuracy().tolist(), found.exact().tolist(), strict=True)
            rows += [
                model | {"length": length, "accuracy": accuracy, "exact": exact}
                for model, (accuracy, exact) in zip(about, numbers, strict=True)
            ]
    return pd.DataFrame(rows)


def position_accuracy(trained: Sequence[TrainedTransformers], length: int, samples: int = 256) -> pd.DataFrame:
    """One row a model and scored position of sequences of ``length``: ``position``, from 0, and ``accuracy`` there.

    The other columns are those of ``describe_models``. By causality the answers at a position do not depend on how much
    longer the sequence is, so one length tells all shorter ones. ``ValueError`` before any work if an encoding cannot
    place ``length`` tokens.
    """
    for result in trained:
        result.batch.require_length(length)
    rows = []
    for result in trained:
        found = answer_in_parts(result.batch, result.training.task, length, samples).by_position()
        for model, accuracies in zip(describe_models(result, samples), found.tolist(), strict=True):
            rows += [
                model | {"position": position, "accuracy": accuracy}
                for position, accuracy in enumerate(accuracies)
                if accuracy == accuracy  # NaN where nothing is scored
            ]
    return pd.DataFrame(rows)
