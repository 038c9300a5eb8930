"""`PrefixesInFlight`: which replicas compute a prefix now, or will when its turn comes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress

from ramify.cache.key import HASH_BYTES

# Pages at which prefixes are compared: (up to this depth, every so many). A prompt of 2,048 pages has
# 83 of them, and a prefix in flight is known to 6 % or 8 pages of its length.
DEPTH_STEPS = ((8, 1), (128, 8), (1 << 17, 32))
COUNT_BYTES, COUNT_BITS = 4, 32  # of the requests of a replica, more than any has


def _compared_pages() -> Iterator[int]:
    """Numbers of these pages, from 1."""
    begin = 0
    for end, step in DEPTH_STEPS:
        yield from range(begin + step, end + 1, step)
        begin = end


_PAGES = tuple(_compared_pages())
_ENDS = tuple([HASH_BYTES * page for page in _PAGES])  # of their hashes, packed


@dataclass(slots=True, eq=False)
class Edge:
    """Pages that the same requests have: of `_PAGES` those from `begin` to before `end`."""

    page_hashes: bytes  # of a prompt that has them
    begin: int
    end: int
    # The digits of a number in base `2**COUNT_BITS`, one for each replica: its requests.
    counts: int
    parent: Edge | None  # with the pages before
    followers: dict[bytes, Edge]  # with pages behind, by hash of their first one

    def shared_end(self, page_hashes: bytes, num_compared: int) -> int:
        """Where a prompt parts from this edge, whose first page it has."""
        own, low, at = self.page_hashes, self.begin + 1, min(self.end, num_compared)
        high = at + 1
        # Hashes are chained: prompts with an equal one are equal up to it.
        while low < high - 1:
            if _hash_at(own, at - 1) == _hash_at(page_hashes, at - 1):
                low = at
            else:
                high = at
            at = (low + high) // 2
        return low


def _hash_at(page_hashes: bytes, at: int) -> bytes:
    """The hash of a page of `_PAGES`."""
    end = _ENDS[at]
    return page_hashes[end - HASH_BYTES : end]


class PrefixesInFlight:
    """A radix tree of the prompts in flight, in page hashes; each edge counts its requests by replica.

    A prompt adds an edge or two, however long it is, and however many requests have its pages. Page
    hashes are packed, 16 bytes each.
    """

    def __init__(self) -> None:
        self._first: dict[bytes, Edge] = {}  # by hash of the first page
        self._num_edges = 0
        self._digits: dict[str, int] = {}  # replica → place of its digit
        self._names: list[str] = []  # by place
        self._free: list[int] = []  # places of replicas that have left

    def __len__(self) -> int:
        return self._num_edges

    def join(self, replica: str) -> None:
        """Count the requests of a replica from now on."""
        if replica in self._digits:
            return
        if self._free:
            place = self._free.pop()
            self._names[place] = replica
        else:
            place = len(self._names)
            self._names.append(replica)
        self._digits[replica] = place

    def leave(self, replica: str) -> None:
        """Forget a replica, after `remove` of all its requests."""
        self._free.append(self._digits.pop(replica))

    def add(self, replica: str, page_hashes: bytes) -> Edge | None:
        """Note a prompt; returns what `remove` needs."""
        request = 1 << COUNT_BITS * self._digits[replica]
        edge: Edge | None = None
        begin, num_compared, edges = 0, _num_compared(len(page_hashes)), self._first
        while begin < num_compared:
            first = _hash_at(page_hashes, begin)
            known = edges.get(first)
            if known is None:
                edge = edges[first] = Edge(page_hashes, begin, num_compared, 0, edge, {})
                self._num_edges += 1
            else:
                end = known.shared_end(page_hashes, num_compared)
                edge = known if end == known.end else self._split(known, end, edges)
            edge.counts += request
            begin, edges = edge.end, edge.followers
        return edge

    def _split(self, lower: Edge, end: int, edges: dict[bytes, Edge]) -> Edge:
        """Cut an edge in two; returns the upper part. Whoever ends at the edge holds the lower one."""
        hashes = lower.page_hashes
        followers = {_hash_at(hashes, end): lower}
        upper = Edge(hashes, lower.begin, end, lower.counts, lower.parent, followers)
        edges[_hash_at(hashes, lower.begin)] = upper
        lower.begin, lower.parent = end, upper
        self._num_edges += 1
        return upper

    def remove(self, replica: str, edge: Edge | None) -> None:
        """Drop what `add` noted for one prompt."""
        request = 1 << COUNT_BITS * self._digits[replica]
        while edge is not None:
            edge.counts -= request
            if not edge.counts:
                edges = self._first if edge.parent is None else edge.parent.followers
                del edges[_hash_at(edge.page_hashes, edge.begin)]
                self._num_edges -= 1
            edge = edge.parent

    def match(self, page_hashes: bytes) -> dict[str, int]:
        """How many leading pages of a prompt each replica has in flight, from below: see the depths."""
        shared: list[tuple[int, int]] = []  # counts, and pages, of one edge after the other
        end, num_compared, edges = 0, _num_compared(len(page_hashes)), self._first
        while end < num_compared:
            edge = edges.get(_hash_at(page_hashes, end))
            if edge is None:
                break
            end = edge.shared_end(page_hashes, num_compared)
            shared.append((edge.counts, _PAGES[end - 1]))
            if end < edge.end:
                break
            edges = edge.followers
        depths: dict[str, int] = {}
        for counts, num_pages in shared:
            digits = counts.to_bytes(COUNT_BYTES * len(self._names), "little")
            names = compress(self._names, memoryview(digits).cast("I"))
            depths.update(dict.fromkeys(names, num_pages))
        return depths


def _num_compared(num_bytes: int) -> int:
    """How many of `_PAGES` a prompt has whose packed hashes have this length."""
    return bisect_right(_ENDS, num_bytes)
