"""Clocks of the GPU figures: device events around a call, and host seconds per step of a generation."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Protocol


class Event(Protocol):
    """A mark in the stream of a device: of `torch.cuda.Event`, what a clock uses."""

    def record(self) -> None: ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this mark to `end`, another one."""
        ...


@dataclass(frozen=True)
class DeviceClock:
    """Times calls by events, so that the host may run ahead of the device.

    Args:
        event: makes an event.
        wait: returns when the device has passed every event.
    """

    event: Callable[[], Event]
    wait: Callable[[], object]
    repeats: int = 30
    warmup: int = 5

    def times(self, call: Callable[[], object]) -> list[float]:
        """Milliseconds of `repeats` calls, after `warmup` calls that do not count."""
        for _ in range(self.warmup):
            call()
        marks = [(self.event(), self.event()) for _ in range(self.repeats)]
        for begin, end in marks:
            begin.record()
            call()
            end.record()
        self.wait()
        return [begin.elapsed_time(end) for begin, end in marks]

    def milliseconds(self, call: Callable[[], object]) -> float:
        """The median of `times`."""
        return median(self.times(call))


def cuda_clock() -> DeviceClock:
    """The clock of the current CUDA device."""
    import torch

    return DeviceClock(lambda: torch.cuda.Event(enable_timing=True), torch.cuda.synchronize)


def best_seconds(
    call: Callable[[], object], *, repeats: int = 3, now: Callable[[], float] = time.perf_counter
) -> float:
    """The shortest host time of `repeats` calls, which end when their result is there."""
    seconds = []
    for _ in range(repeats):
        start = now()
        call()
        seconds.append(now() - start)
    return min(seconds)


def seconds_per_step(
    generate: Callable[[int], object],
    few: int,
    many: int,
    *,
    repeats: int = 3,
    now: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of a decode step: the difference of two generations that differ in their length only.

    Prefill, the first token and what a call costs by itself are in both, and cancel.

    Args:
        generate: generates so many tokens for each request.
        few, many: tokens of the two.
    """
    generate(few)  # compiles and captures what the steps need
    times = [best_seconds(partial(generate, n), repeats=repeats, now=now) for n in (few, many)]
    return (times[1] - times[0]) / (many - few)
