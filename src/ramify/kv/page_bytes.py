"""`PageBytes`: a page of a K/V pool as one run of bytes, for stores outside the pool."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ramify.errors import ConfigError
from ramify.kv.pool import KVPool


class PageBytes:
    """Copies whole pages of a pool to and from buffers, bit for bit.

    A page is all its planes and scales: layer by layer, in each layer in the order of
    `KVLayout.stored`. The padding page is no page here.

    Args:
        pool: on the CPU.

    Raises:
        ConfigError: the pool is on another device.
    """

    def __init__(self, pool: KVPool) -> None:
        if pool.device.type != "cpu":
            raise ConfigError(
                f"the K/V pool is on {pool.device}, and pages are copied to tiers from the CPU only; "
                "leave out cache_dir and cache_host"
            )
        self.num_pages = pool.num_pages
        self._pieces: list[tuple[NDArray[np.uint8], int, int]] = []  # [pages, bytes], begin, end
        end = 0
        for layer in range(pool.layout.num_layers):
            for plane in pool.planes(layer).values():
                flat = plane.reshape(plane.shape[0], -1).view(torch.uint8).numpy()
                begin, end = end, end + flat.shape[1]
                self._pieces.append((flat, begin, end))
        self.page_bytes = end

    def read_page(self, page: int, into: memoryview) -> None:
        """Copy a page of the pool into a buffer of `page_bytes` bytes."""
        self._require(page)
        target = np.frombuffer(into, np.uint8)
        for plane, begin, end in self._pieces:
            target[begin:end] = plane[page]

    def write_page(self, page: int, data: memoryview) -> None:
        """Copy a buffer of `page_bytes` bytes into a page of the pool."""
        self._require(page)
        source = np.frombuffer(data, np.uint8)
        for plane, begin, end in self._pieces:
            plane[page] = source[begin:end]

    def _require(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise ConfigError(f"page {page} is not in 0..{self.num_pages - 1}")
