"""`CircuitBreaker`: stops calls to a server that fails, and says when to try it again."""

from __future__ import annotations

import threading
from collections.abc import Callable

MAX_FAILURES = 3
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0


class CircuitBreaker:
    """Opens after three failures in a row. Each failed probe doubles the pause, 1 to 60 seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._backoff_s = FIRST_BACKOFF_S
        self._probe_at = 0.0
        self._reason = ""

    @property
    def reason(self) -> str:
        """Why calls are stopped; empty: they are not."""
        return self._reason

    @property
    def retry_after_s(self) -> float:
        """Seconds until the next probe."""
        return max(self._probe_at - self._clock(), 0.0)

    def is_probe_due(self) -> bool:
        """Whether calls are stopped and the pause is over."""
        return bool(self._reason) and self._clock() >= self._probe_at

    def note_failure(self, reason: str) -> None:
        """Count a failed call; the third in a row stops calls."""
        with self._lock:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES and not self._reason:
                self._open(reason)

    def open(self, reason: str) -> None:
        """Stop calls at once: after a failed probe, or one failure that does not pass by itself."""
        with self._lock:
            self._open(reason)

    def _open(self, reason: str) -> None:
        if self._reason:
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        self._reason = reason or "no reason given"
        self._probe_at = self._clock() + self._backoff_s

    def note_success(self) -> None:
        """End a row of failures. Calls that were stopped stay so: only `close` lets them pass."""
        with self._lock:
            if not self._reason:
                self._num_failures = 0

    def close(self) -> None:
        """Let calls pass: a probe has succeeded."""
        with self._lock:
            self._num_failures, self._backoff_s, self._reason = 0, FIRST_BACKOFF_S, ""
