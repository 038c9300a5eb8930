"""Hit rates of every eviction policy on traces; no clock, no peers.

A page is one hash id of the trace: 512 tokens. What counts is whole pages only, in the order of
arrival, over all input tokens; outputs are not published.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.workloads import TRACE_PAGE, TraceLine, read_trace
from ramify.cache import POLICIES, CacheKey, PrefixCache

CAPACITIES = (1_000_000, 2_000_000, 5_000_000, 10_000_000)  # tokens
LAST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class HitRates:
    """The hit rates of one policy on one trace, by capacity in tokens."""

    trace: str
    policy: str
    rates: dict[int, float]


def hit_rates(
    path: Path, policies: Sequence[str], limit: int | None
) -> tuple[list[HitRates], float]:
    """Return the hit rates of all policies at all capacities, and that of an unbounded cache."""
    lines = list(read_trace(path))[:limit]
    known = {identity for line in lines for identity in line.hash_ids}
    results = []
    for policy in policies:
        rates = {size: hit_rate(lines, size // TRACE_PAGE, policy) for size in CAPACITIES}
        results.append(HitRates(path.stem, policy, rates))
    return results, hit_rate(lines, len(known) + 1, policies[0])


def hit_rate(lines: Sequence[TraceLine], num_pages: int, policy: str) -> float:
    """Return hit tokens / input tokens of a trace, from an empty cache."""
    cache = PrefixCache(num_pages, 1, policy=policy)
    hit_pages = 0
    for number, line in enumerate(lines):
        whole = array("i", line.hash_ids[: line.input_length // TRACE_PAGE])
        # A lookup leaves the last atom to be computed: one more, so that all pages can be found.
        lease = cache.acquire(CacheKey(whole + array("i", [LAST_ID - number])))
        hit_pages += lease.num_tokens
        private = cache.reserve(len(whole) - lease.num_tokens)
        longer = cache.publish(lease, CacheKey(whole), private)
        cache.release(longer, private[longer.num_tokens - lease.num_tokens :])
    return hit_pages * TRACE_PAGE / sum(line.input_length for line in lines)


def default_policies() -> list[str]:
    """Return the names of all eviction policies."""
    return list(POLICIES)
