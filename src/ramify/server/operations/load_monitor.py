"""Background tasks of a server: measure the delay of its event loop, log a line with its load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from ramify.engine.context import EngineStats
from ramify.errors import EngineStoppedError, NoReplicaError, ReplicaLostError
from ramify.server.operations.metrics import Metrics
from ramify.server.service import RequestService

logger = logging.getLogger("ramify.load")

TICK_S = 0.05
LINE_S = 10.0


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Tokens since the start, and the engine now."""

    prompt_tokens: float  # of ended requests
    output_tokens: float
    saved_tokens: float  # of the prompts: not computed, but cached or shared in flight
    engine: EngineStats

    def line(self, before: LoadSnapshot, interval_s: float) -> str | None:
        """The log line for the interval since `before`; None while the server is idle."""
        prompt_tokens = self.prompt_tokens - before.prompt_tokens
        output_tokens = self.output_tokens - before.output_tokens
        num_live = self.engine.num_running + self.engine.num_waiting
        if not prompt_tokens and not output_tokens and not num_live:
            return None
        cache = self.engine.cache
        saved_tokens = self.saved_tokens - before.saved_tokens
        # Counted step by step: a long prompt shows before its request ends. Less than before if the
        # engine is another one, elsewhere.
        num_computed = max(0, self.engine.num_computed_tokens - before.engine.num_computed_tokens)
        used_share = 1 - cache.free_pages / cache.num_pages
        hit_rate = f"{saved_tokens / prompt_tokens:.0%}" if prompt_tokens else "-"
        return (
            f"in={prompt_tokens / interval_s:.0f} tok/s out={output_tokens / interval_s:.0f} tok/s "
            f"computed={num_computed / interval_s:.0f} tok/s "
            f"running={self.engine.num_running} waiting={self.engine.num_waiting} "
            f"kv={used_share:.0%} hit={hit_rate} saved={saved_tokens:.0f} prefill tokens"
        )


class LoadMonitor:
    """Observes the delay of the event loop, and logs the load while there is any.

    Args:
        tick_s: interval at which the delay of the event loop is measured.
        line_s: interval of the log line.
    """

    def __init__(
        self,
        service: RequestService,
        metrics: Metrics,
        *,
        write_line: Callable[[str], None] = logger.info,
        tick_s: float = TICK_S,
        line_s: float = LINE_S,
    ) -> None:
        self._service, self._metrics, self._write_line = service, metrics, write_line
        self._tick_s, self._line_s = tick_s, line_s

    async def run(self) -> None:
        """Run both tasks until cancelled; the log line ends with the engine."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._measure_loop_delay())
            tasks.create_task(self._log_load())

    async def _measure_loop_delay(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._tick_s
            await asyncio.sleep(self._tick_s)
            self._metrics.loop_delay.observe(max(0.0, loop.time() - due))

    async def _log_load(self) -> None:
        loop = asyncio.get_running_loop()
        before: LoadSnapshot | None = None
        before_s = 0.0
        while True:
            try:
                snapshot, now_s = await self._snapshot(), loop.time()
            except EngineStoppedError:
                return
            except (NoReplicaError, ReplicaLostError):  # the engine is elsewhere, and may come back
                before = None
            else:
                self._service.activity.sample(snapshot.engine.cache)
                line = None if before is None else snapshot.line(before, now_s - before_s)
                if line is not None:
                    self._write_line(line)
                before, before_s = snapshot, now_s
            await asyncio.sleep(self._line_s)

    async def _snapshot(self) -> LoadSnapshot:
        engine = await self._service.engine.stats()
        metrics = self._metrics
        return LoadSnapshot(metrics.num_prompt, metrics.num_output, metrics.num_saved, engine)
