"""Upload the small metadata arrays of a step to a device, in one copy: to new tensors, or to stable addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_STAGES = 2  # double buffering: the host writes one while the other is being copied


def next_power_of_two(count: int) -> int:
    """`count` rounded up to a power of two; 1 for 0."""
    return 1 << max(count - 1, 0).bit_length()


def upload_together(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Copy int64 arrays [n] to the device in one copy that the host does not wait for.

    Returns:
        a tensor [n] for each; on a CPU over the array's own memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    host = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *arrays]))
    if device.type == "cuda":
        host = host.pin_memory()  # torch keeps it until the copy is done
    together = host.to(device, non_blocking=True)
    return list(together.split([len(array) for array in arrays]))


class StagingBuffers:
    """Named int32 arrays in one device buffer that is updated in place.

    Addresses change only when an array outgrows its capacity. `generation` counts these changes; a
    CUDA graph captured in an earlier generation must not be replayed. The host side is pinned and
    double-buffered with an event each, so that a copy in progress is never overwritten. Nothing is
    read back from the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generation = 0
        self._capacity: dict[str, tuple[int, int]] = {}
        self._offsets: dict[str, int] = {}
        self._step = 0

    def upload(self, arrays: Mapping[str, NDArray[np.int32]]) -> dict[str, Tensor]:
        """Copy the arrays to the device; returns each as [capacity, width], at least its own shape.

        Rows beyond an array's own are zeros; in the last array they are undefined.

        Args:
            arrays: [n] or [n, width]; the same names in the same order at every step.
        """
        tables = {name: x if x.ndim == 2 else x[:, None] for name, x in arrays.items()}
        grown = {}
        for name, table in tables.items():
            rows, width = self._capacity.get(name, (0, 0))
            grown[name] = (
                max(rows, next_power_of_two(len(table))),
                max(width, next_power_of_two(table.shape[1])),
            )
        if grown != self._capacity:
            self._allocate(grown)
        stage = self._step % NUM_STAGES
        self._step += 1
        if self.device.type == "cuda" and self._step > NUM_STAGES:
            self._events[stage].synchronize()
        host, end = self._host[stage], 0
        last = next(reversed(tables))
        for name, table in tables.items():
            rows, width = self._capacity[name]
            view = host[self._offsets[name] :][: rows * width].reshape(rows, width)
            view[: len(table), : table.shape[1]] = table
            end = self._offsets[name] + len(table) * width
            if name != last:
                view[len(table) :] = 0
        self._buffer[:end].copy_(self._staged[stage][:end], non_blocking=True)
        if self.device.type == "cuda":
            self._events[stage].record()
        return {name: self._view(name) for name in tables}

    def _view(self, name: str) -> Tensor:
        rows, width = self._capacity[name]
        return self._buffer[self._offsets[name] :][: rows * width].view(rows, width)

    def _allocate(self, grown: dict[str, tuple[int, int]]) -> None:
        self._capacity = grown
        total = 0
        for name, (rows, width) in grown.items():
            self._offsets[name] = total
            total += -(-rows * width // 32) * 32  # 128-byte alignment
        on_gpu = self.device.type == "cuda"
        self._buffer = torch.zeros(total, dtype=torch.int32, device=self.device)
        self._staged = [
            torch.zeros(total, dtype=torch.int32, pin_memory=on_gpu) for _ in range(NUM_STAGES)
        ]
        self._host = [staged.numpy() for staged in self._staged]
        self._events = [torch.cuda.Event() for _ in range(NUM_STAGES)] if on_gpu else []
        self._step = 0
        self.generation += 1
