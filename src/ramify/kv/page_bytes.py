"""`PageBytes`: a page of a K/V pool as one run of bytes, for stores outside the pool."""

from __future__ import annotations

from ctypes import PyDLL, c_size_t, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray

from ramify.errors import ConfigError
from ramify.kv.pool import KVPool

# A PyDLL's calls keep the interpreter's lock. NumPy, and `ctypes.memmove`, would hand it to the tiers'
# threads at each piece of a page.
_memmove = PyDLL(None).memmove
_memmove.argtypes, _memmove.restype = (c_void_p, c_void_p, c_size_t), None


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
        self._planes: list[NDArray[np.uint8]] = []  # [pages, bytes]; they own the memory
        for layer in range(pool.layout.num_layers):
            for plane in pool.planes(layer).values():
                self._planes.append(plane.reshape(plane.shape[0], -1).view(torch.uint8).numpy())
        # Address and bytes of page 0 of each plane.
        self._pieces = [(plane.ctypes.data, plane.shape[1]) for plane in self._planes]
        self.page_bytes = sum(size for _, size in self._pieces)

    def read_page(self, page: int, into: memoryview) -> None:
        """Copy a page of the pool into a buffer of `page_bytes` bytes."""
        if into.readonly:
            raise ConfigError("a page cannot be copied into a read-only buffer")
        target = self._address(page, into)
        for begin, size in self._pieces:
            _memmove(target, begin + page * size, size)
            target += size

    def write_page(self, page: int, data: memoryview) -> None:
        """Copy a buffer of `page_bytes` bytes into a page of the pool."""
        source = self._address(page, data)
        for begin, size in self._pieces:
            _memmove(begin + page * size, source, size)
            source += size

    def _address(self, page: int, data: memoryview) -> int:
        """Address of a buffer for a page; both are checked, since nothing behind this does."""
        if not 0 <= page < self.num_pages:
            raise ConfigError(f"page {page} is not in 0..{self.num_pages - 1}")
        if data.nbytes != self.page_bytes:
            raise ConfigError(f"a buffer of {data.nbytes} bytes for a page of {self.page_bytes}")
        return int(np.frombuffer(data, np.uint8).ctypes.data)
