"""Guesses for a request's next tokens, which one step verifies all at once.

Where guesses come from, and how many are worth their rows. A step costs about as much as reading
the weights, and each row a little more; so a guess is worth its row if it is right more often than
the row's share in the cost of the step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ramify.cache.prefix_cache import PrefixCache
from ramify.engine.repeats import Repeats

if TYPE_CHECKING:
    from ramify.config import ResolvedConfig
    from ramify.engine.request import Request

logger = logging.getLogger(__name__)
_TOLD: deque[str] = deque(maxlen=64)  # what drafters raised last

FREE_ROWS = 8  # cost as much as the step itself: 0.35 B in float32, 1 core: 0.5 s for 8, 1.0 for 16
LEAST_RATE = 0.1  # below it a guess is not worth the look at it, however few rows there are
MEMORY = 8.0  # verified guesses that the rate looks back at
MAX_PAUSE = 64  # steps from one retry to the next


class Drafter(Protocol):
    """Where the engine's drafts come from. A wrong one costs time, never a token."""

    def propose(self, running: Sequence[Request]) -> Iterator[tuple[Request, tuple[int, ...]]]:
        """Guesses, often none, for each running request that `takes_guesses`.

        At most `room_for_guesses` for each. Called before each step.
        """
        ...

    def verified(self, request: Request, num_accepted: int) -> None:
        """So many of `request.draft` were right and became output; the others are dropped."""
        ...


class Source(Protocol):
    """One way to guess."""

    def guess(self, request: Request, limit: int) -> tuple[int, ...]:
        """At most `limit` guesses for the tokens after those that are known; often none."""
        ...


def guess(drafter: Drafter, running: Sequence[Request]) -> None:
    """Give running requests their drafts; what a drafter that raises had not guessed, is not."""
    try:
        for request, draft in drafter.propose(running):
            request.draft = draft
    except Exception as error:  # noqa: BLE001 - no request needs guesses
        told = f"{type(error).__name__}: {error}"
        if told not in _TOLD:  # once, not with every token
            _TOLD.append(told)
            logger.warning("a step without guesses, and perhaps more: %s", told)


def takes_guesses(request: Request) -> bool:
    """Whether a running request is about to compute its newest token and nothing else."""
    return (
        request.sequence.num_uncomputed == 1
        and not request.failures
        and not request.waiting_branches
    )


def room_for_guesses(request: Request) -> int:
    """Guesses of which each may become output: the token after the last one is the last."""
    return request.max_len - len(request.sequence.tokens) - 1


class TreeSource:
    """What followed this context before, in the request's namespace: what the cache remembers.

    A request's lease is its place in the tree, which moves along as its pages are published; only
    the tokens behind it are looked up.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def guess(self, request: Request, limit: int) -> tuple[int, ...]:
        """See `Source`."""
        lease = request.sequence.lease
        assert lease is not None
        if any(salt.start >= lease.num_tokens for salt in request.sequence.salts):
            return ()  # the lease ends where others go on too: none of their texts are guesses
        tail = request.sequence.tokens[lease.num_tokens :]
        return tuple(self._cache.continuation(lease, tail, limit))


class RepeatSource:
    """What followed the end of the request's text earlier in the same text."""

    def guess(self, request: Request, limit: int) -> tuple[int, ...]:
        """See `Source`."""
        text = request.guessing.text
        text.extend(request.sequence.tokens[len(text.tokens) :])
        return text.guess(limit)


@dataclass(slots=True)
class Record:
    """How often one source was right for one request lately."""

    right: float = 0.8 * MEMORY / 4  # a first opinion, which a few guesses outweigh
    tried: float = MEMORY / 4
    pause: int = 0  # steps between retries, when guesses are not worth their rows
    rest: int = 0  # of them still to pass

    def wanted(self, num_rows: int, limit: int) -> int:
        """How many guesses are worth their rows in a step that has `num_rows` without them."""
        rate, value = self.right / self.tried, 1.0
        for place in range(limit):
            value *= rate
            rows = num_rows + place
            if value < max(LEAST_RATE, rows / (rows + FREE_ROWS)):
                break
        else:
            place = limit
        if place or not limit:
            return place
        if self.rest:
            self.rest -= 1
            return 0
        self.pause = self.rest = min(2 * self.pause + 1, MAX_PAUSE)
        return 1

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a step: guesses after the first wrong one say nothing."""
        self.right += num_accepted
        self.tried += min(num_accepted + 1, num_drafted)
        if self.tried > MEMORY:
            self.right *= MEMORY / self.tried
            self.tried = MEMORY
        if num_accepted:
            self.pause = self.rest = 0


@dataclass(slots=True)
class Guessing:
    """What is kept for one request: its text, how its guesses went, and in all."""

    text: Repeats = field(default_factory=Repeats)
    records: dict[str, Record] = field(default_factory=dict)  # by source
    source: str = ""  # of the guesses that are to be verified
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Guesses of one source that were verified."""

    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over verified ones; 0 before the first."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


class Speculation:
    """A `Drafter` that asks several sources and adapts to how often each is right.

    Per request the number of guesses follows the rate at which they were accepted lately, and
    how full the step is: alone, a request may guess far ahead; beside many others only where it
    is nearly sure. Guesses that are not worth it pause, longer each time a retry fails.

    Args:
        sources: by name; the first one that has a guess is taken.
        max_draft_tokens: for one request in one step.
        max_batch_tokens: rows of one step.
    """

    def __init__(
        self, sources: Mapping[str, Source], *, max_draft_tokens: int, max_batch_tokens: int
    ) -> None:
        self._sources = dict(sources)
        self._max_draft_tokens, self._max_batch_tokens = max_draft_tokens, max_batch_tokens
        self._counts = {name: [0, 0] for name in sources}

    @property
    def counts(self) -> dict[str, DraftCounts]:
        """Guesses since the engine was made, by source."""
        return {name: DraftCounts(*found) for name, found in self._counts.items()}

    def propose(self, running: Sequence[Request]) -> Iterator[tuple[Request, tuple[int, ...]]]:
        """See `Drafter`."""
        num_rows = sum(one.sequence.num_uncomputed for one in running)
        for request in running:
            if takes_guesses(request):
                draft = self._guess(request, num_rows)
                num_rows += len(draft)
                yield request, draft

    def _guess(self, request: Request, num_rows: int) -> tuple[int, ...]:
        limit = min(
            self._max_draft_tokens,
            room_for_guesses(request),
            max(0, self._max_batch_tokens - num_rows),
        )
        guessing = request.guessing
        for name, source in self._sources.items():
            record = guessing.records.setdefault(name, Record())
            wanted = record.wanted(num_rows, limit)
            draft = source.guess(request, wanted) if wanted > 0 else ()
            if draft:
                guessing.source = name
                return draft
        return ()

    def verified(self, request: Request, num_accepted: int) -> None:
        """See `Drafter`."""
        guessing, num_drafted = request.guessing, len(request.draft)
        guessing.records[guessing.source].verified(num_drafted, num_accepted)
        counts = self._counts[guessing.source]
        counts[0] += num_drafted
        counts[1] += num_accepted
        guessing.num_drafted += num_drafted
        guessing.num_accepted += num_accepted


def drafter_of(config: ResolvedConfig, cache: PrefixCache) -> Drafter | None:
    """What `speculative` asks for; None when it is off."""
    asked = config.asked.speculative
    sources: dict[str, Source] = {}
    if asked.speculative in ("tree", "auto"):
        sources["tree"] = TreeSource(cache)
    if asked.speculative in ("ngram", "auto"):
        sources["ngram"] = RepeatSource()
    if not sources:
        return None
    return Speculation(
        sources,
        max_draft_tokens=asked.max_draft_tokens,
        max_batch_tokens=config.max_batch_tokens,
    )
