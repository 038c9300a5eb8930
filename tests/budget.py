"""How much of the suite runs: a part of each test's random examples, or, with RAMIFY_TESTS=full, all of them."""

from __future__ import annotations

import os

IS_FULL = os.environ.get("RAMIFY_TESTS") == "full"
SHARE = 4  # a run that is not full draws a quarter
FEWEST = 5


def examples(full: int) -> int:
    """How many examples a test draws, of the number that a full run draws."""
    return full if IS_FULL else min(full, max(FEWEST, full // SHARE))
