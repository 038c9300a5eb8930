"""How far a long analysis is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # part, requests done, requests in all (0: unknown)


def ignore_progress(part: str, done: int, total: int) -> None:
    """Report to nobody."""
