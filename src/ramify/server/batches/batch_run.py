"""`BatchRun`: one batch from its validation to its results."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ramify.server.batches.directory import RECORD_BYTES
from ramify.server.batches.journal import DiskFullError, ResultJournal, cut_to_whole_lines
from ramify.server.batches.lines import LineAnswer, LineForm, LineRequest, Unanswered, is_streamed
from ramify.server.batches.plan import BatchPlan, InputLostError
from ramify.server.batches.records import (
    BatchRecord,
    LineCounts,
    LineError,
    Result,
    Status,
    StoredFile,
)
from ramify.server.batches.slots import HeldRows, LineSlots
from ramify.server.batches.store import BatchStore
from ramify.server.errors import ApiError
from ramify.server.tenants import Caller

logger = logging.getLogger(__name__)

MAX_FAILURES = 3  # answers of 500 to the same line, before that is its result
MAX_WAIT_S = 30.0  # before an overloaded server is asked again
FULL_DISK_S = 10.0  # between two looks for room, of a batch that has none for its results
ROOM_BYTES = 1 << 14  # with which it goes on
MAX_REFUSED = 8  # lines that wait to be sent again, before others have to wait as well
NUM_TOGETHER = 1000  # results of lines that were never run, in one write

Call = Callable[[str, bytes, Caller, str], Awaitable[LineAnswer]]


@dataclass(frozen=True, slots=True)
class RunContext:
    """What the runs of all batches share.

    `call` answers a request to an endpoint as the server answers the same body over HTTP; the last of its
    arguments is the id of the batch. `caller_of`
    returns None for a tenant that has no key any more. `plan_lock` lets one input file be read at a time.
    """

    store: BatchStore
    slots: LineSlots
    call: Call
    caller_of: Callable[[str], Caller | None]
    check_model: Callable[[str | None], object]
    tools_first: bool
    results: Counter[Result]
    plan_lock: asyncio.Lock


class BatchRun:
    """A batch that is unfinished. `run` ends with it, however often it was begun before.

    Args:
        turn: held while lines run, so that a tenant's batches run one after the other.
    """

    def __init__(
        self, context: RunContext, batch: BatchRecord, form: LineForm, turn: asyncio.Lock
    ) -> None:
        self._context, self._store = context, context.store
        self.batch, self._form, self._turn = batch, form, turn
        self._is_cancelled, self._changing = asyncio.Event(), asyncio.Lock()
        self._journal: ResultJournal | None = None
        self._last_plan: BatchPlan | None = None
        self._refused = asyncio.Semaphore(MAX_REFUSED)
        if batch.status == "cancelling":
            self._is_cancelled.set()

    @property
    def current(self) -> BatchRecord:
        """The batch with the counts of now."""
        if self._journal is None:
            return self.batch
        return msgspec.structs.replace(self.batch, counts=self._journal.counts)

    async def cancel(self) -> None:
        """Ask for the end; lines in flight are given up.

        Raises:
            OSError: the disk failed; the batch goes on.
        """
        if self.batch.status in ("validating", "in_progress"):
            await self._reach("cancelling")
        if self.batch.status == "cancelling":
            self._is_cancelled.set()

    async def run(self) -> None:
        """Validate, answer, write results; ends when the batch has ended.

        Raises:
            OSError: the disk failed; to be run again.
        """
        try:
            if self.batch.status != "validating" or await self._validate():
                unanswered = await self._answer_until_end()
                await self._finish(unanswered)
        except* InputLostError:
            await self._fail_without_input()

    async def _plan(self) -> BatchPlan:
        """The lines of the input; read again unless this batch is the one that runs."""
        if self._last_plan is not None:
            return self._last_plan
        context, batch = self._context, self.batch
        path = self._store.directory.file(batch.tenant, batch.input_id)
        # The model was checked at the validation; the server may have another name by now.
        check = context.check_model if batch.status == "validating" else _any_model
        async with context.plan_lock:
            plan = await asyncio.to_thread(
                BatchPlan.read_file, path, self._form, check, tools_first=context.tools_first
            )
        # Hundreds of batches may wait for their turn, with 20 MB each.
        self._last_plan = (
            None if self._turn.locked() and self.batch.status == "validating" else plan
        )
        return plan

    async def _validate(self) -> bool:
        """Check the input; returns whether lines can run."""
        plan = await self._plan()
        if plan.errors:
            await self._reach("failed", errors=tuple(plan.errors))
            return False
        await self._reach("in_progress", counts=LineCounts(total=len(plan)), model=plan.model)
        return True

    async def _answer_until_end(self) -> Unanswered | None:
        """Answer lines until all have answers; returns the result of the others, if there are some."""
        if self._is_cancelled.is_set():
            return "cancelled"
        left_s = self.batch.expires_at - self._store.now
        work = asyncio.ensure_future(self._answer_in_turn())
        cancelled = asyncio.ensure_future(self._is_cancelled.wait())
        try:
            await asyncio.wait(
                {work, cancelled}, timeout=max(0, left_s), return_when=asyncio.FIRST_COMPLETED
            )
            if work.done():
                work.result()
                return None
            return "cancelled" if self._is_cancelled.is_set() else "expired"
        finally:
            for task in (work, cancelled):
                task.cancel()
            await asyncio.gather(work, cancelled, return_exceptions=True)

    async def _answer_in_turn(self) -> None:
        caller = self._context.caller_of(self.batch.tenant)
        if caller is None:
            logger.warning("batch %s waits: its tenant has no key any more", self.batch.id)
            await asyncio.Event().wait()  # until it expires
        assert caller is not None
        async with self._turn:
            while True:
                try:
                    await self._answer_lines(caller)
                    return
                except* DiskFullError as errors:
                    logger.error(
                        "batch %s waits for disk space: %s", self.batch.id, errors.exceptions[0]
                    )
                await self._wait_for_room()

    async def _wait_for_room(self) -> None:
        """Wait until there is some room: answers that cannot be written would be computed in vain."""
        store = self._store
        while True:
            await asyncio.sleep(FULL_DISK_S)
            free = await asyncio.to_thread(shutil.disk_usage, store.directory.path)
            if free.free > ROOM_BYTES and store.space.has_room(self.batch.tenant, ROOM_BYTES):
                return

    async def _answer_lines(self, caller: Caller) -> None:
        """Answer the lines that have no result, in the order of their prefixes."""
        plan = await self._plan()
        journal = await self._open_journal(plan)
        # More at once than the quota allows would be refused, and sent again much later.
        most = caller.quota.max_requests
        live = asyncio.Semaphore(len(plan) if most is None else max(1, most))

        def end(rows: HeldRows, _: asyncio.Task[None]) -> None:
            rows.release()
            live.release()

        try:
            async with asyncio.TaskGroup() as group:
                for number in plan.order:
                    if journal.is_done[number]:
                        continue
                    await live.acquire()
                    async with self._refused:  # a server that refuses many refuses the next as well
                        rows = HeldRows(self._context.slots, plan.rows[number])
                    await rows.acquire()
                    task = group.create_task(self._answer_line(plan, journal, number, caller, rows))
                    task.add_done_callback(partial(end, rows))
        finally:
            await journal.close()

    async def _open_journal(self, plan: BatchPlan) -> ResultJournal:
        store = self._store
        opening = asyncio.ensure_future(
            asyncio.to_thread(ResultJournal, store.directory, store.space, self.batch, plan)
        )
        try:
            journal = await asyncio.shield(opening)
        except asyncio.CancelledError:
            await (await opening).close()
            raise
        store.space.count(self.batch.tenant, -journal.num_removed)
        self._journal = journal
        return journal

    async def _answer_line(
        self,
        plan: BatchPlan,
        journal: ResultJournal,
        number: int,
        caller: Caller,
        rows: HeldRows,
    ) -> None:
        request = self._form.read(await asyncio.to_thread(plan.read_line, number))
        answer = await self._answer(request, caller, rows)
        result = self._form.answered(request.custom_id, answer)
        await journal.append([result])
        self._context.results[result.result] += 1

    async def _answer(self, request: LineRequest, caller: Caller, rows: HeldRows) -> LineAnswer:
        """Answer a request; again and again while the server is overloaded, without rows meanwhile."""
        endpoint = self.batch.endpoint
        if is_streamed(request.body):
            return self._refusal(ApiError(400, "a line of a batch has no stream", param="stream"))
        num_failures, wait_s = 0, 1.0
        while True:
            answer = await self._context.call(endpoint, request.body, caller, self.batch.id)
            if not answer.is_aborted:
                num_failures += answer.status == 500  # else it would be sent for ever
                is_overload = answer.status in (429, 499) or answer.status > 500
                if not is_overload and (answer.status != 500 or num_failures >= MAX_FAILURES):
                    return answer
            rows.release()
            async with self._refused:
                await asyncio.sleep(min(MAX_WAIT_S, answer.retry_after_s or wait_s))
            wait_s *= 2
            await rows.acquire()

    def _refusal(self, error: ApiError) -> LineAnswer:
        name = f"req_{self.batch.id[-24:]}"
        is_openai = self.batch.api == "openai"
        body: Any = error.openai() if is_openai else error.anthropic(name)
        return LineAnswer(error.status, name, msgspec.json.encode(body))

    # -- the end -----------------------------------------------------------------------------

    async def _finish(self, unanswered: Unanswered | None) -> None:
        """Give the lines that have no result one, and let clients see the files."""
        plan = await self._plan()
        if unanswered is None:
            await self._reach("finalizing")
        journal = await self._open_journal(plan)
        try:
            await self._mark_unanswered(plan, journal, unanswered)
        finally:
            await journal.close()
        status: Status = "cancelled" if self._is_cancelled.is_set() else unanswered or "completed"
        await self._reach(status, **await self._publish(journal.num_bytes))

    async def _fail_without_input(self) -> None:
        """End a batch that can never go on; the results that it has stay."""
        batch, store = self.batch, self._store
        logger.error("batch %s has lost its input %s; it ends", batch.id, batch.input_id)
        num_bytes, results = [], Counter[Result]()
        for name in (batch.output_id, batch.error_id):
            path = store.directory.file(batch.tenant, name)
            size, num_removed, in_file = await asyncio.to_thread(
                cut_to_whole_lines, path, self._form
            )
            results += in_file
            store.space.count(batch.tenant, -num_removed)
            num_bytes.append(size)
        error = LineError(
            "input_file_missing",
            f"The input file {batch.input_id} is not on the server's disk any more. Lines that were "
            "answered before have results; make a new batch of the others.",
        )
        counts = LineCounts(batch.counts.total, **{str(name): num for name, num in results.items()})
        fields = {"errors": (error,), "counts": counts}
        await self._reach("failed", **fields, **await self._publish(num_bytes))

    async def _mark_unanswered(
        self, plan: BatchPlan, journal: ResultJournal, unanswered: Unanswered | None
    ) -> None:
        left = [name for name, number in plan.numbers.items() if not journal.is_done[number]]
        assert not left or unanswered is not None, "every line was answered"
        while left and unanswered is not None:
            names, left = left[:NUM_TOGETHER], left[NUM_TOGETHER:]
            results = [self._form.unanswered(name, unanswered) for name in names]
            await journal.append(results, within_limits=False)
            self._context.results[unanswered] += len(results)

    async def _publish(self, sizes: Sequence[int]) -> dict[str, bool]:
        """Make files of the results, for an API that has files; remove those that are empty.

        Args:
            sizes: bytes of the answers and of the errors.

        Returns:
            which of them there are, as fields of the batch.
        """
        batch, store = self.batch, self._store
        names = (batch.output_id, batch.error_id)
        for name, kind, num_bytes in zip(names, ("output", "error"), sizes, strict=True):
            if not num_bytes:
                await asyncio.to_thread(store.directory.remove, batch.tenant, name)
            elif batch.api == "openai" and store.find_file(batch.tenant, name) is None:
                now = store.now
                record = StoredFile(
                    id=name,
                    tenant=batch.tenant,
                    filename=f"{batch.id}_{kind}.jsonl",
                    purpose="batch_output",
                    num_bytes=num_bytes,
                    created_at=now,
                    expires_at=now + batch.output_s,
                )
                await store.add_file(record)
                store.space.count(batch.tenant, RECORD_BYTES)
        return {"has_output": sizes[0] > 0, "has_errors": sizes[1] > 0}

    async def _reach(self, status: Status, **fields: Any) -> None:
        """Change the state and other fields, on disk first. What is cancelled goes on to its end only."""
        async with self._changing:
            batch = self.current
            is_too_late = status == "cancelling" and batch.status == "finalizing"
            if is_too_late or not batch.is_unfinished:
                return  # it has ended while the caller waited for the lock
            if batch.status == "cancelling" and status in ("in_progress", "finalizing"):
                status = "cancelling"
            times = (
                batch.times if status == batch.status else batch.times | {status: self._store.now}
            )
            fields = {"status": status, "times": times, **fields}
            batch = msgspec.structs.replace(batch, **fields)
            await self._store.update_batch(batch)
            self.batch = batch


def _any_model(model: str | None) -> None:
    """Every model passes."""
