"""Threads that use one cache at any moment of each other's calls: refused, or right."""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import CacheKey, PrefixCache
from ramify.cache.inspection import count_pages
from ramify.errors import ConcurrentCallError
from tests.budget import examples
from tests.pure.threads import Pause, joined

KEY = CacheKey([1, 2, 3, 4, 5])


class LineTrace:
    """Pauses this thread at the n-th line of Ramify that it executes."""

    def __init__(self, pause: Pause, line: int) -> None:
        self.pause, self.left = pause, line

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_globals.get("__name__", "").startswith("ramify."):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.pause.reach()
        return self


def served(cache: PrefixCache, tokens: list[int]) -> int:
    """Serve a request; returns the hit."""
    key = CacheKey(tokens)
    lease = cache.acquire(key)
    hit = lease.num_tokens
    private = cache.reserve(-(-len(tokens) // 2) - hit // 2)
    new = cache.publish(lease, key, private)
    cache.release(new, private[len(new.pages) - hit // 2 :])
    return hit


OTHERS: dict[str, Callable[[PrefixCache], object]] = {
    "serve": lambda cache: served(cache, [1, 2, 3, 9, 9, 9]),
    "evict": lambda cache: cache.evict(2),
    "clear": lambda cache: cache.clear(),
    "reserve": lambda cache: cache.give_back(cache.reserve(3)),
    "match": lambda cache: cache.match(KEY),
    "pin": lambda cache: cache.unpin(cache.pin(CacheKey([1, 2]), "me")),
    "check": lambda cache: cache.check(),
    "count": lambda cache: count_pages(cache, lambda node: True),
}


@settings(max_examples=examples(100))
@given(
    line=st.integers(1, 260),
    other=st.sampled_from(sorted(OTHERS)),
    tokens=st.lists(st.integers(1, 3), min_size=2, max_size=14),
)
def test_at_any_line_of_a_call_others_are_refused_or_complete(
    line: int, other: str, tokens: list[int]
) -> None:
    """Wherever a thread stands in the cache, another one's call is refused or done before or after."""
    cache = PrefixCache(32, 2)
    served(cache, [1, 2, 3, 4])
    pause, hits, refused = Pause(), list[int](), False

    def traced() -> None:
        sys.settrace(LineTrace(pause, line))
        try:
            hits.append(served(cache, tokens))
        finally:
            sys.settrace(None)
            pause.reach()  # if it had fewer lines

    with joined("A", traced):
        pause.wait_until_reached()
        is_inside = cache.guard.thread != 0
        try:
            OTHERS[other](cache)
        except ConcurrentCallError:
            refused = True
        finally:
            pause.end()

    assert refused == is_inside
    assert len(hits) == 1
    cache.check()
    stats = cache.stats()
    assert (stats.num_leases, stats.private_pages, cache.guard.thread) == (0, 0, 0)
    cache.clear()
    assert cache.stats().free_pages == 32


def test_threads_that_are_refused_at_random_leave_a_sound_cache() -> None:
    """Three threads serve requests on one cache: calls work or are refused, and no page is lost."""
    cache, counts = PrefixCache(64, 2), {"refused": 0, "served": 0}
    lock = threading.Lock()

    def until_let_in(call: Callable[[], Any]) -> Any:
        while True:
            try:
                return call()
            except ConcurrentCallError:
                with lock:
                    counts["refused"] += 1

    def work(number: int) -> None:
        for turn in range(60):
            key = CacheKey([1, 2, 3, 4, number, turn % 7, turn % 3, 5, 6])
            lease = until_let_in(lambda: cache.acquire(key))  # noqa: B023
            count = 5 - len(lease.pages)
            private = until_let_in(lambda: cache.reserve(count))  # noqa: B023
            new = until_let_in(lambda: cache.publish(lease, key, private))  # noqa: B023
            left = private[len(new.pages) - len(lease.pages) :]
            until_let_in(lambda: cache.release(new, left))  # noqa: B023
            with lock:
                counts["served"] += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with joined("A", lambda: work(1)), joined("B", lambda: work(2)):
            work(3)
    finally:
        sys.setswitchinterval(interval)

    assert counts["served"] == 180
    cache.check()
    stats = cache.stats()
    assert (stats.num_leases, stats.private_pages, stats.lookups) == (0, 0, 180)


def test_a_thread_that_is_inside_may_look_up_and_release() -> None:
    """The hot methods, which look at the guard themselves, let the thread inside call again."""
    cache, key = PrefixCache(num_pages=8, page_size=2), CacheKey([1, 2, 3, 4, 5])
    cache.guard.enter("test")
    try:
        lease = cache.acquire(key)
        assert cache.match(key).num_tokens == lease.num_tokens == 0
        cache.release(lease)
    finally:
        cache.guard.thread, cache.guard.call = 0, ""

    assert cache.stats().num_leases == 0
    cache.check()
