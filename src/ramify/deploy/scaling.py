"""How many engines a load needs: an autoscaling policy of Serve, over seconds of waiting work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

WAIT_S, NUM_REQUESTS = "wait_s", "num_requests"  # names of what an engine reports


def replicas_for(wait_s: float, num_requests: float, *, max_wait_s: float, per_replica: int) -> int:
    """The engines that a load needs, at least 1.

    Args:
        wait_s: seconds of computing that wait at all engines together.
        num_requests: at all engines together, waiting ones included.
        max_wait_s: that may wait at an engine.
        per_replica: requests for each engine.
    """
    return max(1, math.ceil(wait_s / max_wait_s), math.ceil(num_requests / per_replica))


class WaitPolicy:
    """An autoscaling policy of Serve, which applies the limits and the delays itself.

    Args:
        max_wait_s, per_replica: see `replicas_for`.
    """

    def __init__(self, *, max_wait_s: float, per_replica: int) -> None:
        self._max_wait_s, self._per_replica = max_wait_s, per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The engines to have.

        Args:
            context: Serve's `AutoscalingContext`.
        """
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        if not metrics.get(NUM_REQUESTS):  # no engine has reported yet
            return context.target_num_replicas, {}
        target = replicas_for(
            sum(metrics.get(WAIT_S, {}).values()),
            sum(metrics[NUM_REQUESTS].values()),
            max_wait_s=self._max_wait_s,
            per_replica=self._per_replica,
        )
        return target, {}
