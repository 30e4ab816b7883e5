"""Decoder-only transformers, batched over seeds: model, training, evaluation, inspection, storage."""

from helpers.transformer.evaluation import evaluate_transformers, position_accuracy
from helpers.transformer.model import SITES, Hook, Hooks, TransformerBatch, initial_parameters, site
from helpers.transformer.settings import TransformerSettings
from helpers.transformer.storage import load_transformers, save_transformers
from helpers.transformer.training import TrainedTransformers, TransformerTraining, train_transformers

__all__ = [
    "SITES",
    "Hook",
    "Hooks",
    "TrainedTransformers",
    "TransformerBatch",
    "TransformerSettings",
    "TransformerTraining",
    "evaluate_transformers",
    "initial_parameters",
    "load_transformers",
    "position_accuracy",
    "save_transformers",
    "site",
    "train_transformers",
]
