"""Sets of fixes replayed together for the what-if panel."""

from __future__ import annotations

import time
from collections.abc import Callable

from ramify.analysis.linting import Linted
from ramify.analysis.report.document import WhatIf
from ramify.analysis.savings.fixing import Fix

MAX_FINDINGS = 4  # 16 sets, of which 5 are known
MAX_SECONDS = 6.0
Clock = Callable[[], float]


def replay_sets(
    linted: Linted,
    *,
    max_seconds: float = MAX_SECONDS,
    clock: Clock = time.monotonic,
) -> WhatIf | None:
    """Savings of all sets of the findings that save most, as far as the time allows.

    Sets that were not replayed are missing; nothing is added up.
    """
    findings = linted.report.findings
    # A cause that hides behind another saves nothing alone, so that its own saving decides nothing.
    chosen = list(range(len(findings)))[:MAX_FINDINGS]
    if not chosen:
        return None
    savings = {1 << bit: findings[at].saving for bit, at in enumerate(chosen)}
    masks = [mask for mask in range(3, 1 << len(chosen)) if mask & (mask - 1)]
    # All together first, then small sets: they are what is ticked.
    masks.sort(key=lambda mask: (mask != (1 << len(chosen)) - 1, mask.bit_count(), mask))
    end = clock() + max_seconds
    for mask in masks:
        if clock() > end:
            break
        group = [
            Fix(findings[at].cause, findings[at].segment)
            for bit, at in enumerate(chosen)
            if mask >> bit & 1
        ]
        savings[mask] = linted.replay.saving(group)
    return WhatIf(tuple(chosen), savings, num_replays=len(savings) - len(chosen))
