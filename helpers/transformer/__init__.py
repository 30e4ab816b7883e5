"""Decoder-only transformers, batched over seeds: model, training, evaluation, inspection, storage."""

from helpers.transformer.model import SITES, Hook, Hooks, TransformerBatch, initial_parameters, site
from helpers.transformer.settings import TransformerSettings

__all__ = ["SITES", "Hook", "Hooks", "TransformerBatch", "TransformerSettings", "initial_parameters", "site"]
