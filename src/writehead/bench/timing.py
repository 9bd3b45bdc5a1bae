"""Clocks and medians. Times are seconds of the wall; a machine is never quiet, so nothing is quoted from one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

median = statistics.median


def percentile(values: Iterable[float], share: float) -> float:
    """The value that `share` of the values (0 to 1) are not above, between the two nearest ones."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def timed(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def at_least(work: Callable[[], object], *, seconds: float, warmup: int = 1, rounds: int = 3) -> list[float]:
    """Times of a call: `warmup` that do not count, then at least `rounds` and until `seconds` are spent."""
    for _ in range(warmup):
        work()
    times: list[float] = []
    while len(times) < rounds or sum(times) < seconds:
        times.append(timed(work))
    return times


def alternate(works: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each work says it took in each round, one after the other within a round; a first round does not count.

    Whatever else the machine does then falls on all of them alike, and ratios within a round stay true.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for number in range(rounds + 1):
        for name, work in works.items():
            took = work()
            if number:
                times[name].append(took)
    return times


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The median over the rounds of time / base."""
    return median(t / b for t, b in zip(times, base, strict=True))
