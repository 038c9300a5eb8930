"""State machine test of the cache core: simulated requests, compared with a model of dicts."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ramify.cache import CacheKey, Lease, PrefixCache
from ramify.cache.policies import POLICIES
from ramify.cache.prefix_cache import GHOST_POOLS
from ramify.errors import LeaseError, OutOfPagesError, PageOwnershipError
from tests.budget import examples
from tests.pure.cache_model import CacheModel, Request

Prompt = tuple[str, str, int]  # namespace, the contents of whole pages, tokens beyond them

WHO = st.integers(0, 29)  # which live request, modulo their number
SOME = st.integers(0, 9)
STEMS = ("", "0", "00", "000", "0000", "000000", "1", "01", "001", "0011", "00012", "02", "0210")
PROMPTS = st.sampled_from(
    [(name, stem, tail) for name in ("", "", "b") for stem in STEMS for tail in (1, 0, 5)]
)
MAX_LIVE = 6


def operation(body: Callable[..., None]) -> Callable[..., None]:
    """Mark the machine as unsound while a rule runs, so that a failed rule skips teardown."""

    @functools.wraps(body)
    def run(self: "CacheMachine", *args: Any, **kwargs: Any) -> None:
        self.sound = False
        body(self, *args, **kwargs)

    return run


class CacheMachine(CacheModel, RuleBasedStateMachine):
    """Random requests against `cache_type`; the model must agree after every rule."""

    cache_type: ClassVar[type[PrefixCache]] = PrefixCache
    page_sizes: ClassVar[Sequence[int]] = range(1, 65)
    sound = False

    @initialize(
        size=st.integers(0, 63),
        num_pages=st.integers(8, 48),
        index=st.sampled_from(["radix", "hash"]),
        policy=st.sampled_from(sorted(POLICIES)),
        ghost_pages=st.sampled_from([None, 20, 3, 0]),
        prompts=st.lists(PROMPTS, min_size=2, max_size=5),
    )
    def make(
        self,
        size: int,
        num_pages: int,
        index: str,
        policy: str,
        ghost_pages: int | None,
        prompts: list[Prompt],
    ) -> None:
        """Create a cache and compute the first prompts in sequence; two requests stay live."""
        self.size = self.page_sizes[size % len(self.page_sizes)]
        self.num_pages = num_pages
        self.budget = GHOST_POOLS * num_pages if ghost_pages is None else ghost_pages
        self.cache = self.cache_type(
            num_pages, self.size, index=index, policy=policy, ghost_pages=ghost_pages
        )
        self.foreign = PrefixCache(1, self.size).acquire(CacheKey([1]))
        for prompt in prompts:
            request = self.plan(prompt, "", attach=False)
            self.write(request, len(request.tokens))
            self.share(request, request.computed)
        for request in self.live[2:]:
            self.stop(request)

    # -- what requests do ------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < MAX_LIVE)
    @rule(
        prompt=PROMPTS,
        endings=st.lists(st.sampled_from(["", "", "0", "1", "02"]), min_size=1, max_size=3),
        attach=st.booleans(),
        until=st.sampled_from(["announced", "failed", "computed", "published", "over"]),
        backwards=st.booleans(),
    )
    @operation
    def batch(
        self, prompt: Prompt, endings: list[str], attach: bool, until: str, backwards: bool
    ) -> None:
        """Run prompts with a common prefix in a step, up to the state `until`."""
        requests = [self.plan(prompt, ending, attach=attach) for ending in endings]
        if until == "failed":
            self.fail(requests[0])
        elif until != "announced":
            for request in requests:
                self.write(request, len(request.tokens))
        if until in ("published", "over"):
            for request in requests[::-1] if backwards else requests:
                if request.computed >= request.lease.num_tokens:
                    self.share(request, request.computed)
                if until == "over":
                    self.stop(request)

    def plan(self, prompt: Prompt, ending: str, *, attach: bool) -> Request:
        namespace, stem, tail = prompt
        request = self.look_up(namespace, self.prompt(stem + ending, tail), attach=attach)
        self.take(request, -(-len(request.tokens) // self.size) - len(request.table))
        if attach:
            self.promise(request, self.num_pages)
        return request

    @precondition(lambda self: len(self.live) < MAX_LIVE)
    @rule(
        prompt=PROMPTS,
        ending=st.sampled_from(["", "1", "02", "2222"]),
        spared=st.integers(0, 6),
        meanwhile=st.booleans(),
        chunk=st.integers(1, 8),
    )
    @operation
    def come_back(
        self, prompt: Prompt, ending: str, spared: int, meanwhile: bool, chunk: int
    ) -> None:
        """Serve a prompt, evict all but its beginning, then serve it again."""
        early = [self.plan(prompt, ending, attach=False)] if meanwhile else []
        request = self.plan(prompt, ending, attach=False)
        self.write(request, len(request.tokens))
        self.share(request, request.computed)
        self.stop(request)
        self.evict_pages(max(0, self.evictable() - spared))
        for late in early or [self.plan(prompt, ending, attach=False)]:
            self.write(late, late.computed + chunk * self.size)
            self.share(late, late.computed)

    @precondition(lambda self: len(self.live) < MAX_LIVE)
    @rule(prompt=PROMPTS, twin=WHO, attach=st.booleans())
    @operation
    def start(self, prompt: Prompt, twin: int, attach: bool) -> None:
        """Look up a prompt, often the prompt of a live request."""
        namespace, tokens = prompt[0], self.prompt(prompt[1], prompt[2])
        if self.live and twin % 3 == 0:
            namespace, tokens = self.pick(twin).namespace, self.pick(twin).tokens
        self.look_up(namespace, tokens, attach=attach)

    @precondition(lambda self: self.live)
    @rule(who=WHO, spare=SOME, chunk=st.integers(1, 8), announce=st.booleans(), cut=SOME)
    @operation
    def step(self, who: int, spare: int, chunk: int, announce: bool, cut: int) -> None:
        """Reserve, maybe announce, then compute and publish a chunk, as an engine does."""
        request = self.pick(who)
        if request.kept is not None:
            return
        end = min(len(request.tokens), request.computed + chunk * self.size - cut % self.size)
        self.take(request, max(0, -(-end // self.size) + spare // 8 - len(request.table)))
        if announce:
            self.promise(request, end // self.size)
        self.write(request, max(end, request.lease.num_tokens))
        self.share(request, request.computed)

    @precondition(lambda self: self.live)
    @rule(who=WHO, num_pages=st.integers(0, 12))
    @operation
    def reserve(self, who: int, num_pages: int) -> None:
        self.take(self.pick(who), num_pages)

    @precondition(lambda self: self.live)
    @rule(who=WHO, num_pages=st.integers(1, 8))
    @operation
    def announce(self, who: int, num_pages: int) -> None:
        request = self.pick(who)
        if request.kept is None:
            self.promise(request, request.pinned + num_pages)

    @precondition(lambda self: self.live)
    @rule(who=WHO, num_tokens=st.integers(1, 40))
    @operation
    def compute(self, who: int, num_tokens: int) -> None:
        request = self.pick(who)
        if request.kept is None:
            self.write(request, request.computed + num_tokens)

    @precondition(lambda self: self.live)
    @rule(who=WHO, back=SOME)
    @operation
    def publish(self, who: int, back: int) -> None:
        """Publish computed pages, sometimes all but the last few."""
        request = self.pick(who)
        if request.kept is None:
            self.write(request, request.lease.num_tokens)
            back = (back // 3) * self.size + back % 3
            self.share(request, max(request.lease.num_tokens, request.computed - back))

    @precondition(lambda self: self.live)
    @rule(who=WHO, pages=st.sampled_from(["", "0", "01", "2"]), tail=SOME)
    @operation
    def extend(self, who: int, pages: str, tail: int) -> None:
        """Append a decoded token or a new turn of a conversation."""
        self.pick(who).tokens += self.prompt(pages, tail)

    # -- how requests end ------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(who=WHO)
    @operation
    def withdraw(self, who: int) -> None:
        """Fail a step: the pages that a leader did not compute go, with all pages below them."""
        request = self.pick(who)
        if request.kept is None:
            self.fail(request)

    @precondition(lambda self: self.live)
    @rule(who=WHO, split=SOME)
    @operation
    def release(self, who: int, split: int) -> None:
        """End a request in any state, finished or aborted."""
        self.stop(self.pick(who), split)

    @precondition(lambda self: self.live)
    @rule(who=WHO)
    @operation
    def cancel(self, who: int) -> None:
        """Cancel a lookup whose lease has not grown; statistics are as before it."""
        request = self.pick(who)
        if request.lease.num_tokens != request.lookup[1]:
            self.refused(LeaseError, self.cache.cancel, request.lease)
            return
        self.cache.cancel(request.lease)
        self.cache.give_back(request.private)
        self.lookups -= 1
        self.lookup_tokens -= request.lookup[0]
        self.hit -= request.lookup[1]
        self.ideal -= request.lookup[2]
        self.end(request)

    # -- what others do --------------------------------------------------------------------

    @rule(num_pages=st.sampled_from([1, 2, 3, 5, 8, 12, 48]))
    @operation
    def evict(self, num_pages: int) -> None:
        if num_pages < 48:
            self.evict_pages(num_pages)
            return
        expected = self.evictable()
        assert self.cache.clear() == expected
        self.forget_evicted(expected)

    def evict_pages(self, num_pages: int) -> None:
        expected = min(num_pages, self.evictable())
        assert self.cache.evict(num_pages) == expected
        self.forget_evicted(expected)

    @precondition(lambda self: self.live)
    @rule(prompt=PROMPTS, who=WHO, page=st.integers(0, 47))
    @operation
    def question(self, prompt: Prompt, who: int, page: int) -> None:
        """`match` finds what the model finds and changes nothing; misuse is refused."""
        before, namespace, tokens = self.snapshot(), prompt[0], self.prompt(prompt[1], prompt[2])
        match = self.cache.match(CacheKey(list(tokens), namespace))
        assert match.num_pages == len(self.find(namespace, tokens, pending=False))
        assert match.num_tokens == match.num_pages * self.size
        assert self.snapshot() == before
        self.misuse_lease([self.foreign, *self.dead[-3:]][who % (1 + len(self.dead[-3:]))])
        request = self.pick(who)
        if request.kept is not None:
            self.misuse_grown(request.lease)
        self.misuse_page(request, page % self.num_pages)

    def misuse_lease(self, lease: Lease) -> None:
        """Ended and foreign leases are refused by every call."""
        self.refused(LeaseError, self.cache.release, lease)
        self.refused(LeaseError, self.cache.cancel, lease)
        self.misuse_grown(lease)

    def misuse_grown(self, lease: Lease) -> None:
        """A lease that lost pages to a withdrawal can only be released."""
        self.refused(LeaseError, self.cache.announce, lease, lease.key, ())
        self.refused(LeaseError, self.cache.publish, lease, lease.key)
        self.refused(LeaseError, self.cache.withdraw, lease)

    def misuse_page(self, request: Request, page: int) -> None:
        """Free, shared and repeated pages cannot be given back."""
        if any(page in live.private for live in self.live):
            self.refused(PageOwnershipError, self.cache.give_back, [page, page])
        else:
            self.refused(PageOwnershipError, self.cache.give_back, [page])
            self.refused(PageOwnershipError, self.cache.release, request.lease, [page])
        self.refused(OutOfPagesError, self.cache.reserve, self.num_pages + 1)

    @invariant()
    def the_model_agrees(self) -> None:
        self.agree()
        self.sound = True

    def teardown(self) -> None:
        """After every request ends, no lease is left and evicting frees every page."""
        if not self.sound:
            return
        for request in self.live:
            if request.kept is None:
                self.fail(request)
        for request in list(self.live):
            self.stop(request)
        self.agree()
        assert self.cache.clear() == len(self.ready)
        self.cache.check()
        stats, tree = self.cache.stats(), self.cache._tree
        assert (stats.free_pages, stats.num_nodes, stats.num_leases) == (self.num_pages, 0, 0)
        assert stats.ghost_pages <= self.budget
        assert all(tree.first_child[root] for root in tree.roots.values()), "an empty root is left"
        if not self.budget:
            assert not tree.roots
            assert len(tree._free_ids) == tree._capacity - 1, "the number of a node is lost"


@pytest.mark.parametrize(
    "page_sizes", [(1,), (2, 3, 4), range(5, 17), range(17, 65)], ids=["1", "2-4", "5-16", "17-64"]
)
def test_random_requests_break_no_invariant(page_sizes: Sequence[int]) -> None:
    """1,200 random histories over page sizes 1 to 64 agree with the model after every rule."""
    machine = type("SizedCacheMachine", (CacheMachine,), {"page_sizes": page_sizes})

    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples(300), stateful_step_count=40)
    )
