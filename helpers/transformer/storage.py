"""Saving and loading a trained set of transformers: one file, bit for bit, no code in it."""

import os
from dataclasses import asdict, fields
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from helpers import encodings, tasks
from helpers.devices import resolve_device
from helpers.registry import Registry
from helpers.transformer.model import TransformerBatch, initial_parameters
from helpers.transformer.settings import TransformerSettings
from helpers.transformer.training import TrainedTransformers, TransformerTraining
from helpers.validation import require

FORMAT = "length-generalization transformers, 1"


def save_transformers(trained: TrainedTransformers, path: Path | str) -> None:
    """Write settings, weights, losses and statuses to ``path``; the file is whole or it is not there.

    ``ValueError`` if the encoding or the task is not a registered one.
    """
    batch, training, path = trained.batch, trained.training, Path(path)
    content = {
        "format": FORMAT,
        "models": [_plain(model) | {"encoding": _named(encodings.registry, model.encoding)} for model in batch.models],
        "training": _plain(training) | {"task": _named(tasks.registry, training.task)},
        "parameters": {name: value.detach().cpu() for name, value in batch.parameters.items()},
        "losses": trained.losses,
        "status": list(trained.status),
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(content, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_transformers(path: Path | str, device: str = "cpu") -> TrainedTransformers:
    """Read what ``save_transformers`` wrote. ``ValueError`` if the file is truncated, or is something else.

    The file is read as data only (``weights_only``): one from a stranger runs no code.
    """
    target, data = resolve_device(device), Path(path).read_bytes()
    whole = f"{path} is not a whole file of trained transformers: "
    try:
        content = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:  # torch says many things of a foreign file, some of them advice to trust it
        raise ValueError(whole + "it was cut short, or is of another kind") from None
    try:
        require(content["format"] == FORMAT, "format", content["format"], repr(FORMAT))
        models = [_rebuild(TransformerSettings, model, "encoding", encodings.registry) for model in content["models"]]
        training = _rebuild(TransformerTraining, content["training"], "task", tasks.registry)
        parameters, losses, status = content["parameters"], content["losses"], content["status"]
        _require_shapes(models, training, parameters, losses, status)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{whole}{type(error).__name__}: {error}") from None
    batch = TransformerBatch(models, target, parameters["embedding"].dtype, parameters)
    return TrainedTransformers(batch, training, losses, status)


def _plain(settings: TransformerSettings | TransformerTraining) -> dict[str, Any]:
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


def _named(registry: Registry, member: Any) -> dict[str, Any]:
    require(
        member.name in registry and registry[member.name] is type(member), registry.kind, member, "a registered one"
    )
    return {"name": member.name, "settings": asdict(member)}


def _rebuild(cls: type, content: dict[str, Any], field: str, registry: Registry) -> Any:
    member = registry.make(content[field]["name"], **content[field]["settings"])
    return cls(**(content | {field: member}))


def _require_shapes(
    models: list[TransformerSettings],
    training: TransformerTraining,
    parameters: dict[str, torch.Tensor],
    losses: torch.Tensor,
    status: list[str],
) -> None:
    """``ValueError`` unless the tensors are those of such models."""
    wanted = {name: (len(models), *value.shape) for name, value in initial_parameters(models[0]).items()}
    found = {name: tuple(value.shape) for name, value in parameters.items()}
    require(found == wanted, "parameters", found, f"of the shapes {wanted}")
    require(tuple(losses.shape) == (len(models), training.steps), "losses", tuple(losses.shape), "one a model and step")
    require(len(status) == len(models), "status", status, "one a model")
