"""`BatchRunner`: runs the unfinished batches of all tenants while the server runs."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from ramify.server.batches.anthropic_lines import AnthropicLines
from ramify.server.batches.batch_run import BatchRun, Call, RunContext
from ramify.server.batches.journal import DiskFullError
from ramify.server.batches.lines import LineForm, OpenAiLines
from ramify.server.batches.records import BatchRecord, Result
from ramify.server.batches.slots import LineSlots
from ramify.server.batches.store import BatchStore
from ramify.server.tenants import Caller

logger = logging.getLogger(__name__)

SWEEP_S = 60.0  # between two looks for files past their time
FAULT_S = 10.0  # before a batch goes on whose disk or server has failed


def form_of(batch: BatchRecord) -> LineForm:
    """The form of a batch's lines."""
    return AnthropicLines() if batch.api == "anthropic" else OpenAiLines(batch.endpoint)


class BatchRunner:
    """Runs batches, those that an earlier process left unfinished too.

    Args:
        slots: how many lines run at once.
        call, caller_of, check_model, tools_first: see `RunContext`.
    """

    def __init__(
        self,
        store: BatchStore,
        slots: LineSlots,
        call: Call,
        *,
        caller_of: Callable[[str], Caller | None],
        check_model: Callable[[str | None], object],
        tools_first: bool,
    ) -> None:
        self.store, self.slots = store, slots
        self.results: Counter[Result] = Counter()  # of lines, since the process started
        self._context = RunContext(
            store,
            slots,
            call,
            caller_of,
            check_model,
            tools_first,
            self.results,
            plan_lock=asyncio.Lock(),
        )
        self._runs: dict[str, BatchRun] = {}  # by id of the batch
        self._turns: dict[str, asyncio.Lock] = {}  # by tenant
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Go on with the batches that are unfinished; for the event loop that serves."""
        for batch in self.store.unfinished():
            self.submit(batch)
        self._begin(self._sweep())

    def submit(self, batch: BatchRecord) -> None:
        """Run a batch."""
        turn = self._turns.setdefault(batch.tenant, asyncio.Lock())
        run = self._runs[batch.id] = BatchRun(self._context, batch, form_of(batch), turn)
        self._begin(self._run(run))

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self, batch: BatchRecord) -> BatchRecord:
        """Cancel a batch that is unfinished; returns its state.

        Raises:
            OSError: the disk failed; the batch goes on.
        """
        run = self._runs.get(batch.id)
        if run is not None and run.batch.status in ("validating", "in_progress"):
            await run.cancel()
        return self.current(batch)

    def current(self, batch: BatchRecord) -> BatchRecord:
        """A batch with its counts of now."""
        run = self._runs.get(batch.id)
        return batch if run is None else run.current

    @property
    def num_unfinished(self) -> int:
        """Batches that run or wait."""
        return len(self._runs)

    async def _run(self, run: BatchRun) -> None:
        while run.batch.is_unfinished:
            try:
                await run.run()
                break
            except DiskFullError as error:
                logger.error("batch %s cannot end: %s", run.batch.id, error)
            except Exception:  # a fault of the disk or of ours; the batch must not be lost
                logger.exception("batch %s failed; it goes on in %.0f s", run.batch.id, FAULT_S)
            await asyncio.sleep(FAULT_S)
        self._runs.pop(run.batch.id, None)

    async def _sweep(self) -> None:
        """Remove what is past its time, once a minute."""
        while True:
            try:
                await self.store.remove_expired()
            except OSError as error:
                logger.error("expired files cannot be removed: %s", error)
            await asyncio.sleep(SWEEP_S)

    async def aclose(self) -> None:
        """Stop: requests in flight are given up, and unfinished lines left for the next start."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
