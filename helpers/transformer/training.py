"""Training batches of transformers: each model as if it were alone, all of them in one program."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import cos, pi
from threading import Event

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from helpers.devices import resolve_device
from helpers.progress import progress
from helpers.seeding import generator
from helpers.tasks import IGNORE, Task
from helpers.tasks.shift import Shift
from helpers.training import CHUNK, LENGTHS, NotFitted, TrainingDiverged
from helpers.transformer.model import TransformerBatch
from helpers.transformer.parts import in_parts
from helpers.transformer.settings import TransformerSettings
from helpers.validation import require, require_choice, require_integer

MAX_HIDDEN = 2**19  # numbers in the hidden layers of models that one core trains together: 2 MiB, about its cache


@dataclass(frozen=True)
class TransformerTraining:
    """How transformers are trained.

    AdamW; the learning rate rises linearly over ``warmup`` steps, then falls as half a cosine to a tenth of itself.
    ``clip`` bounds each model's own gradient norm. ``lengths``: every sequence has ``train_length`` tokens
    (``fixed``), or each batch of each model has its own length, uniform from the task's shortest up to
    ``train_length`` (``mixed``). ``on_failure``: ``raise`` an error when a model diverges, or only ``report`` it
    (status ``diverged``, its weights kept as they were when its loss stopped being finite; the others go on).
    A model is ``fitted`` when its training loss is at most ``fit_loss`` (mean over the last ``CHUNK`` steps).
    """

    task: Task = field(default_factory=Shift)
    train_length: int = 32
    steps: int = 1500
    batch_size: int = 32
    learning_rate: float = 3e-3
    warmup: int = 50
    weight_decay: float = 0.0
    clip: float = 1.0
    lengths: str = "fixed"
    fit_loss: float = 0.1
    on_failure: str = "raise"

    def __post_init__(self) -> None:
        require(isinstance(self.task, Task), "task", self.task, "a Task (see tasks.registry)")
        for name, least in (("train_length", 1), ("steps", 0), ("batch_size", 1), ("warmup", 0)):
            require_integer(name, getattr(self, name), least)
        shortest = self.task.min_length
        require(
            self.train_length >= shortest, "train_length", self.train_length, f"at least {shortest} for {self.task}"
        )
        require(self.learning_rate > 0, "learning_rate", self.learning_rate, "a number > 0")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "a number ≥ 0")
        require(self.clip > 0, "clip", self.clip, "a number > 0")
        require_choice("lengths", self.lengths, LENGTHS)
        require_choice("on_failure", self.on_failure, ("raise", "report"))

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.55 + 0.45 * cos(pi * done))


@dataclass
class TrainedTransformers:
    """A trained batch of transformers: its losses at every step and the status of each model."""

    batch: TransformerBatch
    training: TransformerTraining
    losses: Float[Tensor, "models steps"]
    status: list[str]

    def final_loss(self) -> Float[Tensor, "models"]:
        """The mean loss over the last ``CHUNK`` steps."""
        return self.losses[:, -CHUNK:].mean(-1)

    def require_fitted(self) -> "TrainedTransformers":
        """``NotFitted`` naming every model that did not fit its training lengths."""
        missed = [
            f"{model.encoding.name} seed={model.seed} ({status}, loss {loss:.3g})"
            for model, status, loss in zip(self.batch.models, self.status, self.final_loss().tolist(), strict=True)
            if status != "fitted"
        ]
        if missed:
            raise NotFitted("these transformers did not fit their training lengths: " + "; ".join(missed))
        return self


@dataclass(frozen=True)
class Draws:
    """Training data for some steps of a batch of models; every model's part comes from its own generator."""

    tokens: Int[Tensor, "steps models batch length"]
    labels: Int[Tensor, "steps models batch length"]
    positions: Int[Tensor, "steps #models length"]

    def to(self, device: torch.device) -> "Draws":
        """The same on another device."""
        return Draws(self.tokens.to(device), self.labels.to(device), self.positions.to(device))


def draw(
    models: Sequence[TransformerSettings], training: TransformerTraining, sources: Sequence[torch.Generator], steps: int
) -> Draws:
    """Data for ``steps`` steps. A model's stream depends on its own seed only.

    Sequences shorter than the training length are padded behind: no position sees the padding, and none is scored.
    """
    task, size = training.task, training.train_length
    shape = (steps, len(models), training.batch_size, size)
    tokens, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORE)
    positions = torch.zeros(steps, len(models), size, dtype=torch.long)
    for m, (model, source) in enumerate(zip(models, sources, strict=True)):
        positions[:, m] = model.encoding.position_ids(size, source, steps)
        if training.lengths == "fixed":
            drawn = task.sample(steps * training.batch_size, size, source)
            tokens[:, m], labels[:, m] = (part.view(steps, -1, size) for part in drawn)
            continue
        for step, length in enumerate(torch.randint(task.min_length, size + 1, (steps,), generator=source).tolist()):
            drawn = task.sample(training.batch_size, length, source)
            tokens[step, m, :, :length], labels[step, m, :, :length] = drawn
    if bool((positions == positions[:, :1]).all()):
        positions = positions[:, :1]
    return Draws(tokens, labels, positions)


def model_losses(
    logits: Float[Tensor, "models batch length vocab_size"], labels: Int[Tensor, "models batch length"]
) -> Float[Tensor, "models"]:
    """The cross-entropy of each model, in nats, averaged over its scored positions."""
    each = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), ignore_index=IGNORE, reduction="none")
    return each.view(len(labels), -1).sum(-1) / (labels != IGNORE).flatten(1).sum(-1)


@torch.no_grad()
def clip_gradients(parameters: Sequence[Tensor], clip: float) -> None:
    """In place: scale each model's gradient so that its norm is at most ``clip``."""
    norm = torch.stack([p.grad.flatten(1).norm(dim=1) for p in parameters], dim=-1).norm(dim=-1)
    scale = clip / norm.clamp_min(clip)
    for p in parameters:
        p.grad.mul_(scale.view(-1, *(1,) * (p.ndim - 1)))


def train_transformers(
    models: Sequence[TransformerSettings],
    training: TransformerTraining | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> TrainedTransformers:
    """Train models of one structure side by side, each from its own data stream.

    The result of a model does not depend on which others run beside it, up to the rounding of ``dtype``.
    ``TrainingDiverged`` if a loss is not finite and ``training.on_failure`` is ``raise``. ``ValueError`` before the
    first step if the encoding cannot place ``train_length`` tokens.
    """
    training = training or TransformerTraining()
    batch = TransformerBatch(models, resolve_device(device), dtype)
    wanted = batch.settings.vocab_size
    require(training.task.vocab_size == wanted, "task.vocab_size", training.task.vocab_size, f"the models' {wanted}")
    batch.require_length(training.train_length)
    hidden = training.batch_size * training.train_length * batch.settings.mlp_ratio * batch.settings.width
    most = max(1, MAX_HIDDEN // hidden)
    parts = in_parts(batch, lambda part, stop: train_part(part, training, stop), most=most)
    parameters = {name: torch.cat([part.batch.parameters[name] for part in parts]) for name in batch.parameters}
    return TrainedTransformers(
        TransformerBatch(models, batch.device, dtype, parameters),
        training,
        torch.cat([part.losses for part in parts]),
        [status for part in parts for status in part.status],
    )


def train_part(batch: TransformerBatch, training: TransformerTraining, stop: Event) -> TrainedTransformers:
    """Train a batch in place until its steps are done or ``stop`` is set."""
    parameters = [p.requires_grad_(True) for p in batch.parameters.values()]
    # Not fused: that kernel rounds the last elements of a stack differently, so a model alone would train differently.
    optimiser = torch.optim.AdamW(parameters, weight_decay=training.weight_decay, fused=False)
    sources = [generator(model.seed, "data") for model in batch.models]
    alive = torch.ones(len(batch), dtype=torch.bool, device=batch.device)
    last = [p.detach().clone() for p in parameters]
    losses = torch.full((len(batch), training.steps), torch.nan, dtype=batch.dtype, device=batch.device)
    for step in progress(range(training.steps), "training", training.steps):
        if stop.is_set():
            break
        if step % CHUNK == 0:
            draws = draw(batch.models, training, sources, min(CHUNK, training.steps - step)).to(batch.device)
        now = step % CHUNK
        loss = model_losses(batch(draws.tokens[now], draws.positions[now]), draws.labels[now])
        losses[:, step] = loss.detach()
        if stop_diverged(batch, training, alive, loss.detach(), step):
            last = [p.detach().clone() for p in parameters]
        optimiser.zero_grad()
        loss[alive].sum().backward()
        clip_gradients(parameters, training.clip)
        optimiser.param_groups[0]["lr"] = training.rate(step)
        optimiser.step()
        if not bool(alive.all()):
            with torch.no_grad():
                for parameter, kept in zip(parameters, last, strict=True):
                    parameter[~alive] = kept[~alive]
    for parameter in parameters:
        parameter.requires_grad_(False)
    trained = TrainedTransformers(batch, training, losses.cpu(), [])
    fits = (trained.final_loss() <= training.fit_loss).tolist() if training.steps else [False] * len(batch)
    trained.status = [
        "fitted" if fit else "not fitted" if lives else "diverged"
        for fit, lives in zip(fits, alive.tolist(), strict=True)
    ]
    return trained


def stop_diverged(
    batch: TransformerBatch,
    training: TransformerTraining,
    alive: Bool[Tensor, "models"],
    loss: Float[Tensor, "models"],
    step: int,
) -> bool:
    """Mark models whose loss is not finite as dead, or raise ``TrainingDiverged`` naming them. True if any are."""
    bad = alive & ~loss.isfinite()
    if not bool(bad.any()):
        return False
    if training.on_failure == "raise":
        named = [
            f"{model.encoding.name} seed={model.seed} loss={value}"
            for model, value, is_bad in zip(batch.models, loss.tolist(), bad.tolist(), strict=True)
            if is_bad
        ]
        raise TrainingDiverged(
            f"training diverged at step {step} with learning_rate={training.learning_rate}: " + "; ".join(named)
        )
    alive &= ~bad
    return True
