"""Decoder-only transformers, batched over seeds: model, training, evaluation, inspection, storage."""

from helpers.transformer.model import SITES, Hook, Hooks, TransformerBatch, initial_parameters, site
from helpers.transformer.settings import TransformerSettings
from helpers.transformer.training import TrainedTransformers, TransformerTraining, train_transformers

__all__ = [
    "SITES",
    "Hook",
    "Hooks",
    "TrainedTransformers",
    "TransformerBatch",
    "TransformerSettings",
    "TransformerTraining",
    "initial_parameters",
    "site",
    "train_transformers",
]
