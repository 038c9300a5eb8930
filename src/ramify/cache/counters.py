"""Counters of a cache: hit rates in all and recent, evictions, ages; histograms and a log line."""

from __future__ import annotations

import logging
import sys
from typing import Final

from ramify.cache.ghosts import REASONS
from ramify.cache.types import NUM_BUCKETS, PER_SECOND, Histogram

log = logging.getLogger(__name__)

# a window of lookups; the recent hit rate is over the last one to two windows
RECENT_LOOKUPS: Final = 512
MISS: Final = NUM_BUCKETS  # the gap of a lookup without a hit
_MAX_BITS: Final = sys.float_info.max_exp + 8  # bits of the longest time, in 256ths of a second


class CacheCounters:
    """The counters of one cache; writes a log line every `log_every` lookups, none if that is 0."""

    def __init__(self, log_every: int) -> None:
        self.log_every = log_every
        self.lookups = self.tokens = self.hit_tokens = self.ideal_tokens = 0
        self.copied_tokens = 0  # of `hit_tokens`
        self.evictions = [0] * len(REASONS)  # pages, by reason
        self._residency = [0] * (_MAX_BITS + 1)  # pages, by bits of the time
        self._idle = [0] * (_MAX_BITS + 1)
        self._reuse_gap = [0] * (NUM_BUCKETS + 1)  # and a bucket for misses
        # at the start of each window: lookups, lookups without the cancelled ones, tokens, hit tokens
        self._window_starts = [(0, 0, 0, 0)] * 3
        self._num_cancelled = 0
        self._next_window = RECENT_LOOKUPS
        self._logged = (0, 0, 0)
        self.next_log = log_every or sys.maxsize  # number of lookups at which a line is due

    def lookup(self, tokens: int, hit_tokens: int, ideal_tokens: int, gap: int) -> None:
        """Count a lookup; `gap` is the `log2_bucket` of seconds since the last use, or MISS."""
        if self.lookups >= self._next_window:
            self._window_starts = [
                *self._window_starts[1:],
                (self.lookups + self._num_cancelled, *self._totals()),
            ]
            self._next_window = self.lookups + RECENT_LOOKUPS
        self.lookups += 1
        self.tokens += tokens
        self.hit_tokens += hit_tokens
        self.ideal_tokens += ideal_tokens
        self._reuse_gap[gap] += 1

    def cancel(
        self, tokens: int, hit_tokens: int, ideal_tokens: int, gap: int, number: int
    ) -> None:
        """Subtract the `number`-th lookup, whose request was cancelled."""
        self._num_cancelled += 1
        self._window_starts = [
            (num_ever, lookups - 1, all_tokens - tokens, hits - hit_tokens)
            if number <= num_ever
            else (num_ever, lookups, all_tokens, hits)
            for num_ever, lookups, all_tokens, hits in self._window_starts
        ]
        self.lookups -= 1
        self.tokens -= tokens
        self.hit_tokens -= hit_tokens
        self.ideal_tokens -= ideal_tokens
        self._reuse_gap[gap] -= 1

    def copied(self, num_tokens: int, num_ideal: int) -> None:
        """Count tokens that were copied from part of a page as hits of a lookup counted before.

        An infinite cache that shares whole pages only would have hit all but `num_ideal` of them.
        """
        self.copied_tokens += num_tokens
        self.hit_tokens += num_tokens
        self.ideal_tokens += num_ideal

    def evicted(self, reason: int, num_pages: int, age_s: float, idle_s: float) -> None:
        """Count pages evicted `age_s` after they were computed and `idle_s` after their last use."""
        self.evictions[reason] += num_pages
        self._residency[int(age_s * PER_SECOND).bit_length()] += num_pages
        self._idle[int(idle_s * PER_SECOND).bit_length()] += num_pages

    @property
    def recent(self) -> tuple[int, int]:
        """(tokens looked up, tokens hit) in the last one to two windows."""
        # False: the lookup that started the last window was cancelled.
        has_started = self.lookups > self._window_starts[2][1]
        _, _, tokens, hits = self._window_starts[1 if has_started else 0]
        return max(0, self.tokens - tokens), max(0, self.hit_tokens - hits)

    @property
    def histograms(self) -> tuple[Histogram, Histogram, Histogram]:
        """Histograms of age and idle time at eviction, per page, and of the gap before a hit, per lookup."""
        return (
            Histogram(_bucketed(self._residency)),
            Histogram(_bucketed(self._idle)),
            Histogram(tuple(self._reuse_gap[:NUM_BUCKETS])),
        )

    def write_log(self, used: int, cached: int, free: int) -> None:
        """Log one line: lookups since the last line, and the pages now."""
        lookups, tokens, hits = (
            now - last for now, last in zip(self._totals(), self._logged, strict=True)
        )
        self._logged = self._totals()
        self.next_log = self.lookups + self.log_every
        log.info(
            "prefix cache: %d lookups, %d of %d tokens found (%.1f %%; %.1f %% since the start, "
            "%.1f %% in an infinite cache); pages %d in use, %d cached, %d free; %d evicted so far",
            lookups,
            hits,
            tokens,
            100 * hits / max(1, tokens),
            100 * self.hit_tokens / max(1, self.tokens),
            100 * self.ideal_tokens / max(1, self.tokens),
            used,
            cached,
            free,
            sum(self.evictions),
        )

    def _totals(self) -> tuple[int, int, int]:
        return self.lookups, self.tokens, self.hit_tokens


def _bucketed(by_bits: list[int]) -> tuple[int, ...]:
    last = NUM_BUCKETS - 1
    return (*by_bits[:last], sum(by_bits[last:]))


def log2_bucket(seconds: float) -> int:
    """The histogram bucket of a time: the number of bits of its 256ths of a second."""
    bucket = int(seconds * PER_SECOND).bit_length()
    return bucket if bucket < NUM_BUCKETS else NUM_BUCKETS - 1
