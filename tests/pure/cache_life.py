"""State machine of the prefix cache with forks, pins, rejected drafts and eviction by predicate."""

from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from ramify.cache import INDICES, POLICIES, Pin
from ramify.errors import LeaseError, PinError
from tests.pure.cache_model import Prefix, Request
from tests.pure.test_cache_machine import (
    MAX_LIVE,
    PROMPTS,
    SOME,
    WHO,
    CacheMachine,
    Prompt,
    operation,
)


class LifeMachine(CacheMachine):
    """Random requests under any index and eviction policy."""

    indices: ClassVar[tuple[str, ...]] = tuple(INDICES)
    policies: ClassVar[tuple[str, ...]] = tuple(POLICIES)
    num_operations: ClassVar[int] = 0

    @initialize(
        size=st.integers(0, 63),
        num_pages=st.integers(8, 48),
        index=st.integers(0, 1),
        policy=st.integers(0, len(POLICIES) - 1),
        ghost_pages=st.sampled_from([None, None, 0, 3]),
        prompts=st.lists(PROMPTS, min_size=2, max_size=5),
    )
    def make(
        self,
        size: int,
        num_pages: int,
        index: int,
        policy: int,
        ghost_pages: int | None,
        prompts: list[Prompt],
    ) -> None:
        """Build the cache with a clock that only `wait` moves."""
        self.now_s = 0.0
        self.kept: list[tuple[Pin, Request]] = []
        CacheMachine.make(
            self,
            size=size,
            num_pages=num_pages,
            index=self.indices[index % len(self.indices)],
            policy=self.policies[policy % len(self.policies)],
            ghost_pages=ghost_pages,
            prompts=prompts,
        )
        self.cache._pin_table._clock = lambda: self.now_s

    def holders(self) -> list[Request]:
        return [*self.live, *(request for _, request in self.kept)]

    # -- branches and drafts ---------------------------------------------------------------

    @precondition(lambda self: 0 < len(self.live) < MAX_LIVE)
    @rule(who=WHO, pages=SOME, extra=SOME)
    @operation
    def fork(self, who: int, pages: int, extra: int) -> None:
        """Fork a live request after all or some of its pinned pages."""
        request = self.pick(who)
        if request.kept is not None:
            return
        num_tokens = min(pages, request.pinned) * self.size + extra % self.size
        num_tokens = min(num_tokens, request.lease.num_tokens)
        path = self.path(request, request.pinned)
        if any(prefix in self.pending for prefix in path):
            self.refused(LeaseError, self.cache.fork, request.lease, num_tokens)
            return
        lease = self.cache.fork(request.lease, num_tokens)
        assert lease.num_tokens == num_tokens // self.size * self.size
        assert lease.pages == request.lease.pages[: num_tokens // self.size]
        twin = Request(request.namespace, request.tokens, lease, lease.num_tokens, (0, -1, 0))
        self.live.append(twin)

    @precondition(lambda self: self.live)
    @rule(who=WHO, keep=SOME)
    @operation
    def retract(self, who: int, keep: int) -> None:
        """Retract announced pages, as after rejected drafts; they are private again."""
        request = self.pick(who)
        if request.kept is not None:
            return
        own = self.unpublished(request, own=True)
        first = request.pinned - len(own)
        cut = first + keep % (len(own) + 1)
        gone = own[cut - first :]
        others = [at for at in self.live if at is not request and gone]
        if any(gone[0] in self.path(at, at.pinned) for at in others):
            self.refused(LeaseError, self.cache.retract, request.lease, cut * self.size)
            return
        before = request.table
        lease, pages = self.cache.retract(request.lease, cut * self.size)
        assert [*lease.pages, *pages, *request.private] == before
        if lease is not request.lease:
            assert lease.num_pending == sum(at in self.pending for at in self.path(request, cut))
            self.dead.append(request.lease)
        request.lease, request.private = lease, [*pages, *request.private]
        for prefix in gone:
            del self.pending[prefix]
        self.remember(gone)

    # -- pins ------------------------------------------------------------------------------

    @rule(prompt=PROMPTS, ttl=st.sampled_from([None, 1.0, 5.0]))
    @operation
    def pin(self, prompt: Prompt, ttl: float | None) -> None:
        """Pin a cached prefix; refused if nothing is cached or the pin budget is exceeded."""
        namespace, tokens = prompt[0], self.prompt(prompt[1], prompt[2])
        cached = self.find(namespace, tokens + b"\0", pending=False)
        wanted = Request(namespace, tokens, self.foreign, 0, (0, -1, 0))
        path = self.path(wanted, len(cached))
        pinned = set[Prefix](path).union(
            *(self.path(request, request.pinned) for _, request in self.kept)
        )
        key = self.key(wanted, len(tokens))
        if not cached or len(pinned) > self.num_pages // 2:
            self.refused(PinError, self.cache.pin, key, "test", ttl)
            return
        pin = self.cache.pin(key, "test", ttl)
        assert pin.num_pages == len(cached)
        wanted.kept = len(cached)
        self.kept.append((pin, wanted))

    @precondition(lambda self: self.kept)
    @rule(who=WHO)
    @operation
    def unpin(self, who: int) -> None:
        """Unpin a prefix; a second `unpin` of it is refused."""
        pin, _ = self.kept.pop(who % len(self.kept))
        self.cache.unpin(pin)
        self.refused(PinError, self.cache.unpin, pin)

    @precondition(lambda self: self.kept)
    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    @operation
    def wait(self, seconds: float) -> None:
        """Move the clock, and drop the pins that expired."""
        self.now_s += seconds
        left = {pin.id: pin for pin in self.cache.pins()}
        assert all(pin.expires_s > self.now_s for pin in left.values())
        assert all(pin.id in left for pin, _ in self.kept if pin.expires_s > self.now_s)
        self.kept = [(left[pin.id], request) for pin, request in self.kept if pin.id in left]

    # -- eviction by what a node is --------------------------------------------------------

    @rule(namespace=st.sampled_from(["", "b"]))
    @operation
    def evict_namespace(self, namespace: str) -> None:
        """Evict all unused pages of a namespace, and no other page."""
        pins = self.pins()
        doomed = [at for at in self.ready if at[0] == namespace and at not in pins]
        name = namespace.encode()
        assert self.cache.evict_if(lambda node: node.namespace == name) == len(doomed)
        self.forget_evicted(len(doomed))
        assert not any(at in self.ready for at in doomed)

    def agree(self) -> None:
        super().agree()
        type(self).num_operations += 1

    def teardown(self) -> None:
        if self.sound:
            for pin, _ in self.kept:
                self.cache.unpin(pin)
            self.kept = []
        super().teardown()


def machine(index: str, policy: str) -> type[LifeMachine]:
    """The machine for one index and one policy."""
    name = f"{index.title()}{policy.title()}Machine"
    return type(name, (LifeMachine,), {"indices": (index,), "policies": (policy,)})
