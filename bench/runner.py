"""What every mode does around its measurement: verify, survive a provider that raises, keep to the budget."""

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from bench import timing
from bench.buffers import Case
from bench.providers import SLOW_BATCHES, Provider, Unavailable, first_line, missing
from bench.report import Report
from bench.stats import Budget, Replay, Stats, interleave
from bench.verify import check

T = TypeVar("T")
_TRIM = 48 << 30  # bytes the allocator may keep from one row to the next


@dataclass(frozen=True)
class Runner:
    """One run of a mode. asked: providers named on the command line, which run even where slow ones are left out."""

    report: Report
    budget: Budget = field(default_factory=lambda: Budget(None))
    rounds: int = 30
    asked: frozenset[str] = frozenset()

    def present(self, providers: list[Provider]) -> list[Provider]:
        """The providers whose package can be imported; the others are reported once."""
        found = []
        for provider in providers:
            reason = missing(provider.modules)
            if reason is None:
                found.append(provider)
            else:
                self.report.skip(provider.name, reason)
        return found

    def verified(
        self,
        providers: list[Provider],
        case: Case,
        *,
        prefill: bool = False,
        packed: bool = True,
        batches: Collection[int] = SLOW_BATCHES,
    ) -> dict[str, str]:
        """`ok`, `skip` or `fail` by provider; what did not pass is reported with the reason.

        A slow provider is left out, without a word, away from `batches` unless it was asked for.
        """
        status = {}
        for provider in providers:
            if provider.slow and provider.name not in self.asked and case.tokens not in batches:
                continue
            verdict = check(provider, case, prefill=prefill, packed=packed)
            status[provider.name] = verdict.status
            if verdict.status != "ok":
                self.report.skip(provider.name, f"{verdict.status}: {verdict.reason}", str(case))
        return status

    def build_each(self, names: Iterable[str], build: Callable[[str], T], where: object) -> dict[str, T]:
        """`build(name)` of every name; one that raises is reported and left out, and never stops the run."""
        built = {}
        for name in names:
            try:
                built[name] = build(name)
            except Unavailable as error:
                self.report.skip(name, str(error), str(where))
            except Exception as error:
                self.report.skip(name, f"{type(error).__name__}: {first_line(error)}", str(where))
        return built

    def sample(self, replays: dict[str, Replay], *, target_us: float, flush: int = 0) -> dict[str, list[float]]:
        """Microseconds a replay, interleaved; name -> one sample a round."""
        timer, rng = timing.EventTimer(flush), random.Random(0)
        return interleave(replays, timer, self.rounds, rng, target_us=target_us, budget=self.budget)

    def stopped(self, items: list[T], done: int) -> None:
        """Says that the time is over and what was not run."""
        left = f"{len(items) - done} of {len(items)} not run"
        self.report.say(f"stopped after {self.budget.spent():.0f} s, before {items[done]}: {left}")

    def each(self, items: list[T], one: Callable[[T], None]) -> None:
        """Runs `one` on every item until the budget is spent; an item that raises is reported and left out."""
        for done, item in enumerate(items):
            if self.budget.left() <= 0:
                self.stopped(items, done)
                return
            try:
                one(item)
            except Exception as error:
                self.report.skip(str(item), f"{type(error).__name__}: {first_line(error)}")
            if context_lost():
                self.report.say(f"the CUDA context was lost at {item}; the rest is not run")
                return
            if torch.cuda.is_available() and torch.cuda.memory_reserved() > _TRIM:
                torch.cuda.empty_cache()


def passed(providers: list[Provider], status: dict[str, str]) -> list[Provider]:
    return [p for p in providers if status.get(p.name) == "ok"]


def context_lost() -> bool:
    """Whether the CUDA context is gone, after which nothing can be measured in this process."""
    try:
        timing.drain()
    except RuntimeError:
        return True
    return False


def fastest(stats: dict[str, Stats], providers: list[Provider], group: str) -> tuple[str, float] | None:
    """Name and median of the fastest provider of a group that was measured."""
    known = [(stats[p.name].median, p.name) for p in providers if p.group == group and p.name in stats]
    return (min(known)[1], min(known)[0]) if known else None


def cell(value: str | None, status: dict[str, str], name: str) -> str:
    """What a table shows for a provider: its number, WRONG when it failed verification, or a dash."""
    return value if value is not None else "WRONG" if status.get(name) == "fail" else "-"
