"""Training small transformers: seeds together, one at a time, and as others write it, against the machine's own rate.

Every variant trains the same decoder (2 layers, 4 heads, ReLU, no biases) on the same task with the same optimiser and
clipping, data generation included. Rates count the matrix products of forward and backward passes alone:
6 operations a weight and token, 12 · length · width a layer and token for attention.

    python benchmarks/bench_transformer.py [--rounds N] [--threads N] [--csv FILE] [--only shapes|growth|attempts]
"""

import argparse
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from _timing import best_of
from loguru import logger
from torch import Tensor, nn
from x_transformers import Decoder, TransformerWrapper

from helpers.encodings import Rotary
from helpers.seeding import generator
from helpers.tasks import IGNORE
from helpers.tasks.shift import Shift
from helpers.training import CHUNK
from helpers.transformer import TransformerBatch, TransformerSettings, TransformerTraining, train_transformers
from helpers.transformer.training import model_losses

logger.disable("x_transformers")  # it advises wider rotary heads

LENGTH, SEEDS = 32, 8
SHAPES = ((32, 16), (64, 64), (128, 64))  # width, batch size
Run = Callable[[], object]


def settings_of(width: int, seeds: int) -> list[TransformerSettings]:
    """The models of a shape, one a seed."""
    return [TransformerSettings(Rotary(), width=width, seed=seed) for seed in range(seeds)]


def operations(model: TransformerSettings, length: int) -> int:
    """Floating-point operations of the matrix products that training spends on one token."""
    weights = model.num_layers * (4 + 2 * model.mlp_ratio) * model.width**2 + model.width * model.vocab_size
    return 6 * weights + 12 * model.num_layers * length * model.width


class Plain(nn.Module):
    """torch's own encoder layers with a causal mask and learned positions."""

    def __init__(self, model: TransformerSettings, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocab_size, model.width)
        self.positions = nn.Parameter(torch.randn(length, model.width))
        layer = nn.TransformerEncoderLayer(
            model.width,
            model.num_heads,
            model.mlp_ratio * model.width,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
            bias=False,
        )
        norm = nn.LayerNorm(model.width, bias=False)
        self.layers = nn.TransformerEncoder(layer, model.num_layers, norm, enable_nested_tensor=False)
        self.read_out = nn.Linear(model.width, model.vocab_size, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.tokens(tokens) + self.positions
        return self.read_out(self.layers(stream, mask=self.mask, is_causal=True))


def x_transformers(model: TransformerSettings, length: int, flash: bool) -> nn.Module:
    """The same decoder from x-transformers, with its rotary positions."""
    layers = Decoder(
        dim=model.width,
        depth=model.num_layers,
        heads=model.num_heads,
        attn_dim_head=model.head_dim,
        attn_flash=flash,
        rotary_pos_emb=True,
        rotary_emb_dim=model.head_dim,
        ff_mult=model.mlp_ratio,
        ff_no_bias=True,
        ff_custom_activation=nn.ReLU(),
    )
    return TransformerWrapper(
        num_tokens=model.vocab_size, max_seq_len=length, use_abs_pos_emb=False, attn_layers=layers
    )


def train_module(module: nn.Module, training: TransformerTraining) -> None:
    """The ordinary training loop of one module."""
    optimiser = torch.optim.AdamW(module.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)
    source, size = generator(0, "data"), training.batch_size
    for step in range(training.steps):
        if step % CHUNK == 0:
            tokens, labels = training.task.sample(CHUNK * size, training.train_length, source)
        part = slice(step % CHUNK * size, (step % CHUNK + 1) * size)
        loss = F.cross_entropy(module(tokens[part]).flatten(0, 1), labels[part].flatten(), ignore_index=IGNORE)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), training.clip)
        optimiser.step()


def in_bfloat16(module: nn.Module, training: TransformerTraining) -> None:
    """The ordinary loop with matrix products in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        train_module(module, training)


def under_vmap(models: list[TransformerSettings], training: TransformerTraining) -> None:
    """The seeds as copies of one functional model under ``torch.func.vmap``, instead of batched matrix products."""
    batch = TransformerBatch(models)
    parameters = batch.parameters
    alone = TransformerBatch(models[:1])

    def loss(weights: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
        alone.parameters = {name: value[None] for name, value in weights.items()}
        return model_losses(alone(tokens[None]), labels[None])[0]

    gradient = torch.func.vmap(torch.func.grad(loss))
    optimiser = torch.optim.AdamW(list(parameters.values()), lr=training.learning_rate, weight_decay=0.0)
    shape = (len(models), training.batch_size, training.train_length)
    tokens, labels = (
        part.view(shape) for part in training.task.sample(shape[0] * shape[1], shape[2], generator(0, "data"))
    )
    for _ in range(training.steps):
        for name, value in gradient(parameters, tokens, labels).items():
            parameters[name].grad = value
        optimiser.step()


def compiled(models: list[TransformerSettings], training: TransformerTraining) -> Run:
    """Forward pass and loss through ``torch.compile``, as one batch; compiled before timing starts."""
    batch = TransformerBatch(models)
    parameters = [p.requires_grad_(True) for p in batch.parameters.values()]
    optimiser = torch.optim.AdamW(parameters, lr=training.learning_rate, weight_decay=0.0)
    shape = (len(models), training.batch_size, training.train_length)
    tokens, labels = (
        part.view(shape) for part in training.task.sample(shape[0] * shape[1], shape[2], generator(0, "data"))
    )
    positions = batch.positions(shape[2])
    loss = torch.compile(lambda: model_losses(batch(tokens, positions), labels).sum(), dynamic=False)

    def run() -> None:
        for _ in range(training.steps):
            optimiser.zero_grad()
            loss().backward()
            optimiser.step()

    return run


def steps_for(width: int, batch_size: int, seeds: int, length: int) -> int:
    """Steps that take about a third of a second."""
    work = seeds * batch_size * length * operations(settings_of(width, 1)[0], length)
    return max(1, round(2e10 / work))


def matrix_product() -> Run:
    """The yardstick: ten products of 1024 × 1024 matrices in float32."""
    matrix = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    return lambda: [matrix @ matrix for _ in range(10)]


def measure(cases: dict[tuple, tuple[Run, int]], rounds: int) -> list[dict[str, object]]:
    """Rows of cases that take turns. A case: (name, width, batch size, length, seeds) → (run, steps of each seed)."""
    yardstick = ("matrix product",)
    seconds = best_of({yardstick: matrix_product()} | {case: run for case, (run, _) in cases.items()}, rounds)
    peak = 10 * 2 * 1024**3 / seconds[yardstick] / 1e9
    rows = []
    for case, (_, steps) in cases.items():
        name, width, batch_size, length, seeds = case
        each = seconds[case] / steps / seeds
        rate = batch_size * length * operations(settings_of(width, 1)[0], length) / each / 1e9
        rows.append(
            {
                "variant": name,
                "width": width,
                "batch": batch_size,
                "length": length,
                "seeds": seeds,
                "ms_per_seed_step": 1e3 * each,
                "tokens_per_second": batch_size * length / each,
                "gflops": rate,
                "share_of_matmul": rate / peak,
            }
        )
    return rows


def ours(width: int, batch_size: int, length: int, seeds: int) -> tuple[Run, int]:
    """``train_transformers`` on a number of seeds."""
    steps = steps_for(width, batch_size, seeds, length)
    training = TransformerTraining(Shift(), length, steps, batch_size, warmup=0)
    return lambda: train_transformers(settings_of(width, seeds), training), steps


def shapes(rounds: int) -> list[dict[str, object]]:
    """Seeds together, one at a time, and the two other implementations, at the three shapes."""
    rows = []
    for width, batch_size in SHAPES:
        model, one = settings_of(width, 1)[0], steps_for(width, batch_size, 1, LENGTH)
        training = TransformerTraining(Shift(), LENGTH, one, batch_size)
        modules = {
            "torch.nn.TransformerEncoder": Plain(model, LENGTH),
            "x-transformers": x_transformers(model, LENGTH, flash=False),
            "x-transformers, flash": x_transformers(model, LENGTH, flash=True),
        }
        key = (width, batch_size, LENGTH)
        cases = {("together", *key, SEEDS): ours(*key, SEEDS), ("one at a time", *key, 1): ours(*key, 1)}
        for name, module in modules.items():
            cases[(name, *key, 1)] = (partial(train_module, module, training), one)
        rows += measure(cases, rounds)
    return rows


def growth(rounds: int) -> list[dict[str, object]]:
    """Cost as length, width and the number of seeds grow, from length 32, width 64, batch 16, 8 seeds."""
    rows = []
    for column, values in (
        ("length", (16, 32, 64, 128, 256)),
        ("width", (32, 64, 128, 256)),
        ("seeds", (1, 2, 4, 8, 16)),
    ):
        cases = {}
        for value in values:
            key = {"width": 64, "batch_size": 16, "length": LENGTH, "seeds": SEEDS} | {column: value}
            cases[(f"by {column}", *key.values())] = ours(**key)
        rows += measure(cases, rounds)
    return rows


def attempts(rounds: int) -> list[dict[str, object]]:
    """What was tried and not kept: vmap, torch.compile, bfloat16."""
    rows = []
    for width, batch_size in SHAPES:
        key = (width, batch_size, LENGTH)
        run, steps = ours(*key, SEEDS)
        training = TransformerTraining(Shift(), LENGTH, steps, batch_size)
        models = settings_of(width, SEEDS)

        one = replace(training, steps=SEEDS * steps)
        torch.compiler.reset()
        cases = {
            ("together", *key, SEEDS): (run, steps),
            ("torch.func.vmap", *key, SEEDS): (partial(under_vmap, models, training), steps),
            ("torch.compile", *key, SEEDS): (compiled(models, training), steps),
            ("bfloat16 nn.TransformerEncoder", *key, 1): (
                partial(in_bfloat16, Plain(models[0], LENGTH), one),
                one.steps,
            ),
        }
        rows += measure(cases, rounds)
    return rows


def main() -> None:
    parts = {"shapes": shapes, "growth": growth, "attempts": attempts}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each variant, of which the fastest counts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="cores to use")
    parser.add_argument("--csv", type=Path, help="also write the rows here")
    parser.add_argument("--only", choices=parts, help="one part; without it, shapes and growth")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = [options.only] if options.only else ["shapes", "growth"]
    rows = pd.DataFrame([{"part": name} | row for name in names for row in parts[name](options.rounds)])
    rows.insert(1, "threads", options.threads)
    shown = rows.drop(columns=["part", "threads"]).to_string(index=False, float_format=lambda value: f"{value:.2f}")
    print(f"{options.threads} threads, best of {options.rounds}\n{shown}")
    for width, batch_size in SHAPES if "shapes" in names else ():
        cost = rows[(rows.width == width) & (rows.batch == batch_size) & (rows.part == "shapes")]
        each = cost.set_index("variant").ms_per_seed_step
        ratios = ", ".join(
            f"{name} {value / each['together']:.2f}" for name, value in each.items() if name != "together"
        )
        print(f"width {width}, batch {batch_size}: cost of a seed, in units of together: {ratios}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    if options.csv:
        rows.to_csv(options.csv, index=False)


if __name__ == "__main__":
    main()
