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
from typing import Protocol
from weakref import WeakKeyDictionary

from ramify.cache.prefix_cache import PrefixCache
from ramify.config import ResolvedConfig
from ramify.engine.request import Request
from ramify.engine.speculation.ngram import NgramIndex

logger = logging.getLogger(__name__)
_LOGGED_ERRORS: deque[str] = deque(maxlen=64)  # what drafters raised last

ROWS_PER_STEP_COST = (
    8  # cost as much as the step itself: 0.35 B in float32, 1 core: 0.5 s for 8, 1.0 for 16
)
MIN_ACCEPTANCE_RATE = (
    0.1  # below it a guess is not worth the look at it, however few rows there are
)
RATE_WINDOW = 8.0  # verified guesses that the rate looks back at
MAX_COOLDOWN_STEPS = 64  # steps from one retry to the next


class Drafter(Protocol):
    """Where the engine's drafts come from. A wrong one costs time, never a token."""

    def propose(self, running: Sequence[Request]) -> Iterator[tuple[Request, tuple[int, ...]]]:
        """Guesses, often none, for each running request that `accepts_drafts`.

        At most `max_drafts` for each. Called before each step.
        """
        ...

    def verified(self, request: Request, num_accepted: int) -> None:
        """So many of `request.draft` were right and became output; the others are dropped."""
        ...


class Proposer(Protocol):
    """One way to guess."""

    def propose(self, request: Request, limit: int) -> tuple[int, ...]:
        """At most `limit` guesses for the tokens after those that are known; often none."""
        ...


def propose_drafts(drafter: Drafter, running: Sequence[Request]) -> None:
    """Give running requests their drafts; what a drafter that raises had not guessed, is not."""
    try:
        for request, draft in drafter.propose(running):
            request.draft = draft
    except Exception as error:  # noqa: BLE001 - no request needs guesses
        told = f"{type(error).__name__}: {error}"
        if told not in _LOGGED_ERRORS:  # once, not with every token
            _LOGGED_ERRORS.append(told)
            logger.warning("a step without guesses, and perhaps more: %s", told)


def accepts_drafts(request: Request) -> bool:
    """Whether a running request is about to compute its newest token and nothing else."""
    return (
        request.sequence.num_uncomputed == 1
        and not request.num_failed_steps
        and not request.pending_children
    )


def max_drafts(request: Request) -> int:
    """Guesses of which each may become output: the token after the last one is the last."""
    return request.max_len - len(request.sequence.tokens) - 1


class PrefixTreeProposer:
    """What followed this context before, in the request's namespace: what the cache remembers.

    A request's lease is its place in the tree, which moves along as its pages are published; only
    the tokens behind it are looked up.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def propose(self, request: Request, limit: int) -> tuple[int, ...]:
        """See `Proposer`."""
        lease = request.sequence.lease
        assert lease is not None
        if any(salt.start >= lease.num_tokens for salt in request.sequence.salts):
            return ()  # the lease ends where others go on too: none of their texts are guesses
        tail = request.sequence.tokens[lease.num_tokens :]
        return tuple(self._cache.continuation(lease, tail, limit))


class NgramProposer:
    """What followed the end of the request's text earlier in the same text."""

    def __init__(self) -> None:
        self._indexes = WeakKeyDictionary[Request, NgramIndex]()

    def propose(self, request: Request, limit: int) -> tuple[int, ...]:
        """See `Proposer`."""
        text = self._indexes.get(request)
        if text is None:
            text = self._indexes[request] = NgramIndex()
        text.extend(request.sequence.tokens[len(text.tokens) :])
        return text.propose(limit)


@dataclass(slots=True)
class AcceptanceRate:
    """How often one source was right for one request lately."""

    num_accepted: float = 0.8 * RATE_WINDOW / 4  # a first opinion, which a few guesses outweigh
    num_verified: float = RATE_WINDOW / 4
    cooldown: int = 0  # steps between retries, when guesses are not worth their rows
    cooldown_left: int = 0  # of them still to pass

    def num_worthwhile(self, num_rows: int, limit: int) -> int:
        """How many guesses are worth their rows in a step that has `num_rows` without them."""
        rate, value = self.num_accepted / self.num_verified, 1.0
        for place in range(limit):
            value *= rate
            rows = num_rows + place
            if value < max(MIN_ACCEPTANCE_RATE, rows / (rows + ROWS_PER_STEP_COST)):
                break
        else:
            place = limit
        if place or not limit:
            return place
        if self.cooldown_left:
            self.cooldown_left -= 1
            return 0
        self.cooldown = self.cooldown_left = min(2 * self.cooldown + 1, MAX_COOLDOWN_STEPS)
        return 1

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a step: guesses after the first wrong one say nothing."""
        self.num_accepted += num_accepted
        self.num_verified += min(num_accepted + 1, num_drafted)
        if self.num_verified > RATE_WINDOW:
            self.num_accepted *= RATE_WINDOW / self.num_verified
            self.num_verified = RATE_WINDOW
        if num_accepted:
            self.cooldown = self.cooldown_left = 0


@dataclass(slots=True)
class DraftState:
    """What the drafter knows of one request."""

    acceptance: dict[str, AcceptanceRate] = field(default_factory=dict)  # by proposer
    proposer: str = ""  # of the drafts that the next step verifies


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Guesses of one source that were verified."""

    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over verified ones; 0 before the first."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


class AdaptiveDrafter:
    """A `Drafter` that asks several sources and adapts to how often each is right.

    Per request the number of guesses follows the rate at which they were accepted lately, and
    how full the step is: alone, a request may guess far ahead; beside many others only where it
    is nearly sure. Guesses that are not worth it pause, longer each time a retry fails.

    Args:
        proposers: by name; the first one that has a guess is taken.
        max_draft_tokens: for one request in one step.
        max_batch_tokens: rows of one step.
    """

    def __init__(
        self, proposers: Mapping[str, Proposer], *, max_draft_tokens: int, max_batch_tokens: int
    ) -> None:
        self._proposers = dict(proposers)
        self._max_draft_tokens, self._max_batch_tokens = max_draft_tokens, max_batch_tokens
        self._counts = {name: [0, 0] for name in proposers}
        self._states = WeakKeyDictionary[Request, DraftState]()

    @property
    def counts(self) -> dict[str, DraftStats]:
        """Guesses since the engine was made, by source."""
        return {name: DraftStats(*found) for name, found in self._counts.items()}

    def propose(self, running: Sequence[Request]) -> Iterator[tuple[Request, tuple[int, ...]]]:
        """See `Drafter`."""
        num_rows = sum(one.sequence.num_uncomputed for one in running)
        for request in running:
            if accepts_drafts(request):
                draft = self._propose_for(request, num_rows)
                num_rows += len(draft)
                yield request, draft

    def _propose_for(self, request: Request, num_rows: int) -> tuple[int, ...]:
        limit = min(
            self._max_draft_tokens,
            max_drafts(request),
            max(0, self._max_batch_tokens - num_rows),
        )
        state = self._states.get(request)
        if state is None:
            state = self._states[request] = DraftState()
        for name, source in self._proposers.items():
            record = state.acceptance.setdefault(name, AcceptanceRate())
            wanted = record.num_worthwhile(num_rows, limit)
            draft = source.propose(request, wanted) if wanted > 0 else ()
            if draft:
                state.proposer = name
                return draft
        return ()

    def verified(self, request: Request, num_accepted: int) -> None:
        """See `Drafter`."""
        state, num_drafted = self._states[request], len(request.draft)
        state.acceptance[state.proposer].verified(num_drafted, num_accepted)
        counts = self._counts[state.proposer]
        counts[0] += num_drafted
        counts[1] += num_accepted


def create_drafter(config: ResolvedConfig, cache: PrefixCache) -> Drafter | None:
    """What `speculative` asks for; None when it is off."""
    asked = config.requested.speculative
    sources: dict[str, Proposer] = {}
    if asked.speculative in ("tree", "auto"):
        sources["tree"] = PrefixTreeProposer(cache)
    if asked.speculative in ("ngram", "auto"):
        sources["ngram"] = NgramProposer()
    if not sources:
        return None
    return AdaptiveDrafter(
        sources,
        max_draft_tokens=asked.max_draft_tokens,
        max_batch_tokens=config.max_batch_tokens,
    )
