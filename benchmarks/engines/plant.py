"""A planted slowdown: proof that perf.py finds one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def slowed(
    call: Callable[..., Any], factor: float, clock: Callable[[], float] = time.thread_time
) -> Callable[..., Any]:
    """Wrap `call` so that it takes `factor` times as long on the clock.

    The default clock is the CPU time of the calling thread, so time spent in other processes is
    not multiplied.
    """

    def planted(*args: Any, **named: Any) -> Any:
        start = clock()
        result = call(*args, **named)
        end = start + factor * (clock() - start)
        while clock() < end:
            pass
        return result

    return planted
