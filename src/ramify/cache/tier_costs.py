"""Whether loading pages is sooner than computing them: running medians of both."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

NUM_SAMPLES: Final = 15
UNKNOWN_LIMIT_S: Final = 1.0  # a request's wait for a load while nothing was computed yet
LEAST_LIMIT_S: Final = 0.01  # below this a late wake-up of a thread would cancel good loads
PATIENCE: Final = 0.1  # of the limit; by then the pages that came tell when the others will
# A tier that was slower than computing is tried again, since its other load may be over.
RETRY_S: Final = 30.0


def is_hopeless(elapsed_s: float, limit_s: float, num_arrived: int, num_pages: int) -> bool:
    """Whether to wait no longer for a load, of which `num_arrived` pages came in `elapsed_s`.

    Whoever waits for a tier that is slower than computing loses a tenth, and not as much again.
    """
    if elapsed_s >= limit_s:
        return True
    if elapsed_s <= max(LEAST_LIMIT_S, limit_s * PATIENCE):
        return False
    return not num_arrived or elapsed_s * num_pages / num_arrived > limit_s


class TierCosts:
    """Seconds per computed token, and per page of each tier, as moving medians.

    Loads of one tier overlap, so the seconds of a page include what a busy store makes it wait.
    """

    def __init__(self) -> None:
        self._token_s: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._page_s: dict[str, deque[float]] = {}
        self._refused_s: dict[str, float] = {}  # when a tier was last found too slow

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Count a step that computed prompt tokens."""
        if num_tokens > 0 and seconds > 0:
            self._token_s.append(seconds / num_tokens)

    def loaded(self, tier: str, num_pages: int, seconds: float) -> None:
        """Count a load that gave `num_pages` pages."""
        if num_pages > 0 and seconds > 0:
            samples = self._page_s.setdefault(tier, deque(maxlen=NUM_SAMPLES))
            samples.append(seconds / num_pages)

    def compute_s(self, num_tokens: int) -> float | None:
        """Seconds to compute tokens of a prompt; None: not known yet."""
        return num_tokens * median(self._token_s) if self._token_s else None

    def load_s(self, tier: str, num_pages: int) -> float | None:
        """Seconds to load pages; None: not known yet."""
        samples = self._page_s.get(tier)
        return num_pages * median(samples) if samples else None

    def limit_s(self, num_tokens: int) -> float:
        """How long a request may wait for a load in place of computing these tokens."""
        seconds = self.compute_s(num_tokens)
        return UNKNOWN_LIMIT_S if seconds is None else max(LEAST_LIMIT_S, seconds)

    def pays(self, tier: str, num_pages: int, num_tokens: int, now_s: float) -> bool:
        """Whether to load these pages; a tier that does not pay is tried again every `RETRY_S`."""
        load_s, compute_s = self.load_s(tier, num_pages), self.compute_s(num_tokens)
        if load_s is None or compute_s is None or load_s < compute_s:
            return True
        if now_s < self._refused_s.setdefault(tier, now_s) + RETRY_S:
            return False
        del self._refused_s[tier]
        self._page_s[tier].clear()
        return True
