"""A planted slowdown: proof that perf.py finds one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def slowed(
    call: Callable[..., Any], factor: float, clock: Callable[[], float] = time.perf_counter
) -> Callable[..., Any]:
    """The same call, `factor` times as long: it keeps the processor busy until then."""

    def planted(*args: Any, **named: Any) -> Any:
        start = clock()
        found = call(*args, **named)
        end = start + factor * (clock() - start)
        while clock() < end:
            pass
        return found

    return planted
