"""What every launch shares: dtypes, alignment, and whether Triton interprets.

Triton compiles a kernel once more for arguments of another alignment, with other vectors and so
other sums. `aligned` keeps that from changing bits.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: the widest load of a thread


def reason_no_triton(device: torch.device) -> str | None:
    """None, or why Triton's kernels cannot run on this device; triton itself is not looked for."""
    switch = os.environ.get("TRITON_INTERPRET", "0").lower()
    if device.type == "cuda" or (device.type == "cpu" and switch in {"1", "true", "yes", "on"}):
        return None
    return f"device {device.type}: Triton kernels need CUDA (or TRITON_INTERPRET=1 on CPU)"


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and at a multiple of `ALIGNMENT` bytes; copied if it is not."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def padded(width: int, least: int = 16) -> int:
    """`width` rounded up to a power of two, at least `least`: the size of a block of a kernel."""
    return max(least, 1 << (width - 1).bit_length())


def row_warps(block: int) -> int:
    """Warps of a program that holds a row of `block` elements: up to 64 elements a thread."""
    return min(16, max(1, block // 1024)) if block >= 512 else 1
