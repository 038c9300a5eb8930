"""`EvictedNames`: the pages that a store evicted last, so that a miss can say so."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

MAX_NAMES: Final = 1 << 16  # 6 MB; 24 GB of pages of 368 KB
NAME_BYTES: Final = 8  # of each name: two that are mistaken for each other cost a wrong explanation


class EvictedNames:
    """A bounded set of names or hashes, the oldest of which are forgotten. Not for several threads."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._names: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, name: bytes) -> bool:
        return _short(name) in self._names

    def add(self, names: Iterable[bytes]) -> None:
        """Note pages that were evicted."""
        for name in names:
            self._names[_short(name)] = None
        while len(self._names) > self._max_names:
            self._names.popitem(last=False)

    def discard(self, name: bytes) -> None:
        """Forget a page that was written again, or was removed by order."""
        self._names.pop(_short(name), None)

    def clear(self) -> None:
        """Forget all."""
        self._names.clear()


def _short(name: bytes) -> int:
    return int.from_bytes(name[:NAME_BYTES], "little")
