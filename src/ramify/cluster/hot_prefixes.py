"""`HotPrefixes`: the prefixes that most prompts share, to compute on a replica that has just joined."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ramify.cache.key import HASH_BYTES, split_hashes
from ramify.cluster.mirrors import Mirrors
from ramify.errors import ConfigError

HALVE_EVERY = 10_000  # prompts; what was hot once is forgotten in a few times as many

Prompt = TypeVar("Prompt")


@dataclass(frozen=True, slots=True)
class HotPrefix(Generic[Prompt]):
    """The first pages of a prompt, which about `count` prompts began with.

    `page_hashes` has them in each namespace that replicas had when it was last seen.
    """

    page_hashes: tuple[bytes, ...]  # packed
    prompt: Prompt
    count: float

    @property
    def num_pages(self) -> int:
        """Pages that are shared."""
        return len(self.page_hashes[0]) // HASH_BYTES

    @property
    def last_pages(self) -> tuple[bytes, ...]:
        """The hash of the last page in each namespace: each stands for the whole prefix."""
        return tuple([hashes[-HASH_BYTES:] for hashes in self.page_hashes])

    def num_cached(self, mirrors: Mirrors, replica: str) -> int:
        """Pages of it that a replica has."""
        return max(mirrors.match(hashes).get(replica, 0) for hashes in self.page_hashes)

    def missing_pages(self, num_cached: int, covered: set[bytes]) -> int:
        """Pages behind the first `num_cached` that are in no namespace among `covered`."""
        pages = zip(*map(split_hashes, self.page_hashes), strict=True)
        return sum([covered.isdisjoint(page) for page in [*pages][num_cached:]])


class HotPrefixes(Generic[Prompt]):
    """Counts shared prefixes by the space-saving rule: a new one takes the place of the rarest.

    Args:
        limit: prefixes that are kept, each with one prompt.
    """

    def __init__(self, limit: int = 64) -> None:
        if limit < 1:
            raise ConfigError(f"limit={limit} but at least 1 prefix is kept")
        self._limit = limit
        self._prefixes: dict[int, HotPrefix[Prompt]] = {}  # by number; seen last is last
        self._numbers: dict[bytes, int] = {}  # by hash of the last page, in any namespace
        self._num_noted = self._num_put = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    def note(self, page_hashes: Sequence[bytes], num_shared: int, prompt: Prompt) -> None:
        """Count a prompt whose first `num_shared` pages some replica has cached.

        Args:
            page_hashes: of the prompt, packed, in each namespace that replicas have.
            prompt: what the caller needs to compute the prefix, kept as it is.
        """
        self._num_noted += 1
        if self._num_noted % HALVE_EVERY == 0:
            self._halve()
        num_bytes = num_shared * HASH_BYTES
        if not 0 < num_bytes <= min(map(len, page_hashes), default=0):
            return
        shared = tuple([hashes[:num_bytes] for hashes in page_hashes])
        known = self._take([hashes[-HASH_BYTES:] for hashes in shared])
        count = 1.0 + sum(prefix.count for prefix in known)
        if known:
            prompt = known[0].prompt
        elif len(self._prefixes) >= self._limit:
            rarest = min(self._prefixes.values(), key=lambda prefix: prefix.count)
            # It may have been seen as often as the one that it replaces, and forgotten.
            count += sum(prefix.count for prefix in self._take(rarest.last_pages))
        self._put(HotPrefix(shared, prompt, count))

    def _take(self, last_pages: Iterable[bytes]) -> list[HotPrefix[Prompt]]:
        """Take out the prefixes that have one of these last pages.

        That is one, but a prefix that was seen in two namespaces before any replica had both is two.
        """
        numbers = {self._numbers[page] for page in last_pages if page in self._numbers}
        taken = [self._prefixes.pop(number) for number in sorted(numbers)]
        for prefix in taken:
            for page in prefix.last_pages:
                del self._numbers[page]
        return taken

    def _put(self, prefix: HotPrefix[Prompt]) -> None:
        # Behind all others: of equal counts, the one that was not seen for longest goes first.
        self._num_put += 1
        self._prefixes[self._num_put] = prefix
        for page in prefix.last_pages:
            self._numbers[page] = self._num_put

    def missing(self, mirrors: Mirrors, replica: str, max_pages: int) -> list[HotPrefix[Prompt]]:
        """The prefixes to compute on a replica, hottest first, of at most `max_pages` in all.

        A prefix counts with its pages times its prompts. Prefixes that the replica has, or that
        begin another one of the list, are left out.
        """
        chosen: list[HotPrefix[Prompt]] = []
        covered: set[bytes] = set()
        order = sorted(
            self._prefixes.values(),
            key=lambda prefix: prefix.count * prefix.num_pages,
            reverse=True,
        )
        for prefix in order:
            if prefix.count < 2 or not covered.isdisjoint(prefix.last_pages):
                continue
            num_cached, stride = prefix.num_cached(mirrors, replica), mirrors.index.stride
            num_new = prefix.missing_pages(num_cached, covered)
            if num_cached >= prefix.num_pages // stride * stride > 0 or num_new > max_pages:
                continue
            max_pages -= num_new
            covered.update(*map(split_hashes, prefix.page_hashes))
            chosen.append(prefix)
        return chosen

    def _halve(self) -> None:
        prefixes, self._prefixes, self._numbers = self._prefixes, {}, {}
        for prefix in prefixes.values():
            if prefix.count >= 1:
                self._put(HotPrefix(prefix.page_hashes, prefix.prompt, prefix.count / 2))
