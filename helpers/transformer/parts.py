"""Running a batch of models in parts, spread over the cores."""

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import pairwise
from threading import Event
from typing import TypeVar

import torch
from jaxtyping import Shaped
from torch import Tensor

from helpers.transformer.model import TransformerBatch

T = TypeVar("T")


def in_parts(
    batch: TransformerBatch,
    work: Callable[..., T],
    *per_model: Shaped[Tensor, "models *shape"],
    most: int | None = None,
) -> list[T]:
    """``work(part, stop, …)`` on copies of consecutive models of ``batch``; the results, in order.

    The tensors ``per_model`` are cut like the batch and passed on; ``most`` bounds the models of a part. On a CPU as
    many parts run at once as torch has threads: models never meet, so a thread for each part keeps every core busy from
    the first operation to the last, where torch's own threads would wait for each other at each one. Inside a part
    torch has one thread. ``work`` should return soon once the event ``stop`` is set: another part raised an error, or
    the user interrupts. Elsewhere the batch is one part.
    """
    threads = torch.get_num_threads()
    count = _count(len(batch), threads, most) if batch.device.type == "cpu" else 1
    bounds = [round(part * len(batch) / count) for part in range(count + 1)]
    cuts, stop = [slice(*ends) for ends in pairwise(bounds)], Event()

    def run(cut: slice) -> T:
        return work(batch.select(cut), stop, *(tensor[cut] for tensor in per_model))

    def run_alone(cut: slice) -> T:
        torch.set_num_threads(1)
        return run(cut)

    if threads == 1 or count == 1:
        return [run(cut) for cut in cuts]
    try:
        with ThreadPoolExecutor(threads) as pool:
            running = [pool.submit(run_alone, cut) for cut in cuts]
            try:
                wait(running, return_when=FIRST_EXCEPTION)
                failed = next((part for part in running if part.done() and part.exception()), None)
            finally:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
    finally:
        torch.set_num_threads(threads)
    return [part.result() for part in ([failed] if failed else running)]


def _count(models: int, threads: int, most: int | None) -> int:
    """The number of parts: the same for every thread, as far as there are models."""
    rounds = -(-models // (threads * (most or models)))
    return min(models, threads * rounds)
