"""`EndSignals`: the first signal ends a deployment, the second one ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

INTERRUPTED = 130  # exit code


class EndSignals:
    """Takes SIGINT and SIGTERM while it is entered, in the main thread.

    The first lets `wait` return. A further one raises KeyboardInterrupt wherever the main thread is.
    """

    def __init__(self) -> None:
        self._first = threading.Event()
        self._previous: dict[signal.Signals, Any] = {}

    def wait(self) -> None:
        """Return at the first signal."""
        self._first.wait()

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._first.is_set():
            raise KeyboardInterrupt
        self._first.set()
