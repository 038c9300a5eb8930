"""`HotPrefixes`: the prefixes that most prompts share, to compute on a replica that has just joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ramify.cluster.mirrors import Mirrors
from ramify.errors import ConfigError

HALVE_EVERY = 10_000  # prompts; what was hot once is forgotten in a few times as many

Prompt = TypeVar("Prompt")


@dataclass(frozen=True, slots=True)
class HotPrefix(Generic[Prompt]):
    """The first `num_pages` pages of a prompt, which about `count` prompts began with."""

    page_hashes: tuple[bytes, ...]
    prompt: Prompt
    count: float

    @property
    def num_pages(self) -> int:
        """Pages that are shared."""
        return len(self.page_hashes)


class HotPrefixes(Generic[Prompt]):
    """Counts shared prefixes by the space-saving rule: a new one takes the place of the rarest.

    Args:
        limit: prefixes that are kept, each with one prompt.
    """

    def __init__(self, limit: int = 64) -> None:
        if limit < 1:
            raise ConfigError(f"limit={limit} but at least 1 prefix is kept")
        self._limit = limit
        self._prefixes: dict[bytes, HotPrefix[Prompt]] = {}  # by the hash of the last page
        self._num_noted = 0

    def __len__(self) -> int:
        return len(self._prefixes)

    def note(self, page_hashes: Sequence[bytes], num_shared: int, prompt: Prompt) -> None:
        """Count a prompt whose first `num_shared` pages some replica has cached.

        Args:
            prompt: what the caller needs to compute the prefix, kept as it is.
        """
        self._num_noted += 1
        if self._num_noted % HALVE_EVERY == 0:
            self._halve()
        if not 0 < num_shared <= len(page_hashes):
            return
        last = page_hashes[num_shared - 1]
        known = self._prefixes.pop(last, None)
        if known is not None:
            # Behind all others: of equal counts, the one that was not seen for longest goes first.
            self._prefixes[last] = HotPrefix(known.page_hashes, known.prompt, known.count + 1)
            return
        count = 1.0
        if len(self._prefixes) >= self._limit:
            rarest = min(self._prefixes, key=lambda page: self._prefixes[page].count)
            # It may have been seen as often as the one that it replaces, and forgotten.
            count += self._prefixes.pop(rarest).count
        self._prefixes[last] = HotPrefix(tuple(page_hashes[:num_shared]), prompt, count)

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
            if prefix.count < 2 or prefix.page_hashes[-1] in covered:
                continue
            num_cached = mirrors.match(prefix.page_hashes).get(replica, 0)
            stride = mirrors.index.stride
            num_new = sum(1 for page in prefix.page_hashes[num_cached:] if page not in covered)
            if num_cached >= prefix.num_pages // stride * stride > 0 or num_new > max_pages:
                continue
            max_pages -= num_new
            covered.update(prefix.page_hashes)
            chosen.append(prefix)
        return chosen

    def _halve(self) -> None:
        self._prefixes = {
            last: HotPrefix(prefix.page_hashes, prefix.prompt, prefix.count / 2)
            for last, prefix in self._prefixes.items()
            if prefix.count >= 1
        }
