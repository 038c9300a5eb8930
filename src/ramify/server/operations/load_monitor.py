"""What looks after a server while it serves: the delay of its event loop, and a line now and then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from ramify.engine.context import EngineStats
from ramify.engine.core import EngineCore
from ramify.errors import EngineStoppedError
from ramify.server.operations.metrics import Metrics
from ramify.server.service import Service

logger = logging.getLogger("ramify.load")

TICK_S = 0.05
LINE_S = 10.0


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Tokens since the start."""

    prompt: float
    output: float
    saved: float  # of the prompts, what nobody had to compute
    engine: EngineStats

    def line(self, before: LoadSnapshot, passed_s: float) -> str | None:
        """What happened since, in one line; None if nothing did and nothing is live."""
        prompt, output = self.prompt - before.prompt, self.output - before.output
        live = self.engine.num_running + self.engine.num_waiting
        if not prompt and not output and not live:
            return None
        cache = self.engine.cache
        saved = self.saved - before.saved
        used = 1 - cache.free_pages / cache.num_pages
        rate = f"{saved / prompt:.0%}" if prompt else "-"
        return (
            f"in={prompt / passed_s:.0f} tok/s out={output / passed_s:.0f} tok/s "
            f"running={self.engine.num_running} waiting={self.engine.num_waiting} "
            f"kv={used:.0%} hit={rate} saved={saved:.0f} prefill tokens"
        )


class LoadMonitor:
    """Measures while it runs.

    Args:
        write_line: takes a line.
        tick_s: how often the event loop is asked how late it is.
        line_s: how often there is a line, if there is something to tell.
    """

    def __init__(
        self,
        service: Service,
        metrics: Metrics,
        *,
        write_line: Callable[[str], None] = logger.info,
        tick_s: float = TICK_S,
        line_s: float = LINE_S,
    ) -> None:
        self._service, self._metrics, self._write_line = service, metrics, write_line
        self._tick_s, self._line_s = tick_s, line_s

    async def run(self) -> None:
        """Until it is cancelled, or the engine has ended."""
        async with asyncio.TaskGroup() as both:
            both.create_task(self._measure_loop_delay())
            both.create_task(self._log_load())

    async def _measure_loop_delay(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._tick_s
            await asyncio.sleep(self._tick_s)
            self._metrics.loop_delay.observe(max(0.0, loop.time() - due))

    async def _log_load(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            before, since = await self._snapshot(), loop.time()
            while True:
                await asyncio.sleep(self._line_s)
                totals, now = await self._snapshot(), loop.time()
                line = totals.line(before, now - since)
                if line is not None:
                    self._write_line(line)
                before, since = totals, now
        except EngineStoppedError:
            return

    async def _snapshot(self) -> LoadSnapshot:
        engine = await self._service.engine.run(EngineCore.stats)
        told = self._metrics
        return LoadSnapshot(told.num_prompt, told.num_output, told.num_saved, engine)
