"""Measured peaks of this machine: FLOP/s of matmuls, bytes/s read from memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

ROWS, WIDTH = 512, 2048
READ_BYTES = 256 << 20  # beyond every cache
LEAST_S = 0.15


class Peaks:
    """Best FLOP/s by dtype and best bandwidth of all samples; a slow sample lowers neither."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.flops: dict[str, float] = {}
        self.bandwidth = 0.0
        self._memory = torch.ones(READ_BYTES // 4)

    @torch.inference_mode()
    def sample(self, dtype: str) -> None:
        """Measure both peaks again, in about 0.5 s. bfloat16 may be computed in float32."""
        for kind in {dtype, "float32"}:
            x = torch.randn(ROWS, WIDTH).to(getattr(torch, kind))
            weight = torch.randn(WIDTH, WIDTH).to(getattr(torch, kind))
            for matmul in (_plain, _packed):
                call = matmul(x, weight)
                if call is not None:
                    rate = 2.0 * ROWS * WIDTH * WIDTH / _fastest(call)
                    for name in {kind, dtype}:
                        self.flops[name] = max(self.flops.get(name, 0.0), rate)
        self.read()

    def read(self) -> float:
        """Measure bytes/s from memory again; returns what it is now."""
        rate = READ_BYTES / _fastest(self._memory.sum)
        self.bandwidth = max(self.bandwidth, rate)
        return rate


def _fastest(call: Callable[[], object]) -> float:
    times: list[float] = []
    while sum(times) < LEAST_S or len(times) < 2:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def _plain(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    return lambda: F.linear(x, weight)


def _packed(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object] | None:
    """oneDNN's own layout of the weight, through torch's private operators where they exist."""
    operators: Any = torch.ops.mkldnn
    try:
        packed = operators._reorder_linear_weight(weight, len(x))  # noqa: SLF001
        operators._linear_pointwise(x, packed, None, "none", [], "")  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return None
    return lambda: operators._linear_pointwise(x, packed, None, "none", [], "")  # noqa: SLF001
