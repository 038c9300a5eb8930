"""`StderrWriter`: stderr that never blocks its writers, whatever happens at its other end."""

from __future__ import annotations

import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

MAX_PENDING_BYTES = 1 << 20
# For the last lines at the end of the process.
CLOSE_S = 1.0
# Between two attempts to write to a disk that is full.
RETRY_S = 1.0


class StderrWriter(io.TextIOBase):
    """A text stream whose writes are queued; a thread of its own writes them to a file descriptor.

    A pipe that nobody reads blocks that thread only. What would exceed `MAX_PENDING_BYTES` is dropped;
    so is what the descriptor refuses (a full disk, a closed pipe). The next text that can be written
    comes after a line that says how many bytes were dropped.

    Args:
        descriptor: of stderr; may be non-blocking.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._pending: deque[bytes] = deque()
        self._num_pending = self._num_dropped = 0  # bytes
        self._is_closing = False
        # Reentrant: a signal handler may log in the middle of a write.
        self._changed = threading.Condition(threading.RLock())
        self._thread = threading.Thread(target=self._run, name="stderr", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """UTF-8; what cannot be encoded is escaped."""
        return "utf-8"

    def writable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        """Queue a text; returns its length. Never waits."""
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._is_closing or self._num_pending + len(data) > MAX_PENDING_BYTES:
                self._num_dropped += len(data)
            else:
                self._pending.append(data)
                self._num_pending += len(data)
                self._changed.notify()
        return len(text)

    def flush_for(self, seconds: float) -> None:
        """Stop taking texts, and wait at most so long until the queued ones are written."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._is_closing:
                    self._changed.wait()
                data = b"".join(self._pending)
                self._pending.clear()
                num_dropped, self._num_dropped = self._num_dropped, 0
            if not data and not num_dropped:
                return
            num_payload = len(data)
            if num_dropped:
                data = b"stderr could not be written: %d bytes are lost\n" % num_dropped + data
            num_lost = self._write_all(data)
            with self._changed:
                # Those in the hands of this thread count as pending until they are written.
                self._num_pending = sum(map(len, self._pending))
                has_said = num_lost <= num_payload
                self._num_dropped += num_lost if has_said else num_payload + num_dropped
                if self._is_closing and num_lost:
                    return

    def _write_all(self, data: bytes) -> int:
        """Write to the descriptor; returns how many bytes it refused."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                select.select((), (self._descriptor,), (), RETRY_S)
            except OSError:
                # No faster attempts than this: the descriptor may refuse for ever.
                if not self._is_closing:
                    time.sleep(RETRY_S)
                return len(view)
        return 0


@contextmanager
def stderr_in_background() -> Iterator[None]:
    """Replace `sys.stderr` by a `StderrWriter` over its descriptor, if it has one."""
    original = sys.stderr
    try:
        original.flush()
        descriptor = original.fileno()
    except (AttributeError, OSError, ValueError):  # no stderr, or one in memory
        yield
        return
    writer = StderrWriter(descriptor)
    sys.stderr = writer
    try:
        yield
    finally:
        sys.stderr = original
        writer.flush_for(CLOSE_S)
