"""Stuck-step watchdog: logs a step that exceeds its timeout once, with its stack, and sets a flag.

It ends nothing: another thread cannot stop a forward pass, and a slow step may still finish.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

CHECKS_PER_TIMEOUT = 4


@dataclass(frozen=True, slots=True)
class _RunningStep:
    begin_s: float
    thread: int
    describe: Callable[[], str]


class Watchdog:
    """Watches the steps of one engine from a daemon thread, which the first step starts.

    Args:
        timeout_s: a step that takes longer is stuck; 0 disables the watchdog.
    """

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s, self._clock = timeout_s, clock
        self.num_stuck = 0  # steps that were reported
        self._running_step: _RunningStep | None = None  # replaced as a whole, never mutated
        self._reported: _RunningStep | None = None
        self._is_watched = not timeout_s

    @property
    def stuck_s(self) -> float:
        """Seconds that the running step has taken, 0 up to the timeout. For any thread."""
        step = self._running_step
        elapsed_s = 0.0 if step is None else self._clock() - step.begin_s
        return elapsed_s if self.timeout_s and elapsed_s > self.timeout_s else 0.0

    def begin(self, describe: Callable[[], str]) -> None:
        """A step begins in this thread. The watchdog thread calls `describe` if it gets stuck."""
        if not self.timeout_s:
            return
        self._running_step = _RunningStep(self._clock(), threading.get_ident(), describe)
        if not self._is_watched:
            self._is_watched = True
            done = threading.Event()
            weakref.finalize(self, done.set)
            arguments = (weakref.ref(self), done, self.timeout_s / CHECKS_PER_TIMEOUT)
            threading.Thread(
                target=_watch, args=arguments, name="ramify-watchdog", daemon=True
            ).start()

    def end(self) -> None:
        """The step has ended."""
        self._running_step = None

    def report_if_stuck(self) -> bool:
        """Log the running step if it is stuck and not logged yet; returns whether it did."""
        step, stuck_s = self._running_step, self.stuck_s
        if step is None or not stuck_s or step is self._reported:
            return False
        self._reported = step
        self.num_stuck += 1
        frame = sys._current_frames().get(step.thread)  # noqa: SLF001 - public in spite of its name
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "(it has ended)"
        logger.error(
            "a step runs for %.1f s, the limit is step_timeout_s=%g: %s; its thread is at\n%s",
            stuck_s,
            self.timeout_s,
            step.describe(),
            stack,
        )
        return True


def _watch(
    reference: weakref.ReferenceType[Watchdog], done: threading.Event, period_s: float
) -> None:
    while not done.wait(period_s):
        watchdog = reference()
        if watchdog is None:
            return
        watchdog.report_if_stuck()
        del watchdog  # this thread must not keep it alive while it waits
