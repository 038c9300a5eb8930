"""`PrefixesInFlight`: which replicas compute a prefix now, or will when its turn comes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Pages at which prefixes are compared: (up to this depth, every so many). A prompt of 2,048 pages has
# 83 of them, and a prefix in flight is known to 6 % or 8 pages of its length.
DEPTH_STEPS = ((8, 1), (128, 8), (1 << 17, 32))
COUNT_BITS = 32  # of the requests of a replica, more than any has


def _compared_pages() -> Iterator[int]:
    begin = 0
    for end, step in DEPTH_STEPS:
        yield from range(begin + step - 1, end, step)
        begin = end


_PAGES = tuple(_compared_pages())  # their numbers, from 0


@dataclass(slots=True, eq=False)
class Edge:
    """Pages that the same requests have: of `_PAGES` those from `begin` to before `end`."""

    page_hashes: Sequence[bytes]  # of a prompt that has them
    begin: int
    end: int
    # The digits of a number in base `2**COUNT_BITS`, one for each replica: its requests.
    counts: int
    parent: Edge | None  # with the pages before
    followers: dict[bytes, Edge]  # with pages behind, by hash of their first one

    def shared_end(self, page_hashes: Sequence[bytes], num_compared: int) -> int:
        """Where a prompt parts from this edge, whose first page it has."""
        own = self.page_hashes
        end = min(self.end, num_compared)
        # Hashes are chained: prompts with an equal one are equal up to it.
        if own[_PAGES[end - 1]] == page_hashes[_PAGES[end - 1]]:
            return end
        low, high = self.begin + 1, end - 1
        while low < high:
            middle = (low + high + 1) // 2
            if own[_PAGES[middle - 1]] == page_hashes[_PAGES[middle - 1]]:
                low = middle
            else:
                high = middle - 1
        return low


class PrefixesInFlight:
    """A radix tree of the prompts in flight, in page hashes; each edge counts its requests by replica.

    A prompt adds an edge or two, however long it is, and however many requests have its pages.
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

    def add(self, replica: str, page_hashes: Sequence[bytes]) -> Edge | None:
        """Note a prompt, whose hashes stay as they are; returns what `remove` needs."""
        request = 1 << COUNT_BITS * self._digits[replica]
        edge: Edge | None = None
        begin, num_compared, edges = 0, _num_compared(len(page_hashes)), self._first
        while begin < num_compared:
            first = page_hashes[_PAGES[begin]]
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
        followers = {hashes[_PAGES[end]]: lower}
        upper = Edge(hashes, lower.begin, end, lower.counts, lower.parent, followers)
        edges[hashes[_PAGES[lower.begin]]] = upper
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
                del edges[edge.page_hashes[_PAGES[edge.begin]]]
                self._num_edges -= 1
            edge = edge.parent

    def match(self, page_hashes: Sequence[bytes]) -> dict[str, int]:
        """How many leading pages of a prompt each replica has in flight, from below: see the depths."""
        shared: list[tuple[int, int]] = []  # counts, and pages, of one edge after the other
        end, num_compared, edges = 0, _num_compared(len(page_hashes)), self._first
        while end < num_compared:
            edge = edges.get(page_hashes[_PAGES[end]])
            if edge is None:
                break
            end = edge.shared_end(page_hashes, num_compared)
            shared.append((edge.counts, _PAGES[end - 1] + 1))
            if end < edge.end:
                break
            edges = edge.followers
        depths: dict[str, int] = {}
        seen = 0  # all bits of the digits of replicas in `depths`
        for counts, num_pages in reversed(shared):
            for place in _digits_in(counts & ~seen):
                depths[self._names[place]] = num_pages
                seen |= _DIGIT << COUNT_BITS * place
        return depths


_DIGIT = (1 << COUNT_BITS) - 1


def _digits_in(counts: int) -> Iterator[int]:
    """The places of the digits that are not 0."""
    while counts:
        place = ((counts & -counts).bit_length() - 1) // COUNT_BITS
        yield place
        counts &= ~(_DIGIT << COUNT_BITS * place)


def _num_compared(num_pages: int) -> int:
    """How many of `_PAGES` a prompt of this length has."""
    return bisect_left(_PAGES, num_pages)
