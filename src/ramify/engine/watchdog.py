"""Notices a step that does not come back: one log record with what it was doing, and a flag.

Nothing is ended. A forward pass cannot be taken out of somebody else's thread, and one that is slow
may still finish.
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

CHECKS_PER_TIMEOUT = 4  # per timeout


@dataclass(frozen=True, slots=True)
class _RunningStep:
    at_s: float
    thread: int
    describe: Callable[[], str]


class Watchdog:
    """Watches one engine's steps from a daemon thread, which begins with the first step.

    Args:
        timeout_s: a step that takes longer is stuck; 0 watches nothing and starts no thread.
        clock: seconds, never going back.
    """

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeout_s, self._clock = timeout_s, clock
        self.num_stuck = 0  # steps that were reported
        self._running_step: _RunningStep | None = None  # the step that runs; replaced as a whole
        self._reported: _RunningStep | None = None
        self._is_watched = not timeout_s

    @property
    def stuck_s(self) -> float:
        """Seconds that the step has run, if it is beyond the timeout; else 0. For any thread."""
        begun = self._running_step
        spent = 0.0 if begun is None else self._clock() - begun.at_s
        return spent if self.timeout_s and spent > self.timeout_s else 0.0

    @property
    def is_stuck(self) -> bool:
        """Whether the step that runs now is beyond the timeout. For any thread."""
        return self.stuck_s > 0

    def begin(self, describe: Callable[[], str]) -> None:
        """A step begins in this thread; `describe` is called by another one if it is stuck."""
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
        """The step is over."""
        self._running_step = None

    def report_if_stuck(self) -> bool:
        """Report the step that runs now if it is stuck and was not reported; whether it was."""
        begun, spent = self._running_step, self.stuck_s
        if begun is None or not spent or begun is self._reported:
            return False
        self._reported = begun
        self.num_stuck += 1
        frame = sys._current_frames().get(begun.thread)  # noqa: SLF001 - documented, but so named
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "(it has ended)"
        logger.error(
            "a step runs for %.1f s, the limit is step_timeout_s=%g: %s; its thread is at\n%s",
            spent,
            self.timeout_s,
            begun.describe(),
            stack,
        )
        return True


def _watch(
    watchdog: weakref.ReferenceType[Watchdog], done: threading.Event, period_s: float
) -> None:
    while not done.wait(period_s):
        found = watchdog()
        if found is None:
            return
        found.report_if_stuck()
        del found  # or it would be kept alive while this thread waits
