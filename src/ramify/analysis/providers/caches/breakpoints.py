"""The cache of breakpoints: an entry exists where an earlier prompt had a breakpoint.

Anthropic's rule looks back from each breakpoint over a number of positions; OpenAI's newer rule looks
up the latest breakpoints, whatever their distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ramify.analysis.corpus import Corpus
from ramify.analysis.providers.money import price_of
from ramify.analysis.providers.positions import BlockRoles
from ramify.analysis.providers.prompts import Billed, Prediction, PromptLayout, RuleCache, Timing
from ramify.analysis.providers.rules import HOUR_S, ModelRule


@dataclass(slots=True)
class _Entry:
    """A cached prefix."""

    writer: int
    ready_s: float
    expiry_s: float
    lifetime_s: float
    is_long: bool  # not below the minimum
    was_read: bool = False


@dataclass(slots=True)
class _Seen:
    """A prefix that ends with a segment, whether it was cached or not."""

    ready_s: float
    used_s: float


@dataclass(slots=True)
class _Search:
    """Segments at which the deepest entries end, by what is required of an entry; -1: none."""

    read: int = -1
    if_ready: int = -1
    if_kept: int = -1
    if_in_reach: int = -1
    if_long: int = -1
    in_flight: int | None = None
    expired: int | None = None
    read_from: int | None = None


class BreakpointCache(RuleCache):
    """Entries of one rule; prompts come in the order of their starts."""

    def __init__(self, corpus: Corpus, rule: ModelRule) -> None:
        self._rule = rule
        self._roles = BlockRoles(corpus, has_names=rule.implicit)
        self._entries: dict[int, list[_Entry]] = {}  # parallel requests each write one
        self._seen: dict[int, _Seen] = {}
        self._writes: list[tuple[int, int, list[tuple[int, _Entry]]]] = []

    def process(self, layout: PromptLayout, timing: Timing) -> Prediction:
        """Look a prompt up, then write and refresh entries."""
        chain, ends = layout.chain.tolist(), layout.ends.tolist()
        marks, looked_up = self._marks(layout)
        search = self._search(chain, timing, looked_up)
        num_read = ends[search.read + 1]
        marked = self._deepest_seen(chain, ends, timing)
        billed = self._bill(layout, marks, ends, num_read)
        self._write(layout, timing, marks, search.read)
        return Prediction(
            billed,
            segment=layout.segment_at(num_read),
            read_if_ready=ends[search.if_ready + 1],
            read_if_kept=ends[search.if_kept + 1],
            read_if_in_reach=ends[search.if_in_reach + 1],
            read_if_long_enough=ends[search.if_long + 1],
            read_if_marked=max(num_read, marked),
            read_if_resident=num_read,
            in_flight=search.in_flight,
            expired=search.expired,
            read_from=search.read_from,
        )

    def unread_tokens(self) -> dict[int, int]:
        """See `RuleCache`."""
        unread = {}
        for writer, num_read, entries in self._writes:
            used = max((end for end, entry in entries if entry.was_read), default=num_read)
            if tokens := max(end for end, _ in entries) - used:
                unread[writer] = tokens
        return unread

    def _marks(self, layout: PromptLayout) -> tuple[list[tuple[int, float]], set[int]]:
        """Breakpoints with their lifetimes, and the segments at whose ends entries are looked up."""
        rule = self._rule
        default = rule.lifetime_s or inf
        marks = [
            (at, ttl if ttl in rule.lifetimes_s else default) for at, ttl in layout.breakpoints
        ]
        if rule.implicit:
            implicit = self._roles.implicit_breakpoints(layout)
            explicit = {at for at, _ in marks}
            candidates = sorted(explicit | set(implicit))[-(rule.max_looked_up or 0) :]
            if implicit and implicit[-1] not in explicit:
                marks = sorted([*marks, (implicit[-1], default)])
            return marks[-rule.max_breakpoints :], set(candidates)
        marks = marks[-rule.max_breakpoints :]
        positions = self._roles.positions(layout.units).tolist()
        reached: set[int] = set()
        for at, _ in marks:
            first = positions[at] - (rule.lookback or len(positions)) + 1
            segment = at
            while segment >= 0 and positions[segment] >= first:
                reached.add(segment)
                segment -= 1
        return marks, reached

    def _search(self, chain: list[int], timing: Timing, looked_up: set[int]) -> _Search:
        search = _Search()
        for at in range(max(looked_up, default=-1), -1, -1):
            for entry in self._entries.get(chain[at + 1], ()):
                _consider(search, at, entry, timing, is_reached=at in looked_up)
            if search.read >= 0:
                break
        return search

    def _deepest_seen(self, chain: list[int], ends: list[int], timing: Timing) -> int:
        """Tokens that could be read if every segment had ended in a breakpoint."""
        lifetime = self._rule.lifetime_s or inf
        for at in range(len(chain) - 2, -1, -1):
            if ends[at + 1] < self._rule.min_tokens:
                return 0
            seen = self._seen.get(chain[at + 1])
            if (
                seen is not None
                and timing.is_ready(seen.ready_s)
                and timing.is_kept(seen.used_s + lifetime)
            ):
                return ends[at + 1]
        return 0

    def _bill(
        self,
        layout: PromptLayout,
        marks: list[tuple[int, float]],
        ends: list[int],
        num_read: int,
    ) -> Billed:
        """Read up to A, hour-long writes up to B, five-minute writes up to C, the rest ordinary."""
        least = max(num_read, self._rule.min_tokens - 1)
        written = [(ends[at + 1], ttl) for at, ttl in marks if ends[at + 1] > least]
        last = max((end for end, _ in written), default=num_read)
        last_1h = max((end for end, ttl in written if ttl == HOUR_S), default=num_read)
        counts = Billed(ends[-1], num_read, last - num_read, last_1h - num_read)
        return price_of(counts, self._rule, layout.prompt.request.info)

    def _write(
        self, layout: PromptLayout, timing: Timing, marks: list[tuple[int, float]], read: int
    ) -> None:
        chain, ends = layout.chain.tolist(), layout.ends.tolist()
        writer = layout.prompt.request.number
        for key in chain[1:]:
            seen = self._seen.get(key)
            if seen is None:
                self._seen[key] = _Seen(timing.ready_s, timing.written_s)
            else:
                seen.ready_s = min(seen.ready_s, timing.ready_s)
                seen.used_s = max(seen.used_s, timing.used_s)
        if read >= 0:
            self._use(chain[read + 1], timing)
        written = []
        for at, lifetime in marks:
            key = chain[at + 1]
            if self._use(key, timing) or at <= read:
                continue
            is_long = ends[at + 1] >= self._rule.min_tokens
            expiry_s = timing.written_s + lifetime
            entry = _Entry(writer, timing.ready_s, expiry_s, lifetime, is_long)
            pending = [old for old in self._entries.get(key, ()) if timing.is_kept(old.expiry_s)]
            self._entries[key] = [*pending, entry]
            if is_long:
                written.append((ends[at + 1], entry))
        if written:
            self._writes.append((writer, ends[read + 1], written))

    def _use(self, key: int, timing: Timing) -> bool:
        """Read the entries of a prefix: their lifetimes begin again; returns whether there is any."""
        is_used = False
        for entry in self._entries.get(key, ()):
            if timing.is_ready(entry.ready_s) and timing.is_kept(entry.expiry_s):
                is_used = entry.was_read = True
                entry.expiry_s = max(entry.expiry_s, timing.used_s + entry.lifetime_s)
        return is_used


def _consider(search: _Search, at: int, entry: _Entry, timing: Timing, *, is_reached: bool) -> None:
    """Note what an entry allows to read, with each restriction and without it."""
    is_ready, is_kept = timing.is_ready(entry.ready_s), timing.is_kept(entry.expiry_s)
    if is_kept and is_reached and entry.is_long and search.if_ready <= at:
        search.if_ready = at
        search.in_flight = None if is_ready else entry.writer
    if is_ready and is_reached and entry.is_long and search.if_kept <= at:
        search.if_kept = at
        search.expired = None if is_kept else entry.writer
    if is_ready and is_kept and entry.is_long:
        search.if_in_reach = max(search.if_in_reach, at)
    if is_ready and is_kept and is_reached:
        search.if_long = max(search.if_long, at)
        if entry.is_long:
            search.read, search.read_from = at, entry.writer
