"""Several ways to do one thing, side by side: cold buffers, one graph a way, replayed in turn."""

from collections.abc import Callable, Mapping
from typing import Any

from bench import timing
from bench.report import rounded
from bench.runner import Runner
from bench.stats import summarize

# A way to do one call: buffer set number -> the call.
Way = Callable[[int], Callable[[], object]]


def time_ways(ways: Mapping[str, Way], sets: int, runner: Runner, where: object, *, target_us: float = 400.0) -> dict[str, Any]:
    """Microseconds a call of every way that can be built: {"us": name -> statistics, "samples": name -> samples}.

    A graph runs through all buffer sets, at least four calls long.
    """
    repeat = max(1, 4 // sets)

    def build(name: str) -> Callable[[], None]:
        return timing.capture([ways[name](i) for i in range(sets)] * repeat, warm=2).replay

    samples = runner.sample(runner.build_each(ways, build, where), target_us=target_us)
    per_call = {name: [us / (sets * repeat) for us in values] for name, values in samples.items()}
    return {
        "us": {name: summarize(values).as_dict() for name, values in per_call.items()},
        "samples": {name: rounded(values) for name, values in per_call.items()},
    }
