"""The process of a replica whose fifth step after its start never ends; writes its port to stdout."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time

from ramify.cluster.run_replica import ReplicaOptions, StdoutStages, _serve
from ramify.engine.step import StepPlan, StepResult
from ramify.testing import FakeExecutor
from tests.pure.async_bench import Gate
from tests.pure.cluster_bench import Member

NUM_STEPS = 5


class Stuck(Gate):
    """Computes some steps, then none."""

    num_left = 0  # 0: not counted yet

    def __init__(self, device: FakeExecutor) -> None:
        super().__init__(device)
        self.is_stuck = threading.Event()

    def execute(self, plan: StepPlan) -> StepResult:
        if self.num_left == 1:
            self.is_stuck.set()
            time.sleep(3600)
        self.num_left -= self.num_left > 0
        return super().execute(plan)


class Stages(StdoutStages):
    """Begins to count when the replica is ready."""

    def __init__(self, gate: Stuck) -> None:
        self._gate = gate

    def ready(self, port: int, kv_cache_tokens: int) -> None:
        """See `Stages`."""
        self._gate.num_left = NUM_STEPS
        super().ready(port, kv_cache_tokens)


def main() -> int:
    logging.basicConfig(level=logging.INFO)
    member = Member(options={"step_timeout_s": 0.2})
    gate = Stuck(member.bench.device)
    member.bench.core.executor = gate
    return asyncio.run(_serve(ReplicaOptions(), Stages(gate), member.llm, None, None))


if __name__ == "__main__":
    sys.exit(main())
