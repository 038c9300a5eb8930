"""`home_of`: which of the replicas that have a prefix is to keep it when they need not all."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

_MASK = (1 << 64) - 1


def home_of(page_hash: bytes, replicas: Iterable[str]) -> str:
    """The first replica by rendezvous hashing: the same for every server, whoever joins or leaves.

    Args:
        page_hash: of the last page of the prefix.
    """
    prefix = int.from_bytes(page_hash[:8], "little") | 1
    names = [*replicas]
    weights = [prefix * factor & _MASK for factor in map(_factor, names)]
    return names[weights.index(max(weights))]


@lru_cache(maxsize=4096)
def _factor(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") | 1
