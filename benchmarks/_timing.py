"""Timing shared by the benchmarks: variants take turns, so that a busy machine slows all of them alike."""

import time
from collections.abc import Callable, Mapping


def best_of(variants: Mapping[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """Seconds of the fastest run of each variant, over ``rounds`` rounds in which each runs once, after a warm-up."""
    for run in variants.values():
        run()
    seconds = {name: float("inf") for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            start = time.perf_counter()
            run()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    return seconds
