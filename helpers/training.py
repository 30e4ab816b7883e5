"""Training batches of minimal heads: each head as if it were alone, all of them in one program."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from helpers.encodings.base import Parameters
from helpers.heads import HeadBatch, HeadSettings, batches
from helpers.progress import progress
from helpers.seeding import generator
from helpers.validation import require, require_choice, require_integer

OPTIMISERS = ("adam", "sgd", "ngd", "polyak")
NORMALISED = ("ngd", "polyak")  # their steps do not shrink with the gradient
LENGTHS = ("fixed", "mixed")
OBJECTIVES = ("sampled", "positional")
CHUNK = 32  # steps whose data are drawn at once


class TrainingDiverged(RuntimeError):
    """A loss became NaN or infinite."""


class NotFitted(RuntimeError):
    """A head did not fit the lengths it was trained on."""


@dataclass(frozen=True)
class TrainSettings:
    """How heads are trained.

    ``optimiser``: ``adam``, ``sgd`` (plain gradient descent), ``ngd`` (gradient divided by its norm, per head) or
    ``polyak`` (step = loss / ‖gradient‖², per head, times ``learning_rate``; the infimum of the loss is 0).
    ``lengths``: every sequence has the training length (``fixed``), or one length a batch is drawn uniformly from
    offset + 1 … training length (``mixed``). ``objective``: ``sampled`` draws sequences and uses −log p(y), or the
    squared error of the linear head; ``positional`` is a deterministic loss of the kernel alone: −log a_k for softmax
    (the limit of many symbols), the exact expected squared error for the linear head (T14). ``weight_decay`` is
    decoupled. ``snapshots``: steps after which the parameters are kept. ``on_failure``: ``raise`` an error when a head
    diverges, or only ``report`` it (status ``diverged``, its weights kept as they were when its loss stopped being
    finite; the other heads go on).
    A head is ``fitted`` when its training loss is at most ``fit_loss`` (mean over the last ``CHUNK`` steps).
    """

    optimiser: str = "adam"
    learning_rate: float = 0.01
    steps: int = 1000
    batch_size: int = 64
    lengths: str = "fixed"
    objective: str = "sampled"
    weight_decay: float = 0.0
    fit_loss: float = 0.1
    snapshots: tuple[int, ...] = ()
    on_failure: str = "raise"

    def __post_init__(self) -> None:
        require_choice("optimiser", self.optimiser, OPTIMISERS)
        require_choice("lengths", self.lengths, LENGTHS)
        require_choice("objective", self.objective, OBJECTIVES)
        require_choice("on_failure", self.on_failure, ("raise", "report"))
        require(self.learning_rate > 0, "learning_rate", self.learning_rate, "a number > 0")
        require_integer("steps", self.steps, 0)
        require_integer("batch_size", self.batch_size, 1)
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "a number ≥ 0")
        wrong = [step for step in self.snapshots if not 0 <= step <= self.steps]
        require(not wrong, "snapshots", wrong, f"steps in 0 … {self.steps}")


@dataclass
class Trained:
    """A trained batch of heads: its losses at every step, the status of each head and any snapshots kept."""

    batch: HeadBatch
    training: TrainSettings
    losses: Float[Tensor, "heads steps"]
    status: list[str]
    snapshots: dict[int, Parameters] = field(default_factory=dict)

    def require_fitted(self) -> "Trained":
        """``NotFitted`` naming every head that did not fit its training lengths."""
        missed = [
            f"{head.encoding.name} seed={head.seed} offset={head.offset} ({status}, loss {loss:.3g})"
            for head, status, loss in zip(self.batch.heads, self.status, self.final_loss().tolist(), strict=True)
            if status != "fitted"
        ]
        if missed:
            raise NotFitted("these heads did not fit their training lengths: " + "; ".join(missed))
        return self

    def final_loss(self) -> Float[Tensor, "heads"]:
        """The mean loss over the last ``CHUNK`` steps."""
        return self.losses[:, -CHUNK:].mean(-1)

    def at(self, step: int) -> HeadBatch:
        """The batch as it was after ``step`` steps (a snapshot)."""
        require(step in self.snapshots, "step", step, f"one of the snapshots {sorted(self.snapshots)}")
        batch = HeadBatch(self.batch.heads, self.batch.device, next(iter(self.batch.parameters.values())).dtype)
        batch.parameters = self.snapshots[step]
        return batch


@dataclass(frozen=True)
class Draws:
    """Training data for some steps of a batch of heads; every head's part comes from its own generator."""

    matches: Float[Tensor, "heads steps batch length"]  # 1 where the key holds the label
    tokens: Int[Tensor, "heads steps batch length"]
    lengths: Int[Tensor, "heads steps"]
    positions: Int[Tensor, "heads steps length"]


def draw(
    batch: HeadBatch, training: TrainSettings, generators: Sequence[torch.Generator], steps: int, dtype: torch.dtype
) -> Draws:
    """Data for ``steps`` steps. A head's stream depends on its own settings and seed only.

    No tokens are drawn for the positional objective (``batch`` is 0).
    """
    size = batch.heads[0].train_length
    batch_size = training.batch_size if training.objective == "sampled" else 0
    tokens = torch.zeros(len(batch), steps, batch_size, size, dtype=torch.long)
    lengths = torch.full((len(batch), steps), size)
    positions = torch.zeros(len(batch), steps, size, dtype=torch.long)
    for h, (head, source) in enumerate(zip(batch.heads, generators, strict=True)):
        if training.lengths == "mixed":
            lengths[h] = torch.randint(head.offset + 1, size + 1, (steps,), generator=source)
        positions[h] = head.encoding.position_ids(size, source, steps)
        tokens[h] = head.task.tokens(steps * batch_size, size, source).view(steps, batch_size, size)
    answer = (lengths - 1 - batch.offsets.cpu()[:, None])[..., None, None].expand(-1, -1, batch_size, 1)
    matches = (tokens == tokens.gather(-1, answer)).to(dtype)
    moved = (part.to(batch.device) for part in (matches, tokens, lengths, positions))
    return Draws(*moved)


def head_losses(
    batch: HeadBatch, training: TrainSettings, draws: Draws, step: int
) -> tuple[Float[Tensor, "heads"], Float[Tensor, "heads"]]:
    """``(loss, surrogate)`` of each head at one step of ``draws``.

    The surrogate has the same descent direction as the loss; for −log a_k = log(1 + Σ e^{−z}) it is log Σ e^{−z}, whose
    gradient does not vanish as the margins z grow, so normalised steps stay exact.
    """
    lengths, length = draws.lengths[:, step], draws.positions.shape[-1]
    logits = batch.logits(draws.positions[:, step], lengths - 1)
    absent = torch.arange(length, device=batch.device) >= lengths[:, None]
    target = (lengths - 1 - batch.offsets)[:, None]
    if batch.heads[0].normalisation == "linear":
        loss = linear_loss(batch, training, draws, step, logits.masked_fill(absent, 0.0), target)
        return loss, loss
    if training.objective == "positional":
        chosen = torch.zeros_like(absent).scatter(1, target, True)
        nothing = torch.finfo(logits.dtype).min  # −∞ would make the gradient of an empty sum NaN
        minus_margins = (logits - logits.gather(1, target)).masked_fill(chosen | absent, nothing)
        surrogate = minus_margins.logsumexp(-1)
        return softplus(surrogate), surrogate
    # −log p(y) = softplus(log of the odds against y): p(y) and its complement are both sums of weights, so no margin
    # is rounded. Odds against y below the smallest normal number are none; p(y) is at least that number.
    logits = logits.masked_fill(absent, -torch.inf)
    weights = (logits - logits.amax(-1, keepdim=True).detach()).exp()
    matches = draws.matches[:, step]
    smallest = torch.finfo(weights.dtype).tiny
    right = (matches * weights[:, None]).sum(-1).clamp_min(smallest)
    wrong = ((1 - matches) * weights[:, None]).sum(-1)
    odds = wrong.clamp_min(smallest).log() - right.log()
    loss = softplus(odds).masked_fill(wrong < smallest, 0.0).mean(-1)
    return loss, loss


def softplus(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """log(1 + eˣ), exact for either sign, and the same bits wherever an element stands in its tensor.

    torch's own kernel rounds the last few elements of a tensor differently, so a head's loss would depend on the batch.
    """
    small, large = x.clamp_max(0.0), x.clamp_min(0.0)
    return torch.where(x > 0, x + (-large).exp().log1p(), small.exp().log1p())


def linear_loss(
    batch: HeadBatch, training: TrainSettings, draws: Draws, step: int, scores: Tensor, target: Tensor
) -> Float[Tensor, "heads"]:
    """E‖Σ_j f_j e_{x_j} − e_y‖²: over sampled sequences, or exactly (T14)."""
    vocab_size = batch.heads[0].vocab_size
    error = scores - torch.zeros_like(scores).scatter(1, target, 1.0)
    if training.objective == "positional":
        return (1 - 1 / vocab_size) * error.square().sum(-1) + error.sum(-1).square() / vocab_size
    tokens = draws.tokens[:, step]
    output = scores.new_zeros(*tokens.shape[:2], vocab_size)
    output = output.scatter_add(-1, tokens, error[:, None].expand_as(tokens).contiguous())
    return output.square().sum(-1).mean(-1)


def per_head_norm(gradients: list[Tensor]) -> Float[Tensor, "heads"]:
    """The Euclidean norm of each head's whole gradient, safe where its square would underflow."""
    largest = torch.stack([gradient.flatten(1).abs().amax(-1) for gradient in gradients]).amax(0)
    unit = largest.where(largest > 0, 1.0)
    scaled = (gradient.flatten(1) / unit[:, None] for gradient in gradients)
    return unit * torch.stack([part.square().sum(-1) for part in scaled]).sum(0).sqrt()


def loss_over_slope(loss: Float[Tensor, "heads"], surrogate: Float[Tensor, "heads"]) -> Float[Tensor, "heads"]:
    """loss / (d loss / d surrogate), 1 in the limit where both underflow.

    Polyak's step loss ∇loss / ‖∇loss‖² is this, times ∇surrogate / ‖∇surrogate‖²: exact at any margin.
    """
    (slope,) = torch.autograd.grad(loss.sum(), surrogate, retain_graph=True)
    return torch.where(slope > torch.finfo(slope.dtype).tiny, loss / slope, 1.0).detach()


def scale_gradients(optimiser: str, gradients: list[Tensor], gaps: Float[Tensor, "heads"]) -> None:
    """In place: the per-head step rule of ``ngd``, gradient / norm, and ``polyak``, gap · gradient / norm².

    The other optimisers keep their gradients. A head whose gradient is zero stays where it is.
    """
    if optimiser not in NORMALISED:
        return
    norm = per_head_norm(gradients)
    unit = norm.where(norm != 0, 1.0)
    size = gaps / unit if optimiser == "polyak" else torch.ones_like(unit)
    for gradient in gradients:
        shape = (-1, *(1,) * (gradient.ndim - 1))
        gradient.div_(unit.view(shape)).mul_(size.view(shape))


def make_optimiser(parameters: list[Tensor], training: TrainSettings) -> torch.optim.Optimizer:
    """torch's own optimiser: element by element, hence head by head."""
    if training.optimiser == "adam":
        return torch.optim.AdamW(parameters, lr=training.learning_rate, weight_decay=training.weight_decay)
    return torch.optim.SGD(parameters, lr=training.learning_rate, weight_decay=0.0)


def train_batch(
    heads: Sequence[HeadSettings], training: TrainSettings, device: str = "cpu", dtype: torch.dtype = torch.float64
) -> Trained:
    """Train heads of one structure together; see ``train`` for the rest."""
    batch = HeadBatch(heads, device, dtype)
    parameters = list(batch.parameters.values())
    for parameter in parameters:
        parameter.requires_grad_(True)
    generators = [generator(head.seed, "data") for head in heads]
    optimiser = make_optimiser(parameters, training)
    alive = torch.ones(len(batch), dtype=torch.bool, device=batch.device)
    last = detached(batch)
    losses = torch.full((len(batch), training.steps), torch.nan, dtype=dtype, device=batch.device)
    snapshots = {0: detached(batch)} if 0 in training.snapshots else {}

    for step in progress(range(training.steps), "training", training.steps):
        if step % CHUNK == 0:
            draws = draw(batch, training, generators, CHUNK, dtype)  # a full chunk at the end too: runs share prefixes
        loss, surrogate = head_losses(batch, training, draws, step % CHUNK)
        losses[:, step] = loss.detach()
        if stop_diverged(batch, training, alive, loss.detach(), step):
            last = detached(batch)
        gaps = loss_over_slope(loss, surrogate) if training.optimiser == "polyak" else loss.detach()
        objective = surrogate if training.optimiser in NORMALISED else loss
        gradients = torch.autograd.grad(objective[alive].sum(), parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
        scale_gradients(training.optimiser, [parameter.grad for parameter in parameters], gaps)
        if training.optimiser != "adam" and training.weight_decay:
            with torch.no_grad():
                torch._foreach_mul_(parameters, 1 - training.learning_rate * training.weight_decay)
        optimiser.step()
        if not bool(alive.all()):
            with torch.no_grad():
                for name, parameter in batch.parameters.items():
                    parameter[~alive] = last[name][~alive]
        if step + 1 in training.snapshots:
            snapshots[step + 1] = detached(batch)

    finite = torch.stack([parameter.detach().flatten(1).isfinite().all(-1) for parameter in parameters]).all(0)
    stop_diverged(batch, training, alive, losses.new_zeros(len(batch)).where(finite, torch.nan), training.steps)
    batch.parameters = detached(batch)
    trained = Trained(batch, training, losses.cpu(), [], snapshots)
    fits = (trained.final_loss() <= training.fit_loss).tolist() if training.steps else [False] * len(batch)
    trained.status = [
        "diverged" if not lives else "fitted" if fit else "not fitted"
        for fit, lives in zip(fits, alive.tolist(), strict=True)
    ]
    return trained


def detached(batch: HeadBatch) -> Parameters:
    """A copy of the batch's parameters."""
    return {name: value.detach().clone() for name, value in batch.parameters.items()}


def stop_diverged(
    batch: HeadBatch, training: TrainSettings, alive: Bool[Tensor, "heads"], loss: Float[Tensor, "heads"], step: int
) -> bool:
    """Mark heads whose loss is not finite as dead, or raise ``TrainingDiverged`` naming them; say if any were."""
    bad = alive & ~loss.isfinite()
    if not bool(bad.any()):
        return False
    if training.on_failure == "raise":
        named = [
            f"{head.encoding.name} seed={head.seed} offset={head.offset} loss={value}"
            for head, value, is_bad in zip(batch.heads, loss.tolist(), bad.tolist(), strict=True)
            if is_bad
        ]
        raise TrainingDiverged(
            f"training diverged at step {step} with {training.optimiser}, learning_rate={training.learning_rate}: "
            + "; ".join(named)
        )
    alive &= ~bad
    return True


def train(
    heads: Sequence[HeadSettings],
    training: TrainSettings | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> list[Trained]:
    """Train any heads: those of one structure run as one batch, each from its own data stream.

    The result of a head does not depend on which others run beside it. ``TrainingDiverged`` if a loss is not finite and
    ``training.on_failure`` is ``raise``. Returns one ``Trained`` a structure, in order of first appearance.
    """
    training = training or TrainSettings()
    return [train_batch(group, training, device, dtype) for group in batches(heads)]
