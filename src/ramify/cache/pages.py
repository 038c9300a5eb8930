"""Who owns every page. The only place where ownership moves."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.errors import ConfigError, InvariantError, OutOfPagesError, PageOwnershipError

FREE, PRIVATE, TREE = 0, 1, 2
_OWNERS = ("free", "private to a request", "in the tree")


class PageLedger:
    """Moves pages between the free list, requests and the tree; every page is in exactly one.

    A page goes free → private (`take`) → tree (`adopt`) → free (`reclaim`), or private → free
    (`give_back`). Each call checks all its pages before it moves the first. The page given back
    last is handed out first, since its bytes are the likeliest to be in a hardware cache.

    Args:
        num_pages: pages 0 .. num_pages - 1 are managed; at least 1.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages={num_pages} but a ledger needs at least 1 page")
        self.num_pages = num_pages
        self._owner = bytearray(num_pages)
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_private = 0

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
        """Whether nobody owns this page."""
        return self._owner[page] == FREE

    def is_private(self, page: int) -> bool:
        """Whether a request owns this page."""
        return self._owner[page] == PRIVATE

    def take(self, count: int) -> list[int]:
        """Hand out `count` free pages.

        Raises:
            OutOfPagesError: fewer are free; nothing was taken.
        """
        free = self._free
        if count < 0:
            raise ConfigError(f"{count} pages asked for; ask for 0 or more")
        if count > len(free):
            raise OutOfPagesError(count, len(free), 0, self.num_pages)
        taken = free[len(free) - count :]
        taken.reverse()
        del free[len(free) - count :]
        for page in taken:
            self._owner[page] = PRIVATE
        self._num_private += count
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Private pages become free, last first, so that a sequence's tail is reused first."""
        self.require_private(pages)
        self._free_all(pages)
        self._num_private -= len(pages)

    def adopt(self, pages: Sequence[int]) -> None:
        """Private pages become the tree's."""
        self.require_private(pages)
        for page in pages:
            self._owner[page] = TREE
        self._num_private -= len(pages)

    def reclaim(self, pages: Sequence[int]) -> None:
        """Pages of the tree become free."""
        self._require(pages, TREE)
        self._free_all(pages)

    def require_private(self, pages: Sequence[int]) -> None:
        """Raise PageOwnershipError unless all pages are private and none is named twice."""
        self._require(pages, PRIVATE)

    def _free_all(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._owner[page] = FREE
        self._free.extend(pages)

    def _require(self, pages: Sequence[int], owner: int) -> None:
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise PageOwnershipError(f"page {page} is outside 0..{self.num_pages - 1}")
            if self._owner[page] != owner:
                raise PageOwnershipError(
                    f"page {page} is {_OWNERS[self._owner[page]]}, not {_OWNERS[owner]}; "
                    "it was given back or published before"
                )
        if len(set(pages)) != len(pages):
            raise PageOwnershipError(f"a page is named twice in {list(pages)}")

    def check(self, tree_pages: Sequence[int]) -> None:
        """Recount every page, given all pages that tree nodes hold.

        Raises:
            InvariantError: a page has no owner or more than one, or a count is wrong.
        """
        if len(set(self._free)) != len(self._free):
            raise InvariantError("a page is on the free list twice")
        if len(set(tree_pages)) != len(tree_pages):
            raise InvariantError("a page is in two tree nodes")
        for owner, pages in ((FREE, self._free), (TREE, tree_pages)):
            recorded = self._owner.count(owner)
            if recorded != len(pages) or any(self._owner[page] != owner for page in pages):
                raise InvariantError(
                    f"{recorded} pages are recorded as {_OWNERS[owner]} but {len(pages)} are"
                )
        if self._owner.count(PRIVATE) != self._num_private:
            raise InvariantError(
                f"{self._num_private} private pages counted, {self._owner.count(PRIVATE)} recorded"
            )
