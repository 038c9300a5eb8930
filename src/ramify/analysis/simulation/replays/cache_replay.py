"""Replay of a log in the real `PrefixCache`, with the log's clock."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ramify.analysis.simulation.page_trace import PageTrace
from ramify.analysis.simulation.replays.sessions import ends_by_time
from ramify.cache import CacheKey, PrefixCache
from ramify.cache.packed import ATOM_BYTES
from ramify.cache.sessions import end_session, open_session

DEPTH_POLICIES = ("cost",)  # they read how many tokens precede a page
# A lookup hits a proper prefix; this atom, which no page id equals, makes the whole pages proper.
REST_OF_PROMPT = array("i", [2**31 - 1]).tobytes()
REPORT_EVERY = 256  # requests


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Tokens of a replay."""

    num_tokens: int
    num_hit: int
    num_uncached: int  # requests longer than the whole cache: their end was not kept

    @property
    def hit_rate(self) -> float:
        """Share of all input tokens that were hits."""
        return self.num_hit / self.num_tokens if self.num_tokens else 0.0

    @property
    def num_computed(self) -> int:
        """Input tokens that were computed."""
        return self.num_tokens - self.num_hit


def replay(
    trace: PageTrace,
    capacity_tokens: int,
    policy: str,
    *,
    first_counted: int = 0,
    end_sessions_s: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Serve the requests one after the other: look up, evict, publish, release.

    The cache has one atom a page, the id of the page with its prefix: the tree is the same as with
    the tokens themselves, at a fraction of the memory. A prompt of whole pages alone cannot hit the
    last of them, for a lookup leaves a token to compute.

    Args:
        end_sessions_s: end each session this long after its last request; None: never. Needs times.
        progress: gets the number of requests done, now and then.
    """
    now_s = 0.0
    atoms_per_page = trace.page_size if policy in DEPTH_POLICIES else 1
    cache = PrefixCache(
        max(1, capacity_tokens // trace.page_size),
        atoms_per_page,
        policy=policy,
        log_every=0,
        clock=lambda: now_s,
    )
    page_bytes = ATOM_BYTES * atoms_per_page
    starts = trace.start_s.tolist() if trace.has_times else []
    lookups, num_tokens = trace.num_lookup_pages.tolist(), trace.num_tokens.tolist()
    num_hit = num_counted = num_uncached = 0
    ends = deque([] if end_sessions_s is None else ends_by_time(trace, end_sessions_s))
    numbers = trace.session.tolist() if ends else [-1] * len(trace)
    for request in range(len(trace)):
        if starts:
            now_s = starts[request] - starts[0]
        while ends and ends[0][0] <= starts[request]:
            end_session(cache, "", str(ends.popleft()[1]))
        number = numbers[request]
        session = None if number < 0 else open_session(cache, "", str(number))
        page_ids = trace.pages(request)
        atoms = (page_ids if atoms_per_page == 1 else page_ids.repeat(atoms_per_page)).tobytes()
        prompt = atoms[: lookups[request] * page_bytes]
        if num_tokens[request] > lookups[request] * trace.page_size:
            prompt += REST_OF_PROMPT
        lease = cache.acquire(CacheKey(prompt))
        num_hit_pages = lease.num_tokens // atoms_per_page
        if request >= first_counted:
            num_hit += num_hit_pages * trace.page_size
            num_counted += num_tokens[request]
        num_missing = len(page_ids) - num_hit_pages
        num_kept = min(num_missing, cache.num_available)
        num_uncached += num_kept < num_missing
        pages = cache.reserve(num_kept)
        computed = CacheKey(atoms[: (num_hit_pages + num_kept) * page_bytes])
        cache.release(cache.publish(lease, computed, pages), session=session)
        if progress is not None and not request % REPORT_EVERY:
            progress(request)
    return ReplayResult(num_counted, num_hit, num_uncached)
