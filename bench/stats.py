"""Medians, percentiles and paired differences; no torch here."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

Replay = Callable[[], None]


class Stats(NamedTuple):
    """Median and the 10th and 90th percentile of `count` samples."""

    median: float
    p10: float
    p90: float
    count: int

    def as_dict(self) -> dict[str, float]:
        return {key: round(value, 4) for key, value in self._asdict().items()}


def quantile(samples: Sequence[float], q: float) -> float:
    """Linear interpolation between the closest ranks, 0 <= q <= 1."""
    if not samples:
        raise ValueError("samples: expected at least one, got none")
    ordered = sorted(samples)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(samples: Sequence[float]) -> Stats:
    return Stats(quantile(samples, 0.5), quantile(samples, 0.1), quantile(samples, 0.9), len(samples))


def paired(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """first - second, round by round: drift of the clock or the machine cancels."""
    if len(first) != len(second):
        raise ValueError(f"paired: expected equal lengths, got {len(first)} and {len(second)}")
    return [a - b for a, b in zip(first, second, strict=True)]


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


class Budget:
    """Seconds a mode may take. None is without end."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self.seconds = seconds

    def spent(self) -> float:
        return self._clock() - self._start

    def left(self) -> float:
        return float("inf") if self.seconds is None else self.seconds - self.spent()


class Timer(Protocol):
    def round(self, plan: Sequence[tuple[str, Replay, int]]) -> list[tuple[str, float]]:
        """Microseconds a replay of each (name, replay, count), run in that order."""
        ...


def interleave(
    replays: Mapping[str, Replay],
    timer: Timer,
    rounds: int,
    rng: random.Random,
    *,
    target_us: float = 200.0,
    most: int = 64,
    budget: Budget | None = None,
) -> dict[str, list[float]]:
    """One sample of every replay a round, in a fresh random order each round; microseconds a replay.

    A sample repeats its replay until it lasts about `target_us`. At least five rounds run whatever the budget.
    """
    names = list(replays)
    first = dict(timer.round([(name, replays[name], 1) for name in names]))
    counts = {name: max(1, min(most, round(target_us / max(first[name], 1e-3)))) for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    for done in range(rounds):
        if budget is not None and done >= 5 and budget.left() <= 0:
            break
        rng.shuffle(names)
        for name, us in timer.round([(name, replays[name], counts[name]) for name in names]):
            samples[name].append(us)
    return samples
