"""`PageLedger`, the owner of every page, and `Pages`, packed page ids."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import index
from typing import Any, Final, SupportsIndex, overload

from ramify.cache.packed import shared_pages
from ramify.errors import ConfigError, InvariantError, OutOfPagesError, PageOwnershipError

ID_BYTES: Final = 4  # of a page id, packed as native int32


class Pages(Sequence[int]):
    """An immutable sequence of page ids over packed int32.

    Equal to a list, tuple or array with the same ids. `numpy.asarray(pages)` and
    `memoryview(pages.packed)` do not copy.
    """

    __slots__ = ("packed",)

    def __init__(self, packed: bytes = b"") -> None:
        self.packed = packed

    @classmethod
    def of(cls, pages: Sequence[int]) -> Pages:
        """`pages` as `Pages`; copies unless they are packed already."""
        return pages if isinstance(pages, Pages) else cls(pack_pages(pages))

    def __len__(self) -> int:
        return len(self.packed) // ID_BYTES

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Pages: ...
    def __getitem__(self, at: SupportsIndex | slice) -> int | Pages:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self.packed) // ID_BYTES)
            if step == 1:
                return Pages(self.packed[start * ID_BYTES : max(start, stop) * ID_BYTES])
            return Pages(memoryview(self.packed).cast("i")[at].tobytes())
        return memoryview(self.packed).cast("i")[index(at)]

    def __iter__(self) -> Iterator[int]:
        return iter(array("i", self.packed))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Pages):
            return self.packed == other.packed
        if isinstance(other, list | tuple | array):
            return list(self) == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Sequence[int]) -> Pages:
        return Pages(self.packed + pack_pages(other))

    def __radd__(self, other: list[int] | tuple[int, ...]) -> list[int] | tuple[int, ...]:
        return [*other, *self] if isinstance(other, list) else (*other, *self)

    def __repr__(self) -> str:
        return f"Pages({list(self)})"

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (len(self),),
            "typestr": "<i4" if sys.byteorder == "little" else ">i4",
            "data": self.packed,
            "version": 3,
        }


def pack_pages(pages: Sequence[int]) -> bytes:
    """Page ids as native int32 bytes: free for `Pages`, a copy for `array("i")`, else 10 ns a page.

    Raises:
        PageOwnershipError: an entry is not an int32.
    """
    if type(pages) is Pages:  # an abstract class: `isinstance` takes as long as all the rest
        return pages.packed
    if isinstance(pages, array) and pages.typecode == "i":
        return pages.tobytes()
    try:
        if isinstance(pages, bytes | bytearray):  # `array` would take them as packed ids
            raise TypeError("bytes")
        return array("i", pages).tobytes()
    except (OverflowError, TypeError) as error:
        raise PageOwnershipError(f"page ids must be int32 numbers: {error}") from None


class PageLedger:
    """Moves pages between the free list, requests and the tree; every page is in exactly one.

    A page goes free → private (`take`) → tree (`adopt`) → free (`reclaim`), or private → free
    (`give_back`). Each call checks all its pages before it moves the first. The free list is a stack:
    the pages freed last are reused first, since they are the likeliest to be in a hardware cache.
    `take` returns them in the order in which they were freed, so that neighbours stay neighbours.

    Private pages are stored as the runs in which they were taken, by first page. To free or publish
    a run, or the beginning of one, costs one lookup and one memcmp for any length. Pages in any
    other order need a search each.

    Args:
        num_pages: pages 0 .. num_pages - 1 are managed; at least 1.
    """

    def __init__(self, num_pages: SupportsIndex) -> None:
        self.num_pages = index(num_pages)
        if not 1 <= self.num_pages < 2**31:
            raise ConfigError(f"num_pages={num_pages} but a ledger has 1 to {2**31 - 1} pages")
        self._free = array("i", range(self.num_pages))
        self._runs: dict[bytes, bytes] = {}  # first page → the whole run, packed
        self._num_private = 0
        self._free_set: frozenset[int] | None = None  # made by `is_free`, dropped by changes

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def num_private(self) -> int:
        """Pages that requests own."""
        return self._num_private

    @property
    def num_tree(self) -> int:
        """Pages in tree nodes, ready or pending."""
        return self.num_pages - len(self._free) - self._num_private

    def is_free(self, page: int) -> bool:
        """Whether nobody owns this page. O(num_pages) for the first call after a change."""
        if self._free_set is None:
            self._free_set = frozenset(self._free)
        return page in self._free_set

    def is_private(self, page: int) -> bool:
        """Whether a request owns this page. O(private pages): for checks."""
        return any(page in array("i", run) for run in self._runs.values())

    def take(self, count: int) -> bytes:
        """Hand out `count` free pages, packed.

        Raises:
            OutOfPagesError: fewer are free; nothing was taken.
        """
        if count <= 0:
            if count < 0:
                raise ConfigError(f"{count} pages asked for; ask for 0 or more")
            return b""
        free = self._free
        num_left = len(free) - count
        if num_left < 0:
            raise OutOfPagesError(count, len(free), 0, self.num_pages)
        self._free_set = None
        run = free[num_left:].tobytes()
        del free[num_left:]
        self._runs[run[:ID_BYTES]] = run
        self._num_private += count
        return run

    def give_back(self, packed: bytes) -> None:
        """Move private pages to the free list; the last of them is reused first."""
        self.adopt(packed)
        self.reclaim(packed)

    def give_back_all(self) -> None:
        """Free every private page."""
        for run in [*self._runs.values()]:
            self.give_back(run)

    def adopt(self, packed: bytes) -> None:
        """Move private pages to the tree.

        Raises:
            PageOwnershipError: a page is not private, or is named twice; nothing moved.
        """
        if not packed:
            return
        runs, first = self._runs, packed[:ID_BYTES]
        run = runs.get(first, b"")
        if run.startswith(packed):  # the beginning of a run, or all of it
            del runs[first]
            if len(run) > len(packed):
                tail = run[len(packed) :]
                runs[tail[:ID_BYTES]] = tail
        else:
            for head in self._runs_of(packed):
                del runs[head]
        self._num_private -= len(packed) // ID_BYTES

    def disown(self, packed: bytes) -> None:
        """Make pages of the tree private again. Trusts the tree: only `check` recounts."""
        if packed:
            self._runs[packed[:ID_BYTES]] = packed
            self._num_private += len(packed) // ID_BYTES

    def reclaim(self, packed: bytes) -> None:
        """Move pages of the tree to the free list. Trusts the tree: only `check` recounts."""
        self._free_set = None
        self._free.frombytes(packed)

    def require_private(self, packed: bytes) -> None:
        """Raise PageOwnershipError unless all pages are private and none is named twice."""
        if not self._runs.get(packed[:ID_BYTES], b"").startswith(packed):
            self._runs_of(packed)

    def _runs_of(self, packed: bytes) -> list[bytes]:
        """The heads (first pages) of the runs that together are `packed`, in order.

        Cuts runs where `packed` leaves them; no page changes its owner.

        Raises:
            PageOwnershipError: a page is not private, or is named twice.
        """
        runs, heads, at = self._runs, list[bytes](), 0
        while at < len(packed):
            head = packed[at : at + ID_BYTES]
            if head not in runs:
                self._isolate(head)
            run = runs[head]
            if not packed.startswith(run, at):
                run = self._cut(head, shared_pages(packed, at, run, ID_BYTES) * ID_BYTES)
            heads.append(head)
            at += len(run)
        if len(set(heads)) < len(heads) or sum(len(runs[head]) for head in heads) < len(packed):
            raise PageOwnershipError(f"a page is named twice in {array('i', packed).tolist()}")
        return heads

    def _isolate(self, page: bytes) -> None:
        """Cut a run so that `page` is the head of a run.

        Raises:
            PageOwnershipError: the page is not private.
        """
        (number,) = array("i", page)
        if not 0 <= number < self.num_pages:
            raise PageOwnershipError(f"page {number} is outside 0..{self.num_pages - 1}")
        for head, run in self._runs.items():
            pages = array("i", run)
            if number in pages:
                self._cut(head, pages.index(number) * ID_BYTES)
                return
        owner = "free" if self.is_free(number) else "in the tree"
        raise PageOwnershipError(
            f"page {number} is {owner}, not private to a request; it was given back or published "
            "before"
        )

    def _cut(self, head: bytes, size: int) -> bytes:
        """Cut a run after `size` bytes; returns the first part."""
        run = self._runs[head]
        self._runs[head], tail = run[:size], run[size:]
        self._runs[tail[:ID_BYTES]] = tail
        return run[:size]

    def check(self, tree_pages: Sequence[int]) -> None:
        """Recount every page; `tree_pages` are the pages of all tree nodes.

        Raises:
            InvariantError: a page has no owner or more than one, or a count is wrong.
        """
        private = [page for run in self._runs.values() for page in array("i", run)]
        if len(private) != self._num_private:
            raise InvariantError(f"{self._num_private} private pages counted, {len(private)} kept")
        if any(run[:ID_BYTES] != head for head, run in self._runs.items()):
            raise InvariantError("a run of private pages is not found under its first page")
        owned = sorted([*self._free, *private, *tree_pages])
        if owned != list(range(self.num_pages)):
            doubled = [page for page, times in Counter(owned).items() if times > 1]
            lost = sorted(set(range(self.num_pages)) - set(owned))
            raise InvariantError(
                f"pages with two owners: {doubled[:8]}; with none: {lost[:8]}; "
                f"{len(owned)} owned of {self.num_pages}"
            )
