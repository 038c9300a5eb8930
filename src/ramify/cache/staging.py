"""The owners of the staging buffers through which pages travel between the pool and the stores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

from ramify.errors import InvariantError


class BufferState(Enum):
    """Who owns a staging buffer."""

    FREE = "free"
    COPY = "copy"  # the engine's thread, until the writer gets the page
    WRITE = "write"  # the writer, until its page is stored
    READ = "read"  # a reader, until its call returns
    FILLED = "filled"  # a load; holds a verified page


_OF_READS = (BufferState.READ, BufferState.FILLED)


class StagingLedger:
    """The owner of every staging buffer; each has exactly one. For one thread.

    Writes never take the last `num_for_reads` buffers, so that a burst of evictions cannot starve a
    request that waits; reads never take more than those and the free ones of the other half.

    Args:
        num_buffers: at least 2.
        num_for_reads: at least 1, below `num_buffers`.
    """

    def __init__(self, num_buffers: int, num_for_reads: int) -> None:
        if not 1 <= num_for_reads < num_buffers:
            raise InvariantError(f"{num_for_reads} of {num_buffers} staging buffers for reads")
        self._states = [BufferState.FREE] * num_buffers
        self._free = list(range(num_buffers))
        self._num_for_reads = num_for_reads
        self._num_reading = 0  # READ or FILLED

    @property
    def num_buffers(self) -> int:
        """All buffers."""
        return len(self._states)

    @property
    def num_in_use(self) -> int:
        """Buffers that are not free."""
        return len(self._states) - len(self._free)

    @property
    def num_for_writes(self) -> int:
        """Free buffers beside those kept for reads."""
        return max(0, len(self._free) - max(0, self._num_for_reads - self._num_reading))

    def take_for_write(self) -> int | None:
        """A free buffer for a copy; None: there is none beside those kept for reads."""
        return self._take(BufferState.COPY) if self.num_for_writes else None

    def take_for_read(self) -> int | None:
        """A free buffer for a reader; None: reads have their share, or none is free."""
        if not self._free or self._num_reading >= max(self._num_for_reads, self.num_buffers // 2):
            return None
        self._num_reading += 1
        return self._take(BufferState.READ)

    def _take(self, state: BufferState) -> int:
        buffer = self._free.pop()
        self._states[buffer] = state
        return buffer

    def write(self, buffer: int) -> None:
        """Hand a buffer with a copy to the writer; again, after a call that was interrupted."""
        self._require(buffer, (BufferState.COPY, BufferState.WRITE))
        self._states[buffer] = BufferState.WRITE

    def fill(self, buffer: int) -> None:
        """Hand a buffer with a verified page from its reader to its load."""
        self._require(buffer, (BufferState.READ,))
        self._states[buffer] = BufferState.FILLED

    def free(self, buffer: int) -> None:
        """Take a buffer back from its owner, who must not touch it any more."""
        self._require(
            buffer,
            (BufferState.COPY, BufferState.WRITE, BufferState.READ, BufferState.FILLED),
        )
        self._num_reading -= self._states[buffer] in _OF_READS
        self._states[buffer] = BufferState.FREE
        self._free.append(buffer)

    def recover(self, copied: Collection[int]) -> None:
        """Free the buffers of copies that were interrupted, and count again.

        Args:
            copied: buffers whose copies the writer is still to get.
        """
        for buffer, state in enumerate(self._states):
            if state is BufferState.COPY and buffer not in copied:
                self._states[buffer] = BufferState.FREE
        self._free = [at for at, state in enumerate(self._states) if state is BufferState.FREE]
        self._num_reading = sum(state in _OF_READS for state in self._states)

    def _require(self, buffer: int, states: Sequence[BufferState]) -> None:
        if self._states[buffer] not in states:
            raise InvariantError(f"staging buffer {buffer} is {self._states[buffer].value}")

    def check(self, filled: Sequence[int]) -> None:
        """Recount; `filled` are the buffers of all loads.

        Raises:
            InvariantError: a buffer has no owner, or two.
        """
        free = sorted(i for i, state in enumerate(self._states) if state is BufferState.FREE)
        if free != sorted(self._free):
            raise InvariantError("the free staging buffers are miscounted")
        held = sorted(i for i, state in enumerate(self._states) if state is BufferState.FILLED)
        if held != sorted(filled):
            raise InvariantError(f"staging buffers {held} hold pages, loads own {sorted(filled)}")
        reading = sum(state in _OF_READS for state in self._states)
        if reading != self._num_reading:
            raise InvariantError("the staging buffers of reads are miscounted")
