"""Fair timing on a noisy machine: each round takes one sample of every contender, in random order; medians count."""

import gc
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")


def settle() -> None:
    """Keep later garbage collections from walking over the objects that the imports have left."""
    gc.collect()
    gc.freeze()


def in_fresh_process(function: Callable[..., Result], *args: object) -> Result:
    """The result of `function`, called in a process that has imported nothing yet."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(function, *args).result()


def timed(call: Callable[[], object], passes: int = 1) -> float:
    """Seconds per call, over `passes` calls."""
    start = time.perf_counter()
    for _ in range(passes):
        call()
    return (time.perf_counter() - start) / passes


def passes_for(call: Callable[[], object], aim: float = 0.005) -> int:
    """How many calls take about `aim` seconds: long enough for the clock, short enough to avoid interruptions."""
    call()  # the first call fills caches
    return max(1, round(aim / timed(call)))


def interleaved(samples: dict[Key, Callable[[], float]], rounds: int) -> dict[Key, list[float]]:
    """Take each sample `rounds` times; samples at the same index of the lists were taken in the same round."""
    order = list(samples)
    shuffle = random.Random(0).shuffle
    seconds: dict[Key, list[float]] = {key: [] for key in order}
    for _ in range(rounds):
        shuffle(order)
        for key in order:
            gc.collect()  # so that no sample pays for the garbage of another
            seconds[key].append(samples[key]())
    return seconds


def median_interval(values: Sequence[float], drawn: int = 1000) -> tuple[float, float]:
    """The 95 % interval of the median, by drawing from the values."""
    chance = random.Random(0)
    medians = sorted(median(chance.choices(values, k=len(values))) for _ in range(drawn))
    return medians[drawn // 40], medians[-drawn // 40]


def repeated(sample: Callable[[], Result], budget: float = 1.0) -> list[Result]:
    """As many samples as fit into `budget` seconds, at least one."""
    end = time.perf_counter() + budget
    taken = [sample()]
    while time.perf_counter() < end:
        taken.append(sample())
    return taken


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table for terminals and docs: the first column is left-aligned, the others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        f"| {line[0]:<{widths[0]}} | "
        + " | ".join(f"{c:>{w}}" for c, w in zip(line[1:], widths[1:], strict=True))
        + " |"
        for line in (header, rule, *rows)
    )


def machine() -> str:
    """The processor, its cores, the system and Python."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores, {platform.system()}, {python}"
