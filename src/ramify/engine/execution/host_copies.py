"""Copies between host and device that the host does not wait for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on a device; on a CPU a tensor over its memory."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        # torch keeps the pinned memory until the copy is done.
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


def to_host(tensor: Tensor) -> Tensor:
    """The tensor in host memory, complete once the device has come so far; on a CPU itself."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
