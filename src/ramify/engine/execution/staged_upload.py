"""`StagedUpload`: the small arrays of a step, in one copy to fixed addresses on the device."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_STAGES = 2  # the host fills one while the other is being copied


class CopyStream(Protocol):
    """Copies from host memory in the order of a device's work, and events to wait for them."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy; `source` must not change until an event recorded after it has passed."""

    def record(self) -> Any:
        """An event behind all that was begun so far."""

    def wait(self, event: Any) -> None:
        """Return when an event has passed."""


class CudaStream:
    """The current stream of a CUDA device."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `CopyStream.copy`."""
        target.copy_(source, non_blocking=True)

    def record(self) -> torch.cuda.Event:
        """See `CopyStream.record`."""
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """See `CopyStream.wait`."""
        event.synchronize()


class HostStream:
    """A CPU, which copies at once."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See `CopyStream.copy`."""
        target.copy_(source)

    def record(self) -> None:
        """See `CopyStream.record`."""

    def wait(self, event: None) -> None:
        """See `CopyStream.wait`."""


class StagedUpload:
    """An int64 buffer on the device and two in pinned host memory, filled in turns.

    Args:
        num_words: of each buffer.
    """

    def __init__(self, num_words: int, device: torch.device, stream: CopyStream) -> None:
        self._stream, on_gpu = stream, device.type == "cuda"
        self.on_device = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._staged = [
            torch.zeros(num_words, dtype=torch.int64, pin_memory=on_gpu) for _ in range(NUM_STAGES)
        ]
        self._events: list[Any] = [None] * NUM_STAGES
        self._has_event = [False] * NUM_STAGES
        self._next = 0

    def fill(self) -> NDArray[np.int64]:
        """The host buffer to fill for the next `send`; waits until its last copy is done."""
        if self._has_event[self._next]:
            self._stream.wait(self._events[self._next])
        return self._staged[self._next].numpy()

    def send(self, num_words: int) -> None:
        """Begin to copy the first words of the buffer that `fill` returned."""
        stage = self._next
        self._stream.copy(self.on_device[:num_words], self._staged[stage][:num_words])
        self._events[stage], self._has_event[stage] = self._stream.record(), True
        self._next = (stage + 1) % NUM_STAGES
