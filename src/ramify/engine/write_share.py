"""`WriteShare`: how many pages may be copied out to the tiers beside a step."""

from __future__ import annotations

SHARE = 0.01  # of the time of the steps, for the engine's thread and the writer's together
LAZY_BYTES = 1 << 20  # beside one step; one page at least
GUESS_BYTES_PER_S = 1e9  # what a copy and its write take until they are measured
WEIGHT = 0.125  # of a new measurement in the moving average


class WriteShare:
    """A budget of seconds, filled by the steps and spent on pages.

    A fixed number of pages would cost a small model's steps of a few milliseconds a tenth of their time.

    Args:
        page_bytes: of a page.
    """

    def __init__(self, page_bytes: int) -> None:
        self._max_pages = max(1, LAZY_BYTES // page_bytes)
        guess_s = page_bytes / GUESS_BYTES_PER_S
        self._copy_s, self._write_s = guess_s / 2, guess_s / 2  # of a page
        self._budget_s = 0.0

    @property
    def page_s(self) -> float:
        """Seconds that a page takes of the engine's thread and of the writer's."""
        return self._copy_s + self._write_s

    @property
    def num_pages(self) -> int:
        """Pages that may be copied now."""
        return max(0, min(self._max_pages, int(self._budget_s / self.page_s)))

    def add_step(self, seconds: float) -> None:
        """A step took so long. What is not spent adds up to the pages of one step."""
        self._budget_s = min(self._budget_s + SHARE * seconds, self._max_pages * self.page_s)

    def copied(self, num_pages: int, seconds: float) -> None:
        """The engine's thread copied pages in so many seconds."""
        if num_pages:
            self._budget_s -= num_pages * self.page_s
            self._copy_s += WEIGHT * (seconds / num_pages - self._copy_s)

    def written(self, cpu_s: float) -> None:
        """The writer spent so much processor time on a page."""
        self._write_s += WEIGHT * (cpu_s - self._write_s)
