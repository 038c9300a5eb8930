"""`ResultJournal`: the results of a batch, appended as they come, each line of the input at most once.

The files of results are the journal itself: what a batch has answered when its server is killed is read
back from them, and the rest is run. A line that was cut off is removed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from ramify.errors import RamifyError
from ramify.reasons import reason_of
from ramify.server.batches.directory import BatchDirectory, DiskSpace, is_full, write_all
from ramify.server.batches.lines import LineForm, ResultLine, joined
from ramify.server.batches.plan import BatchPlan
from ramify.server.batches.records import BatchRecord, LineCounts, Result

SYNC_S = 1.0  # results that a loss of power may take; a kill takes none


class DiskFullError(RamifyError):
    """There is no room for a result now."""


class ResultJournal:
    """The files of results of one batch. Open it in a thread; append from the event loop.

    `is_done` has a 1 for each line with a result.

    Args:
        directory, space: where they are, and what counts their bytes.

    Raises:
        OSError: the disk failed.
    """

    def __init__(
        self, directory: BatchDirectory, space: DiskSpace, batch: BatchRecord, plan: BatchPlan
    ) -> None:
        self._space, self._tenant = space, batch.tenant
        self.counts = LineCounts(total=len(plan))
        self.is_done = bytearray(len(plan))
        self._numbers = plan.numbers
        self._lock, self._synced_s = asyncio.Lock(), time.monotonic()
        paths = [directory.file(batch.tenant, name) for name in (batch.output_id, batch.error_id)]
        self._handles: list[int] = []
        self.num_removed = 0  # bytes of lines that were cut off
        self.num_bytes = [self._open(path, plan.form) for path in paths]

    def _open(self, path: Path, form: LineForm) -> int:
        """Open a file and read what is in it; returns its number of bytes."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._handles.append(handle)
        before = os.fstat(handle).st_size
        with os.fdopen(os.dup(handle), "rb") as file:
            end = self._recover(file, form)
        if end < before:
            os.ftruncate(handle, end)
            self.num_removed += before - end
        return end

    def _recover(self, file: BinaryIO, form: LineForm) -> int:
        """Count the results in a file; returns where the last whole one ends."""
        end = 0
        for line in file:
            try:
                custom_id, result = form.result_of(line)
                number = self._numbers[custom_id]
            except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
                break
            if not line.endswith(b"\n") or self.is_done[number]:
                break
            self.is_done[number] = 1
            self.counts = self.counts.add(result)
            end += len(line)
        return end

    async def append(self, results: Sequence[ResultLine], *, within_limits: bool = True) -> None:
        """Write results, and count their lines as done. A caller that is cancelled does not stop it.

        Args:
            within_limits: write nothing beyond the limits of `DiskSpace`.

        Raises:
            DiskFullError: there is no room; no line is done.
            OSError: the disk failed.
        """
        writing = asyncio.ensure_future(self._append(results, within_limits))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            writing.add_done_callback(_forget_error)
            raise

    async def _append(self, results: Sequence[ResultLine], within_limits: bool) -> None:
        async with self._lock:
            new = [
                result for result in results if not self.is_done[self._numbers[result.custom_id]]
            ]
            num_bytes = sum(len(result.data) for result in new)
            if within_limits and not self._space.has_room(self._tenant, num_bytes):
                raise DiskFullError(
                    "the files of this tenant, or of all, have no room for a result"
                )
            for index in (0, 1):
                lines = [result for result in new if result.is_error == bool(index)]
                if not lines:
                    continue
                data = joined(lines)
                try:
                    await asyncio.to_thread(self._write, index, data)
                except OSError as error:
                    if is_full(error):
                        raise DiskFullError(reason_of(error)) from None
                    raise
                self.num_bytes[index] += len(data)
                self._space.count(self._tenant, len(data))
                for result in lines:
                    self.is_done[self._numbers[result.custom_id]] = 1
                    self.counts = self.counts.add(result.result)

    def _write(self, index: int, data: bytes) -> None:
        handle = self._handles[index]
        try:
            write_all(handle, data)
        except OSError:
            with suppress(OSError):
                os.ftruncate(handle, self.num_bytes[index])
            raise
        if time.monotonic() - self._synced_s >= SYNC_S:
            self._sync()

    def _sync(self) -> None:
        for handle in self._handles:
            os.fdatasync(handle)
        self._synced_s = time.monotonic()

    async def close(self) -> None:
        """Wait for results that are being written, make all survive a loss of power, close the files.

        Raises:
            OSError: the disk failed.
        """
        async with self._lock:
            handles = [*self._handles]
            try:
                await asyncio.to_thread(self._sync)
            finally:
                self._handles = []
                for handle in handles:
                    os.close(handle)


def cut_to_whole_lines(path: Path, form: LineForm) -> tuple[int, int, Counter[Result]]:
    """Remove a line that was cut off from a file of results; returns the bytes that stay, and its own.

    The results that stay are counted, too. A file that is not there has none.

    Raises:
        OSError: the disk failed.
    """
    try:
        file = path.open("r+b")
    except FileNotFoundError:
        return 0, 0, Counter()
    end, results = 0, Counter[Result]()
    with file:
        for line in file:
            if line.endswith(b"\n"):
                end += len(line)
                with suppress(msgspec.DecodeError, UnicodeDecodeError):
                    results[form.result_of(line)[1]] += 1
        num_removed = file.seek(0, os.SEEK_END) - end
        file.truncate(end)
    return end, num_removed, results


def _forget_error(writing: asyncio.Future[None]) -> None:
    """Nobody waits for a result any more: its line has none if it could not be written."""
    if not writing.cancelled():
        writing.exception()
