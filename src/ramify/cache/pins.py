"""Pins: prefixes that operators keep from eviction, with owner, time to live and budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from numbers import Real

from ramify.cache.key import CacheKey
from ramify.cache.leases import Lease
from ramify.cache.tree import RadixTree
from ramify.cache.types import validate_int
from ramify.errors import ConfigError, PinError

MAX_REFUSALS = 16  # refused pins to remember, for explanations


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that is not evicted before `expires_s`, unless it is unpinned.

    Every hit on the whole prefix sets `expires_s` to `ttl_s` after the hit.
    """

    id: int
    owner: str
    key: CacheKey  # of exactly the pinned prefix, whole pages
    num_pages: int
    ttl_s: float | None  # None: until it is unpinned
    expires_s: float  # on the cache's clock; infinity without a time to live


def validate_ttl(ttl_s: object) -> float | None:
    """A time to live in seconds as a float; None (no limit) stays None.

    Raises:
        ConfigError: `ttl_s` is not a positive number.
    """
    if ttl_s is None:
        return None
    try:
        seconds = float(ttl_s) if isinstance(ttl_s, Real) else 0.0
    except OverflowError:  # an integer beyond the largest float
        seconds = float("inf")
    if not seconds > 0:
        raise ConfigError(f"ttl={ttl_s!r} s but a pin lives for more than 0; None is for ever")
    return seconds


class PinTable:
    """The live pins of a cache. Each pin is a lease that the cache itself holds.

    Args:
        max_pages: limit of the pages under pins; a page with several pins counts once.
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
        self._pins: dict[int, tuple[Lease, Pin]] = {}
        self._refusals: dict[CacheKey, str] = {}
        self.next_expiry_s = float("inf")  # lower bound of all `expires_s`

    @property
    def num_pages(self) -> int:
        """Pages under pins, each counted once."""
        return sum(self._tree.owned[node] for node in self._nodes())

    def __len__(self) -> int:
        return len(self._pins)

    def check_budget(
        self,
        key: CacheKey,
        end: int,
        owner: str,
        max_pages: int,
        max_owner_pages: int | None,
    ) -> None:
        """Check that `pin` may pin the prefix of `key` up to byte `end`; remembers a refusal.

        Args:
            max_pages: limit of the pages under pins, if it is below that of the table.
            max_owner_pages: limit of the pages under pins of `owner` that no other owner pins.

        Raises:
            PinError: no page of the prefix is cached, or it exceeds the budget.
        """
        tree, others = self._tree, self._nodes(lambda pin: pin.owner != owner)
        own = self._nodes(lambda pin: pin.owner == owner)
        pinned = others | own
        num_cached, path, part, covered = 0, list[int](), 0, 0
        if (root := tree.roots.get(key.namespace)) is not None:
            path, part, covered = tree.find(root, key.atoms, end, pending=False)
            num_cached = tree.num_matched_pages(path, part, covered)
        if not num_cached:
            raise PinError(
                "no whole page of the prefix is cached; run a request that begins with it first"
            )
        # Released pages count: they may be computed again while the pin lives.
        num_pinned = sum(tree.resident[node] for node in pinned.union(path))
        if part and part not in pinned:
            num_pinned += covered
        num_own = sum(tree.resident[node] for node in own.union(path) - others)
        if part and part not in pinned:
            num_own += covered
        limit = min(max_pages, self.max_pages)
        if num_pinned > limit:
            self._refuse(key, f"{num_pinned} of at most {limit} pages would be pinned")
            raise PinError(
                f"with these {num_cached} pages {num_pinned} would be pinned, but at most "
                f"{limit} may be; unpin something, pin a shorter prefix, or raise "
                "max_pinned_share"
            )
        if max_owner_pages is not None and num_own > max_owner_pages:
            self._refuse(key, f"{num_own} of at most {max_owner_pages} pages of {owner!r}")
            raise PinError(
                f"with these {num_cached} pages {num_own} would be pinned for {owner!r}, but at "
                f"most {max_owner_pages} may be; unpin something, or pin a shorter prefix"
            )
        self._refusals.pop(key, None)

    def _refuse(self, key: CacheKey, reason: str) -> None:
        """Remember why a pin was refused, for explanations."""
        self._refusals[key] = reason
        if len(self._refusals) > MAX_REFUSALS:
            del self._refusals[next(iter(self._refusals))]

    def add(self, lease: Lease, owner: str, ttl_s: float | None, max_nested: int | None) -> Pin:
        """Make a pin of a lease, which `check_budget` has allowed.

        With more than `max_nested` pins of the owner inside the prefix, it replaces the longest of
        them, unless that ends later.
        """
        expires_s = float("inf") if ttl_s is None else self._clock() + ttl_s
        pin = Pin(lease.id, owner, lease.key, len(lease.pages), ttl_s, expires_s)
        self._pins[pin.id] = lease, pin
        self.next_expiry_s = min(self.next_expiry_s, expires_s)
        if max_nested is not None:
            self._limit_nested(pin, lease.node, max_nested)
        return pin

    def _limit_nested(self, pin: Pin, node: int, max_nested: int) -> None:
        path = set(self._tree.path(node))
        nested = [
            other
            for lease, other in self._pins.values()
            if other.owner == pin.owner and other is not pin and lease.node in path
        ]
        if len(nested) > max_nested:
            longest = max(nested, key=lambda other: (other.num_pages, other.id))
            if longest.expires_s <= pin.expires_s:
                self.remove(longest)

    def last_refusal(self, key: CacheKey) -> str:
        """Why a pin of a prefix of `key` was last refused; empty if none was."""
        last_reason = ""
        for refused, reason in self._refusals.items():
            if refused.namespace == key.namespace and key.atoms.startswith(refused.atoms):
                last_reason = reason
        return last_reason

    def remove(self, pin: Pin | int) -> None:
        """End a pin.

        Raises:
            PinError: this cache has no such pin; it expired or was unpinned before.
        """
        number = pin.id if isinstance(pin, Pin) else validate_int("pin", pin, None)
        entry = self._pins.get(number)
        if entry is None or (isinstance(pin, Pin) and pin.key != entry[1].key):
            raise PinError(f"no such pin (id {number}) here; it expired or was unpinned before")
        del self._pins[number]
        self._release(entry[0])

    def expire(self) -> None:
        """End the pins that have expired."""
        now_s = self._clock()
        if now_s < self.next_expiry_s:
            return
        expired = [number for number, (_, pin) in self._pins.items() if pin.expires_s <= now_s]
        for number in expired:
            self.remove(number)
        expiries_s = (pin.expires_s for _, pin in self._pins.values())
        self.next_expiry_s = min(expiries_s, default=float("inf"))

    def refresh(self, path: Iterable[int]) -> None:
        """Restart the time to live of the pins that end at a node of `path`, which a lookup hit."""
        nodes, now_s = set(path), self._clock()
        for number, (lease, pin) in self._pins.items():
            if pin.ttl_s is not None and lease.node in nodes and pin.expires_s > now_s:
                self._pins[number] = lease, replace(pin, expires_s=now_s + pin.ttl_s)

    def list(self, owner: str | None = None) -> list[Pin]:
        """The live pins, oldest first; with `owner`, only that owner's."""
        return [pin for _, pin in self._pins.values() if owner in (None, pin.owner)]

    def holdings(self) -> tuple[tuple[int, str, int], ...]:
        """(id, owner, pages) of each live pin, for errors."""
        return tuple((pin.id, pin.owner, pin.num_pages) for _, pin in self._pins.values())

    def _nodes(self, is_selected: Callable[[Pin], bool] = lambda pin: True) -> set[int]:
        """All nodes under the selected pins."""
        tree, nodes = self._tree, set[int]()
        for lease, pin in self._pins.values():
            if not is_selected(pin):
                continue
            node = lease.node
            while node not in nodes and tree.parent[node]:
                nodes.add(node)
                node = tree.parent[node]
        return nodes
