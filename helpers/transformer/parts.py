"""Running a batch of models in parts, one part a core."""

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from itertools import pairwise
from threading import Event
from typing import TypeVar

import torch

from helpers.transformer.model import TransformerBatch

T = TypeVar("T")


def in_parts(batch: TransformerBatch, work: Callable[[TransformerBatch, Event], T]) -> list[T]:
    """``work`` on copies of consecutive models of ``batch``, in order; on a CPU, as many at once as torch has threads.

    Models never meet, so a thread for each part keeps every core busy from the first operation to the last, where
    torch's own threads would wait for each other at each one; inside a part torch has one thread. ``work`` should
    return soon once its event is set: another part raised an error, or the user interrupts.
    """
    threads = torch.get_num_threads()
    count = min(threads, len(batch)) if batch.device.type == "cpu" else 1
    bounds = [round(part * len(batch) / count) for part in range(count + 1)]
    parts, stop = [batch.select(slice(*ends)) for ends in pairwise(bounds)], Event()
    if count == 1:
        return [work(parts[0], stop)]

    def alone(part: TransformerBatch) -> T:
        torch.set_num_threads(1)
        return work(part, stop)

    try:
        with ThreadPoolExecutor(count) as pool:
            running = [pool.submit(alone, part) for part in parts]
            try:
                wait(running, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()
        return [part.result() for part in running]
    finally:
        torch.set_num_threads(threads)
