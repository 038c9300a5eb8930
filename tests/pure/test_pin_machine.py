"""A state machine that checks pins against a model made of a dict."""

from collections.abc import Sequence
from functools import partial

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

from ramify.cache import Pin, PrefixCache
from ramify.errors import PinError
from tests.budget import examples
from tests.pure.cache_traffic import Clock
from tests.pure.test_prefix_cache import key, publish, state

TEXTS = ("ab", "abcd", "abcdef", "abcdxy", "abuv", "uv", "uvwx", "uvwxyz")


class PinMachine(RuleBasedStateMachine):
    """Compares pins with a dict: owner, prefix, expiry and number of pinned pages."""

    @initialize(
        num_pages=st.integers(4, 14),
        share=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
        index=st.sampled_from(["radix", "hash"]),
    )
    def make(self, num_pages: int, share: float, index: str) -> None:
        self.clock = Clock()
        self.cache = PrefixCache(
            num_pages, 2, index=index, max_pinned_share=share, clock=self.clock
        )
        self.most = int(num_pages * share)
        self.model: dict[int, tuple[str, str, float | None, float]] = {}  # owner, text, ttl, end
        self.ended: list[Pin] = []

    def pages(self, texts: Sequence[str]) -> set[str]:
        return {text[:end] for text in texts for end in range(2, len(text) + 1, 2)}

    def pinned(self) -> set[str]:
        return self.pages([text for _, text, _, _ in self.model.values()])

    @rule(text=st.sampled_from(TEXTS), more=st.booleans())
    def serve(self, text: str, more: bool) -> None:
        """Look up a prompt and compute it if pages are free; a hit renews the pins it covers."""
        self.expire()
        text += "!" * more
        lease = self.cache.acquire(key(text))
        for number, (owner, kept, ttl, _) in self.model.items():
            if ttl is not None and text[: lease.num_tokens].startswith(kept):
                self.model[number] = (owner, kept, ttl, self.clock.now_s + ttl)
        missing = -(-len(text) // 2) - len(lease.pages)
        private: Sequence[int] = ()
        if self.cache.can_reserve(missing):
            lease, private = publish(self.cache, text, lease, self.cache.reserve(missing))
        self.cache.release(lease, private)

    @rule(
        text=st.sampled_from(TEXTS),
        owner=st.sampled_from(["me", "you"]),
        ttl=st.sampled_from([None, 1.0, 5.0]),
        own_limit=st.none() | st.integers(0, 4),
        room=st.integers(0, 8),
    )
    def pin(
        self, text: str, owner: str, ttl: float | None, own_limit: int | None, room: int
    ) -> None:
        """Refused over the budget of all pins, over the owner's, or if it leaves too little room."""
        self.expire()
        prefix = text[: self.cache.match(key(text + "!")).num_tokens]
        would = len(self.pinned() | self.pages([prefix]))
        others = self.pages([text for name, text, *_ in self.model.values() if name != owner])
        own = self.pages([text for name, text, *_ in self.model.values() if name == owner])
        would_own = len((own | self.pages([prefix])) - others)
        before = state(self.cache)[0].cached_pages, self.cache.pins()
        problem = None
        if not prefix:
            problem = "no whole"
        elif would > min(self.most, max(0, self.cache.num_pages - room)):
            problem = f"{would} would be pinned, but"
        elif own_limit is not None and would_own > own_limit:
            problem = f"{would_own} would be pinned for '{owner}', but at most {own_limit} may"
        pin_it = partial(
            self.cache.pin, key(text), owner, ttl, max_owner_pages=own_limit, room_pages=room
        )
        if problem is not None:
            with pytest.raises(PinError, match=problem):
                pin_it()
            assert (state(self.cache)[0].cached_pages, self.cache.pins()) == before
            return
        pin = pin_it()
        assert (pin.key, pin.num_pages, pin.owner) == (key(prefix), len(prefix) // 2, owner)
        end = float("inf") if ttl is None else self.clock.now_s + ttl
        self.model[pin.id] = (owner, prefix, ttl, end)

    @precondition(lambda self: self.model)
    @rule(who=st.integers(0, 9))
    def unpin(self, who: int) -> None:
        self.expire()
        pins = self.cache.pins()
        if pins:
            pin = pins[who % len(pins)]
            self.cache.unpin(pin)
            del self.model[pin.id]
            self.ended.append(pin)

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.expire()

    @rule(num_pages=st.integers(1, 14))
    def evict(self, num_pages: int) -> None:
        self.expire()
        cached = self.cache.stats().cached_pages
        expected = min(num_pages, cached - len(self.pinned()))
        assert self.cache.evict(num_pages) == expected

    def expire(self) -> None:
        """Drop expired entries from the model; `pins()` does the same in the cache."""
        self.model = {
            pin_id: entry for pin_id, entry in self.model.items() if entry[3] > self.clock.now_s
        }
        self.cache.pins()

    @invariant()
    def the_model_agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        actual = {
            pin.id: (pin.owner, pin.key, pin.ttl_s, pin.expires_s) for pin in self.cache.pins()
        }
        assert actual == {
            pin_id: (owner, key(text), ttl, end)
            for pin_id, (owner, text, ttl, end) in self.model.items()
        }
        pinned, stats = self.pinned(), self.cache.stats()
        assert stats.pinned_pages == len(pinned) <= self.most
        assert stats.evictable_pages == stats.cached_pages - len(pinned)
        assert all(self.cache.match(key(text + "!")).num_tokens == len(text) for text in pinned)
        assert self.cache.can_reserve(self.cache.num_pages - len(pinned))
        for pin in self.ended[-2:]:
            with pytest.raises(PinError):
                self.cache.unpin(pin)


def test_pins_are_what_the_model_says() -> None:
    """Prompts, pins, refreshes, expiry and evictions in any order agree with the model."""
    run_state_machine_as_test(
        PinMachine, settings=settings(max_examples=examples(60), stateful_step_count=30)
    )
