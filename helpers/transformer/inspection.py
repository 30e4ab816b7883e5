"""Inside trained transformers: what each head attends to, by position and by offset, and which heads the answer needs.

The mean logit map of a head is M(i, j) = E_x ℓ(i, j) over fresh sequences x. A head that follows a rule of the offset
has M(i, j) = r(i) + m(i − j); r does not matter, for softmax ignores it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor

from helpers.encodings import Encoding
from helpers.seeding import generator
from helpers.tasks import Task
from helpers.theory.carriers import participation_ratio
from helpers.transformer.evaluation import Answers, answers, describe_models, fresh_sequences
from helpers.transformer.model import Hooks, TransformerBatch, site
from helpers.transformer.parts import in_parts
from helpers.transformer.training import TrainedTransformers
from helpers.validation import require, require_choice, require_integer

MAX_PAIRS = 2**22  # pairs of positions, over heads and sequences, whose logits a model keeps at once
ORDERS = ("target weight", "reverse", "random")
REPLACEMENTS = ("mean", "zero")


@torch.no_grad()
def record(
    batch: TransformerBatch,
    tokens: Int[Tensor, "models batch length"],
    sites: Iterable[str],
    positions: Int[Tensor, "#models length"] | None = None,
) -> dict[str, Tensor]:
    """What the models compute at ``sites`` (``site(layer, name)`` or ``"final"``) on ``tokens``; see ``SITES``."""
    values: dict[str, Tensor] = {}

    def keep(place: str) -> Callable[[Tensor], None]:
        return lambda value: values.__setitem__(place, value)

    batch(tokens, positions, {place: keep(place) for place in sites})
    return values


def mean_maps(
    batch: TransformerBatch, task: Task, length: int, samples: int = 256, of: str = "logits"
) -> Float[np.ndarray, "models layers heads length length"]:
    """The mean over fresh sequences of every head's ``logits`` or ``weights``; NaN where the key is after the query."""
    require_choice("of", of, ("logits", "weights"))
    sites = [site(layer, of) for layer in range(batch.settings.num_layers)]
    groups = min(samples, -(-samples * batch.settings.num_heads * length**2 // MAX_PAIRS))

    def work(part: TransformerBatch, stop: object) -> Tensor:
        tokens, _ = fresh_sequences(part.models, task, length, samples)
        total = torch.zeros((), dtype=torch.float64, device=part.device)
        for some in tokens.tensor_split(groups, dim=1):
            found = record(part, some, sites)
            total = total + torch.stack([found[place].sum(1, dtype=torch.float64) for place in sites], dim=1)
        return total.cpu() / samples

    maps = torch.cat(in_parts(batch, work))
    return maps.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), torch.nan).numpy()


@dataclass(frozen=True, eq=False)
class OffsetFit:
    """M(i, j) ≈ r(i) + m(i − j) by least squares over the pairs j ≤ i.

    ``rows`` are r and ``offsets`` m, whose mean is 0 (a constant may move from one to the other). ``share`` is the
    offset-explained share of what row effects leave: 1 − (squared misfit of both) / (squared misfit of rows alone); NaN
    if rows alone leave nothing.
    """

    rows: Float[np.ndarray, "*heads length"]
    offsets: Float[np.ndarray, "*heads length"]
    share: Float[np.ndarray, "*heads"]


def fit_offsets(maps: Float[np.ndarray, "*heads length length"]) -> OffsetFit:
    """Row effects and offset effects of each map together; entries with j > i are not read.

    Fitting the row means first would leak position: they depend on which offsets a row has. With r eliminated, m solves
    the reduced normal equations, a graph Laplacian over the offsets, by its pseudo-inverse.
    """
    length = maps.shape[-1]
    require(maps.shape[-2] == length, "maps.shape", maps.shape, "square in its last two axes")
    i, j = np.tril_indices(length)
    values = np.asarray(maps, dtype=np.float64)[..., i, j]
    has = np.tri(length)  # row i has the offsets 0 … i
    size = has.sum(1)
    onto_rows, onto_offsets = np.zeros((len(i), length)), np.zeros((len(i), length))
    onto_rows[np.arange(len(i)), i] = onto_offsets[np.arange(len(i)), i - j] = 1
    row_sums, offset_sums = values @ onto_rows, values @ onto_offsets
    laplacian = np.diag(has.sum(0)) - has.T @ (has / size[:, None])
    offsets = (offset_sums - (row_sums / size) @ has) @ np.linalg.pinv(laplacian, hermitian=True)
    rows = (row_sums - offsets @ has.T) / size
    left = ((values - (row_sums / size)[..., i]) ** 2).sum(-1)
    misfit = ((values - rows[..., i] - offsets[..., i - j]) ** 2).sum(-1)
    share = 1 - np.divide(misfit, left, out=np.full_like(misfit, np.nan), where=left > 1e-24 * length)
    return OffsetFit(rows, offsets, share)


def first_layer_carriers(batch: TransformerBatch) -> Complex[np.ndarray, "models heads num_carriers"]:
    """c_r = conj(E q_r) · E κ_r / √d of each head of the first layer, exactly, by enumerating the alphabet.

    The input of the first layer is the token alone, and tokens at two positions are independent: so for δ ≥ 1 the mean
    logit is the kernel of these carriers. ``ValueError`` for an encoding without carriers.
    """
    encoding, settings = batch.settings.encoding, batch.settings
    origin = torch.zeros(1, 1, dtype=torch.long)  # at position 0 a rotation does nothing
    alphabet = torch.arange(settings.vocab_size)[None, :, None].expand(len(batch), -1, 1)
    found = record(batch, alphabet, [site(0, "queries"), site(0, "keys")], origin)
    query, key = (found[site(0, name)].to("cpu", torch.float64)[..., 0, :].mean(1) for name in ("queries", "keys"))
    carriers = encoding.carriers(query, key)
    require(carriers is not None, "encoding", encoding.name, "one with carriers (a rotary one)")
    return carriers.numpy()


def fit_carriers(
    offsets: Float[np.ndarray, "*heads length"], encoding: Encoding, head_dim: int, cutoff: float = 1e-3
) -> tuple[Complex[np.ndarray, "*heads num_carriers"], Float[np.ndarray, "*heads"]] | None:
    """Carriers of offset effects m(δ) by least squares on φ(δ) and a constant, and the share of variance they explain.

    The offset δ is weighted by the number of its pairs, length − δ; δ = 0 is left out, for there query and key are of
    one token and their product has a mean of its own. Slow carriers are nearly collinear on a short range: singular
    values below ``cutoff`` times the largest count as zero, which picks the smallest carriers that fit. None for an
    encoding without carriers.
    """
    length = offsets.shape[-1]
    deltas = np.arange(1, length)
    features = encoding.carrier_features(torch.from_numpy(deltas), head_dim)
    if features is None:
        return None
    root = np.sqrt((length - deltas) / (length - deltas).sum())
    design = np.column_stack([features.numpy(), np.ones(length - 1)])
    values = offsets[..., 1:]
    solution = (values * root) @ np.linalg.pinv(design * root[:, None], rcond=cutoff).T
    misfit = ((values - solution @ design.T) ** 2) @ root**2
    variance = ((values - (values @ root**2)[..., None]) ** 2) @ root**2
    half = features.shape[-1] // 2
    return solution[..., :half] + 1j * solution[..., half : 2 * half], 1 - misfit / variance


def target_weights(maps: Float[np.ndarray, "*heads length length"], offset: int) -> Float[np.ndarray, "*heads"]:
    """The mean weight on the key ``offset`` steps back, over the queries that have one."""
    length = maps.shape[-1]
    require(0 <= offset < length, "offset", offset, f"in 0 … length - 1 = {length - 1}")
    return np.diagonal(maps, -offset, axis1=-2, axis2=-1).mean(-1)


def head_table(
    trained: Sequence[TrainedTransformers], offset: int, length: int | None = None, samples: int = 256
) -> pd.DataFrame:
    """One row a model, layer and head, from sequences of ``length`` (the training length unless given).

    Columns besides those of ``describe_models``: ``layer`` and ``head`` (from 0); ``target_weight`` (mean weight
    ``offset`` steps back); ``offset_share`` (``OffsetFit.share``); ``peak_delta``, where m(δ) is largest; ``margin``,
    m(offset) less the largest other m(δ). For encodings with carriers also, of the carriers fitted to m:
    ``carrier_share`` (of its variance), ``alignment`` (f(offset) / Σ|c|), ``participation`` ((Σ|c|)² / Σ|c|²).
    """
    rows = []
    for result in trained:
        batch, task = result.batch, result.training.task
        size = length or result.training.train_length
        batch.require_length(size)
        weight = target_weights(mean_maps(batch, task, size, samples, "weights"), offset)
        fit = fit_offsets(mean_maps(batch, task, size, samples))
        others = np.delete(fit.offsets, offset, axis=-1)
        columns = {
            "target_weight": weight,
            "offset_share": fit.share,
            "peak_delta": fit.offsets.argmax(-1),
            "margin": fit.offsets[..., offset] - others.max(-1),
        }
        columns |= _carrier_columns(fit.offsets, batch.settings.encoding, batch.settings.head_dim, offset)
        for m, model in enumerate(describe_models(result, samples)):
            rows += [
                model
                | {"layer": layer, "head": head}
                | {name: values[m, layer, head] for name, values in columns.items()}
                for layer, head in np.ndindex(weight.shape[1:])
            ]
    return pd.DataFrame(rows)


def _carrier_columns(
    offsets: Float[np.ndarray, "*heads length"], encoding: Encoding, head_dim: int, offset: int
) -> dict[str, Float[np.ndarray, "*heads"]]:
    fitted = fit_carriers(offsets, encoding, head_dim)
    if fitted is None:
        return {}
    carriers, share = fitted
    at_offset = encoding.carrier_features(torch.tensor([offset]), head_dim).numpy()[0]
    kernel = np.concatenate([carriers.real, carriers.imag], axis=-1) @ at_offset
    return {
        "carrier_share": share,
        "alignment": kernel / np.abs(carriers).sum(-1),
        "participation": participation_ratio(carriers),
    }


def attention_peaks(trained: TrainedTransformers, length: int, samples: int = 256) -> pd.DataFrame:
    """One row a model, layer, head and query position of sequences of ``length``: where the mean weight is largest.

    Columns besides those of ``describe_models``: ``layer``, ``head``, ``query``, ``key`` (the peak), ``weight`` (there)
    and ``mass_in_range`` (the weight on keys below the training length).
    """
    trained.batch.require_length(length)
    maps = np.nan_to_num(mean_maps(trained.batch, trained.training.task, length, samples, "weights"))
    key, weight = maps.argmax(-1), maps.max(-1)
    mass = maps[..., : trained.training.train_length].sum(-1)
    about = describe_models(trained, samples)
    return pd.DataFrame(
        [
            about[m]
            | {"layer": layer, "head": head, "query": i, "key": key[m, layer, head, i]}
            | {"weight": weight[m, layer, head, i], "mass_in_range": mass[m, layer, head, i]}
            for m, layer, head, i in np.ndindex(key.shape)
        ]
    )


def shift_deviations(
    batch: TransformerBatch, shifts: Sequence[int], length: int = 32, samples: int = 4
) -> pd.DataFrame:
    """T3 in float64: one row a model, shift of all position ids and place, with the largest absolute change there.

    ``place`` is ``layer 0 in``, …, ``last layer out`` (the stream) or ``output`` (the logits). Tokens are uniform.
    """
    double = TransformerBatch(batch.models, batch.device, torch.float64, batch.parameters)
    layers = batch.settings.num_layers
    names = {site(layer, "residual"): f"layer {layer} in" for layer in range(layers)} | {"final": "last layer out"}
    draws = [generator(model.seed, "evaluation", length) for model in batch.models]
    shape = (samples, length)
    tokens = torch.stack([torch.randint(batch.settings.vocab_size, shape, generator=draw) for draw in draws])

    @torch.no_grad()
    def places(shift: int) -> dict[str, Tensor]:
        ids = double.positions(length) + shift
        values = record(double, tokens, names, ids)
        return {names[place]: value for place, value in values.items()} | {"output": double(tokens, ids)}

    home, rows = places(0), []
    for shift in shifts:
        for place, value in places(shift).items():
            change = (value - home[place]).abs().flatten(1).amax(-1)
            rows += [
                {"encoding": model.encoding.name, "seed": model.seed, "shift": shift, "place": place, "change": size}
                for model, size in zip(batch.models, change.tolist(), strict=True)
            ]
    return pd.DataFrame(rows)


def ablation(removed: Bool[Tensor, "models layers heads"], replacement: str = "mean") -> Hooks:
    """Hooks that take out what the heads in ``removed`` read: by 0, or by its mean over the other sequences.

    The sequence itself is left out of the mean, or a share of what the head says of it would remain. ``mean`` needs two
    sequences in a batch.
    """
    require_choice("replacement", replacement, REPLACEMENTS)

    def without(layer: int) -> Callable[[Tensor], Tensor]:
        gone = removed[:, None, layer, :, None, None]

        def change(read: Tensor) -> Tensor:
            if replacement == "zero":
                return read.masked_fill(gone.to(read.device), 0)
            size = read.shape[1]
            require(size > 1, "sequences in a batch", size, "two or more to replace a head by its mean")
            return torch.where(gone.to(read.device), (read.sum(1, keepdim=True) - read) / (size - 1), read)

        return change

    return {site(layer, "heads"): without(layer) for layer in range(removed.shape[1]) if bool(removed[:, layer].any())}


def patching(taken: Bool[Tensor, "models layers heads"], source: dict[str, Tensor]) -> Hooks:
    """Hooks that put what the heads in ``taken`` read on other sequences (``source``, by site) in its place."""

    def exchange(layer: int) -> Callable[[Tensor], Tensor]:
        here = taken[:, None, layer, :, None, None]
        return lambda read: torch.where(here.to(read.device), source[site(layer, "heads")], read)

    return {site(layer, "heads"): exchange(layer) for layer in range(taken.shape[1]) if bool(taken[:, layer].any())}


def head_order(
    weight: Float[np.ndarray, "models layers heads"], seeds: Sequence[int], order: str, draw: int = 0
) -> Int[np.ndarray, "models heads_in_all"]:
    """Each model's heads, as indices into layers × heads: highest target weight first, last, or shuffled."""
    require_choice("order", order, ORDERS)
    flat = weight.reshape(len(weight), -1)
    if order == "random":
        sources = [generator(seed, "evaluation", draw) for seed in seeds]
        return np.stack([torch.randperm(flat.shape[1], generator=source).numpy() for source in sources])
    ranked = np.argsort(-flat, axis=-1, kind="stable")
    return ranked if order == "target weight" else ranked[:, ::-1]


def cumulative_ablation(
    trained: TrainedTransformers,
    offset: int,
    order: str = "target weight",
    length: int | None = None,
    samples: int = 128,
    replacement: str = "mean",
    draws: int = 1,
) -> pd.DataFrame:
    """Accuracy as heads are taken out one after another, until none is left: one row a model and count.

    ``order`` ranks each model's heads of all layers by its own target weights (``target weight``: highest first;
    ``reverse``: lowest first), or shuffles them (``random``, ``draws`` times). Columns besides those of
    ``describe_models``: ``order``, ``draw``, ``count`` (how many are gone), ``layer``, ``head`` and ``target_weight``
    of the last of them (−1, −1 and NaN for none), ``accuracy``, ``exact``.
    """

    def measure(part: TransformerBatch, stop: object, removed: Tensor) -> Answers:
        return answers(part, trained.training.task, size, samples, ablation(removed, replacement))

    size = length or trained.training.train_length
    rows = []
    for about, removed in _one_by_one(trained, offset, order, size, samples, draws):
        found = _joined(in_parts(trained.batch, measure, removed))
        numbers = zip(about, found.accuracy().tolist(), found.exact().tolist(), strict=True)
        rows += [row | {"accuracy": accuracy, "exact": exact} for row, accuracy, exact in numbers]
    return pd.DataFrame(rows)


def cumulative_patching(
    trained: TrainedTransformers,
    offset: int,
    order: str = "target weight",
    length: int | None = None,
    samples: int = 128,
    draws: int = 1,
) -> pd.DataFrame:
    """Whose answer a model gives as heads, one after another, read other sequences in place of the model's own.

    The other sequences are the same batch turned by one, so both answers are known. Rows and columns are those of
    ``cumulative_ablation``, with ``own`` and ``other`` (share of scored positions that give the answer to the one or to
    the other sequence) for ``accuracy`` and ``exact``; where the two answers agree, both count.
    """
    task = trained.training.task

    @torch.no_grad()
    def measure(part: TransformerBatch, stop: object, taken: Tensor) -> tuple[Tensor, Tensor]:
        tokens, labels = fresh_sequences(part.models, task, size, samples)
        sites = [site(layer, "heads") for layer in range(part.settings.num_layers)]
        hooks = patching(taken, record(part, tokens.roll(1, dims=1), sites))
        given, scored = part(tokens, hooks=hooks).argmax(-1).cpu(), labels >= 0
        shares = [((given == right) & scored).sum((1, 2)) / scored.sum((1, 2)) for right in (labels, labels.roll(1, 1))]
        return shares[0], shares[1]

    size = length or trained.training.train_length
    rows = []
    for about, taken in _one_by_one(trained, offset, order, size, samples, draws):
        own, other = (torch.cat(part).tolist() for part in zip(*in_parts(trained.batch, measure, taken), strict=True))
        rows += [row | {"own": mine, "other": theirs} for row, mine, theirs in zip(about, own, other, strict=True)]
    return pd.DataFrame(rows)


def _joined(parts: Sequence[Answers]) -> Answers:
    return Answers(torch.cat([part.right for part in parts]), torch.cat([part.scored for part in parts]))


def _one_by_one(
    trained: TrainedTransformers, offset: int, order: str, length: int, samples: int, draws: int
) -> Iterator[tuple[list[dict[str, object]], Bool[Tensor, "models layers heads"]]]:
    """For 0, 1, … all heads of an order: the columns that say which were chosen, a dict a model, and the choice."""
    batch = trained.batch
    batch.require_length(length)
    require_integer("draws", draws, 1)
    weight = target_weights(mean_maps(batch, trained.training.task, length, samples, "weights"), offset)
    flat, num_heads = weight.reshape(len(batch), -1), batch.settings.num_heads
    about = describe_models(trained, samples)
    for draw in range(draws if order == "random" else 1):
        ranked = head_order(weight, [model.seed for model in batch.models], order, draw)
        for count in range(flat.shape[1] + 1):
            chosen = torch.zeros(flat.shape, dtype=torch.bool)
            chosen.scatter_(1, torch.from_numpy(ranked[:, :count].copy()), True)
            last = ranked[:, count - 1] if count else np.full(len(batch), -1)
            columns = [
                {
                    "order": order,
                    "draw": draw,
                    "count": count,
                    "layer": int(head) // num_heads,
                    "head": int(head) % num_heads if count else -1,
                    "target_weight": float(flat[m, head]) if count else np.nan,
                }
                for m, head in enumerate(last)
            ]
            yield [a | b for a, b in zip(about, columns, strict=True)], chosen.view(weight.shape)
