"""Pins: prefixes that stay cached on purpose, with an owner, a time to live and a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real

from ramify.cache.key import CacheKey
from ramify.cache.leases import Lease
from ramify.cache.tree import RadixTree
from ramify.cache.types import validate_int
from ramify.errors import ConfigError, PinError

MAX_REFUSALS = 16  # pins over the budget that explanations remember


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that is not evicted before `expires_s`, unless it is unpinned.

    Every hit on the whole prefix puts `expires_s` off to `ttl_s` after that hit.
    """

    id: int
    owner: str
    key: CacheKey  # exactly the pinned prefix, whole pages
    num_pages: int
    ttl_s: float | None  # None: until it is unpinned
    expires_s: float  # on the cache's clock; infinity without a time to live


@dataclass(slots=True)
class _PinnedLease:
    lease: Lease
    owner: str
    ttl_s: float | None
    expires_s: float


def validate_ttl(ttl_s: object) -> float | None:
    """A time to live in seconds, checked.

    Raises:
        ConfigError: it is not positive, or no number.
    """
    if ttl_s is None:
        return None
    try:
        seconds = float(ttl_s) if isinstance(ttl_s, Real) else 0.0
    except OverflowError:  # an integer that is no float
        seconds = float("inf")
    if not seconds > 0:
        raise ConfigError(f"ttl={ttl_s!r} s but a pin lives for more than 0; None is for ever")
    return seconds


class PinTable:
    """Who has pinned what. Each pin is a lease that the cache itself holds.

    Args:
        tree: whose nodes are pinned.
        max_pages: pages under pins at most, each counted once however many pins it has.
        clock: seconds.
        release: ends a lease.
    """

    def __init__(
        self,
        tree: RadixTree,
        max_pages: int,
        clock: Callable[[], float],
        release: Callable[[Lease], None],
    ) -> None:
        self._tree = tree
        self.max_pages = max_pages
        self._clock = clock
        self._release = release
        self._pins: dict[int, _PinnedLease] = {}
        self._refusals: dict[CacheKey, str] = {}
        self.next_expiry_s = float("inf")  # no pin ends before; it may be too early

    @property
    def num_pages(self) -> int:
        """Pages under pins, each counted once."""
        return sum(self._tree.resident[node] for node in self._nodes())

    def __len__(self) -> int:
        return len(self._pins)

    def check_budget(self, key: CacheKey, end: int) -> None:
        """Whether the prefix of `key` up to byte `end` may be pinned; nothing changes.

        Raises:
            PinError: nothing is cached of the prefix, or it goes over the budget.
        """
        tree, seen = self._tree, self._nodes()
        found, path, part, covered = 0, list[int](), 0, 0
        if (root := tree.roots.get(key.namespace)) is not None:
            path, part, covered = tree.find(root, key.atoms, end, pending=False)
            found = tree.num_matched_pages(path, part, covered)
        if not found:
            raise PinError("no whole page of the prefix is cached; compute and publish it first")
        would = sum(tree.resident[node] for node in seen.union(path))
        if part and part not in seen:
            would += covered
        if would > self.max_pages:
            self._refusals[key] = f"{would} of at most {self.max_pages} pages would be pinned"
            if len(self._refusals) > MAX_REFUSALS:
                del self._refusals[next(iter(self._refusals))]
            raise PinError(
                f"with these {found} pages {would} would be pinned, but at most "
                f"{self.max_pages} may be; unpin something, pin a shorter prefix, or raise "
                "max_pinned_share"
            )
        self._refusals.pop(key, None)

    def add(self, lease: Lease, owner: str, ttl_s: float | None) -> Pin:
        """Keep a lease, which is what could be had of a key that is allowed."""
        expires_s = float("inf") if ttl_s is None else self._clock() + ttl_s
        self._pins[lease.id] = _PinnedLease(lease, owner, ttl_s, expires_s)
        self.next_expiry_s = min(self.next_expiry_s, expires_s)
        return self._pin(lease.id)

    def last_refusal(self, key: CacheKey) -> str:
        """Why the budget refused a pin of a beginning of `key` lately; empty if it did not."""
        found = ""
        for refused, told in self._refusals.items():
            if refused.namespace == key.namespace and key.atoms.startswith(refused.atoms):
                found = told
        return found

    def remove(self, pin: Pin | int) -> None:
        """End a pin.

        Raises:
            PinError: there is no such pin here; it has expired or was ended before.
        """
        number = pin.id if isinstance(pin, Pin) else validate_int("pin", pin, None)
        kept = self._pins.get(number)
        if kept is None or (isinstance(pin, Pin) and pin.key != kept.lease.key):
            raise PinError(f"no such pin (id {number}) here; it expired or was unpinned before")
        del self._pins[number]
        self._release(kept.lease)

    def expire(self) -> int:
        """End the pins whose time is over; returns how many."""
        now_s = self._clock()
        if now_s < self.next_expiry_s:
            return 0
        over = [number for number, kept in self._pins.items() if kept.expires_s <= now_s]
        for number in over:
            self.remove(number)
        left = (kept.expires_s for kept in self._pins.values())
        self.next_expiry_s = min(left, default=float("inf"))
        return len(over)

    def refresh(self, path: Iterable[int]) -> None:
        """A lookup went through these nodes: pins whose prefix it found live on."""
        found, now_s = set(path), self._clock()
        for kept in self._pins.values():
            if kept.ttl_s is not None and kept.lease.node in found and kept.expires_s > now_s:
                kept.expires_s = now_s + kept.ttl_s

    def list(self, owner: str | None = None) -> list[Pin]:
        """All pins, or those of an owner, oldest first."""
        kept = self._pins.items()
        return [self._pin(number) for number, one in kept if owner in (None, one.owner)]

    def _pin(self, number: int) -> Pin:
        kept = self._pins[number]
        lease = kept.lease
        return Pin(number, kept.owner, lease.key, len(lease.pages), kept.ttl_s, kept.expires_s)

    def _nodes(self) -> set[int]:
        tree, seen = self._tree, set[int]()
        for kept in self._pins.values():
            node = kept.lease.node
            while node not in seen and tree.parent[node]:
                seen.add(node)
                node = tree.parent[node]
        return seen
