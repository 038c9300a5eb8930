"""Rows that wait for another row of the same request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_PENDING = 4096  # rows that wait at once; beyond, the oldest is given up


class PendingRows(Generic[T]):
    """Rows by request id; beyond a limit the oldest is given up, so that memory is bounded."""

    def __init__(self, max_pending: int = MAX_PENDING) -> None:
        self._max_pending = max_pending
        self._rows: dict[str, T] = {}

    def add(self, request_id: str, row: T) -> Iterator[T]:
        """Let a row wait; yields what has waited too long, or under the same id."""
        old = self._rows.pop(request_id, None)
        if old is not None:
            yield old
        self._rows[request_id] = row
        while len(self._rows) > self._max_pending:
            yield self._rows.pop(next(iter(self._rows)))

    def take(self, request_id: str) -> T | None:
        """The row of a request, which waits no longer."""
        return self._rows.pop(request_id, None)

    def take_all(self) -> Iterator[T]:
        """All rows that wait, oldest first."""
        while self._rows:
            yield self._rows.pop(next(iter(self._rows)))
