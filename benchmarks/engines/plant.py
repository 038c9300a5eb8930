"""A planted slowdown: proof that perf.py finds one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def slowed(
    call: Callable[..., Any], factor: float, clock: Callable[[], float] = time.thread_time
) -> Callable[..., Any]:
    """The same call, `factor` times as much work for the calling thread.

    The clock is that thread's own: a call that neighbours interrupted is not slowed down by a share
    of their time.
    """

    def planted(*args: Any, **named: Any) -> Any:
        start = clock()
        result = call(*args, **named)
        end = start + factor * (clock() - start)
        while clock() < end:
            pass
        return result

    return planted
