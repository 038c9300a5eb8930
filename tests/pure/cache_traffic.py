"""Random traffic on a prefix cache, and a clock that moves only when `now_s` is set."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from ramify.cache import CacheKey, Lease, Pin, PrefixCache
from ramify.errors import LeaseError, OutOfPagesError, PinError

NAMESPACES = ("", "", "b")


class Clock:
    """Seconds since some time before the cache was made."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@dataclass(eq=False)
class User:
    """A live request: its key, lease and private pages."""

    key: CacheKey
    lease: Lease
    private: list[int] = field(default_factory=list)

    def move(self, lease: Lease) -> None:
        """Replace the lease by a newer lease, and drop its new pages from `private`."""
        del self.private[: len(lease.pages) - len(self.lease.pages)]
        self.lease = lease


class Traffic:
    """Random requests that share, publish in pieces, fail and finish, with evictions and pins.

    Args:
        random: makes all choices.
        clock: the cache's clock, advanced between steps.
        alone: compute and release each request before the next begins.
    """

    def __init__(
        self,
        cache: PrefixCache,
        random: Random,
        clock: Clock | None = None,
        *,
        alone: bool = False,
        max_live: int = 4,
    ) -> None:
        self.cache, self.random, self.clock = cache, random, clock
        self.max_live = max_live
        self.live: list[User] = []
        self.pins: list[Pin] = []
        self.lookups: list[CacheKey] = []  # every key that was looked up, one entry per lookup
        together = [self.begin, self.publish, self.announce, self.follow, self.fail, self.finish]
        self.steps = [self.serve, self.serve, self.serve, self.evict, self.evict_some]
        self.steps += [self.evict_all, self.pin, self.unpin]
        self.steps += [] if alone else [*together, *together]

    def key(self) -> CacheKey:
        """A prompt that shares whole pages, parts of pages or nothing with others."""
        random, size = self.random, self.cache.page_size
        pages = [[0] * size, [0] * (size - 1) + [1], [2] + [0] * (size - 1)]
        stem = random.choice(("", "0", "00", "000", "0000", "01", "001", "0011", "1", "02", "0210"))
        tokens = [token for page in stem for token in pages[int(page)]]
        tokens += [3] * random.randint(0, size) if stem else [3] * random.randint(1, size)
        return CacheKey(tokens, random.choice(NAMESPACES))

    def run(self, num_steps: int) -> Iterator[str]:
        """Run `num_steps` random steps; yields the name of each step."""
        for _ in range(num_steps):
            if self.clock is not None:
                self.clock.now_s += self.random.choice((0.0, 0.01, 1.0, 30.0))
            step = self.random.choice(self.steps)
            step()
            yield step.__name__

    # -- steps -----------------------------------------------------------------------------

    def serve(self) -> None:
        """Run one request from acquire to release."""
        if user := self._arrive(pending=False):
            user.move(self.cache.publish(user.lease, user.key, user.private))
            self._leave(user)

    def begin(self) -> None:
        if len(self.live) < self.max_live:
            self._arrive(pending=False)

    def follow(self) -> None:
        """Begin a request that may share pages other requests have announced."""
        if len(self.live) < self.max_live:
            self._arrive(pending=True)

    def publish(self) -> None:
        """Publish a part of a request, unless it waits for another request's pages."""
        if user := self._pick():
            least = user.lease.num_tokens
            key = user.key.prefix(self.random.randint(least, max(least, len(user.key))))
            with suppress(LeaseError):
                user.move(self.cache.publish(user.lease, key, user.private))

    def announce(self) -> None:
        if (user := self._pick()) and not self.cache.is_withdrawn(user.lease):
            user.move(self.cache.announce(user.lease, user.key, user.private))

    def fail(self) -> None:
        """Fail a request's step, and with it the requests that share its announced pages."""
        if (user := self._pick()) and not self.cache.is_withdrawn(user.lease):
            lost = [user.lease, *self.cache.withdraw(user.lease)]
            for lost_user in [lost_user for lost_user in self.live if lost_user.lease in lost]:
                self._leave(lost_user)

    def finish(self) -> None:
        if (user := self._pick()) and not self.cache.is_blocked(user.lease):
            with suppress(LeaseError):
                user.move(self.cache.publish(user.lease, user.key, user.private))
                self._leave(user)

    def evict(self) -> None:
        self.cache.evict(self.random.randint(1, 5))

    def evict_some(self) -> None:
        hits = self.random.randint(0, 2)
        self.cache.evict_if(lambda node: node.hits <= hits, self.random.randint(1, 4))

    def evict_all(self) -> None:
        if self.random.randint(0, 3) == 0:
            self.cache.clear()

    def pin(self) -> None:
        ttl = self.random.choice((None, 5.0, 50.0)) if self.clock else None
        with suppress(PinError):
            self.pins.append(self.cache.pin(self.key(), "me", ttl))

    def unpin(self) -> None:
        """Unpin the oldest pin, which may have expired."""
        for pin in self.pins[:1]:
            self.pins.remove(pin)
            with suppress(PinError):
                self.cache.unpin(pin)

    def end(self) -> None:
        """Release every live request and every pin."""
        while self.live:
            before = len(self.live)
            for user in list(self.live):
                if user in self.live and not self.cache.is_withdrawn(user.lease):
                    lost = [user.lease, *self.cache.withdraw(user.lease)]
                    for lost_user in [
                        lost_user for lost_user in self.live if lost_user.lease in lost
                    ]:
                        self._leave(lost_user)
            assert len(self.live) < before
        for pin in self.cache.pins():
            self.cache.unpin(pin)

    # -- inside ----------------------------------------------------------------------------

    def _arrive(self, *, pending: bool) -> User | None:
        key = self.key()
        lease = self.cache.attach(key) if pending else self.cache.acquire(key)
        missing = -(-len(key) // self.cache.page_size) - len(lease.pages)
        try:
            user = User(key, lease, list(self.cache.reserve(missing)))
        except OutOfPagesError:
            self.cache.cancel(lease)
            return None
        self.lookups.append(key)
        self.live.append(user)
        return user

    def _pick(self) -> User | None:
        return self.random.choice(self.live) if self.live else None

    def _leave(self, user: User) -> None:
        self.cache.release(user.lease, user.private)
        self.live.remove(user)
