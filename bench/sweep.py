"""Several ways to do one thing, side by side: cold buffers, one graph a way, replayed in turn."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench import timing
from bench.report import rounded
from bench.runner import Runner
from bench.stats import summarize

# A way to do one call: buffer set number -> the call.
Way = Callable[[int], Callable[[], object]]


def right_ones(names: Iterable[str], is_right: Callable[[str], bool], runner: Runner, where: object, why: str) -> list[str]:
    """The names that are right; of the others, those that are wrong are reported with `why`, those that raise with the error."""
    verdicts = runner.build_each(names, is_right, where)
    for name, right in verdicts.items():
        if not right:
            runner.report.skip(name, f"fail: {why}", str(where))
    return [name for name, right in verdicts.items() if right]


def sample_ways(
    ways: Mapping[str, Way], sets: int, runner: Runner, where: object, *, target_us: float = 400.0
) -> dict[str, list[float]]:
    """Microseconds a call of every way that can be built: name -> samples. A graph runs through all buffer sets, at least four
    calls long."""
    repeat = max(1, 4 // sets)

    def build(name: str) -> Callable[[], None]:
        return timing.capture([ways[name](i) for i in range(sets)] * repeat, warm=2).replay

    samples = runner.sample(runner.build_each(ways, build, where), target_us=target_us)
    return {name: [us / (sets * repeat) for us in values] for name, values in samples.items()}


def time_ways(ways: Mapping[str, Way], sets: int, runner: Runner, where: object, *, target_us: float = 400.0) -> dict[str, Any]:
    """The same for a JSON row: {"us": name -> statistics, "samples": name -> samples}."""
    samples = sample_ways(ways, sets, runner, where, target_us=target_us)
    return {
        "us": {name: summarize(values).as_dict() for name, values in samples.items()},
        "samples": {name: rounded(values) for name, values in samples.items()},
    }
