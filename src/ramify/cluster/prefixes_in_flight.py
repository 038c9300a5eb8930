"""`PrefixesInFlight`: which replicas compute a prefix now, or will when its turn comes."""

from __future__ import annotations

from collections.abc import Sequence

# Depths at which a prefix is noted: every page up to here, then every DEPTH_STRIDE-th. A prompt of
# 2,048 pages takes 270 entries.
DENSE_PAGES = 16
DEPTH_STRIDE = 8


class PrefixesInFlight:
    """Page hash → replicas with a request in flight whose prompt has that page."""

    def __init__(self) -> None:
        self._replicas: dict[bytes, list[str]] = {}

    def __len__(self) -> int:
        return len(self._replicas)

    def add(self, replica: str, page_hashes: Sequence[bytes]) -> tuple[bytes, ...]:
        """Note the prefixes of a prompt; returns what `remove` needs."""
        noted = (*page_hashes[:DENSE_PAGES], *page_hashes[_FIRST_SPARSE::DEPTH_STRIDE])
        replicas = self._replicas
        for page_hash in noted:
            names = replicas.get(page_hash)
            if names is None:
                replicas[page_hash] = [replica]
            else:
                names.append(replica)
        return noted

    def remove(self, replica: str, noted: Sequence[bytes]) -> None:
        """Drop what `add` noted for one prompt."""
        replicas = self._replicas
        for page_hash in noted:
            names = replicas[page_hash]
            names.remove(replica)
            if not names:
                del replicas[page_hash]

    def match(self, page_hashes: Sequence[bytes]) -> dict[str, int]:
        """How many leading pages of a prompt each replica has in flight, from below: see the depths."""
        depths: dict[str, int] = {}
        replicas = self._replicas
        if not replicas:
            return depths
        # Chained hashes: a page that nobody computes is followed by none that somebody computes.
        for depth, page_hash in enumerate(page_hashes[:DENSE_PAGES], 1):
            if page_hash not in replicas:
                return depths
            for name in replicas[page_hash]:
                depths[name] = depth
        for depth in range(_FIRST_SPARSE + 1, len(page_hashes) + 1, DEPTH_STRIDE):
            names = replicas.get(page_hashes[depth - 1])
            if names is None:
                return depths
            for name in names:
                depths[name] = depth
        return depths


_FIRST_SPARSE = DENSE_PAGES + DEPTH_STRIDE - 1
