"""`PrefixesInFlight`: which replicas compute a prefix now, or will when its turn comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

# Pages at which a prefix is noted: (up to this depth, every so many). A prompt of 2,048 pages takes 83
# entries, and a prefix in flight is known to 6 % or 8 pages of its length.
DEPTH_STEPS = ((8, 1), (128, 8), (1 << 20, 32))


class PrefixesInFlight:
    """Page hash → replicas with a request in flight whose prompt has that page."""

    def __init__(self) -> None:
        self._replicas: dict[bytes, tuple[str, ...]] = {}  # a name for each request

    def __len__(self) -> int:
        return len(self._replicas)

    def add(self, replica: str, page_hashes: Sequence[bytes]) -> tuple[bytes, ...]:
        """Note the prefixes of a prompt; returns what `remove` needs."""
        noted = tuple([page_hashes[depth - 1] for depth in _noted_depths(len(page_hashes))])
        replicas, names = self._replicas, (replica,)
        for page_hash in noted:
            replicas[page_hash] = replicas.get(page_hash, ()) + names
        return noted

    def remove(self, replica: str, noted: Sequence[bytes]) -> None:
        """Drop what `add` noted for one prompt."""
        replicas = self._replicas
        for page_hash in noted:
            names = replicas[page_hash]
            if len(names) == 1:
                del replicas[page_hash]
            else:
                at = names.index(replica)
                replicas[page_hash] = names[:at] + names[at + 1 :]

    def match(self, page_hashes: Sequence[bytes]) -> dict[str, int]:
        """How many leading pages of a prompt each replica has in flight, from below: see the depths."""
        depths: dict[str, int] = {}
        replicas = self._replicas
        if not replicas:
            return depths
        # Chained hashes: a page that nobody computes is followed by none that somebody computes.
        for depth in _noted_depths(len(page_hashes)):
            names = replicas.get(page_hashes[depth - 1])
            if names is None:
                break
            for name in names:
                depths[name] = depth
        return depths


def _noted_depths(num_pages: int) -> Iterator[int]:
    """Depths from 1 to `num_pages` at which prefixes are noted."""
    begin = 0
    for end, step in DEPTH_STEPS:
        yield from range(begin + step, min(end, num_pages) + 1, step)
        begin = end
