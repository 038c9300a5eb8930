"""Speculative decoding: proposes draft tokens, which one step verifies together.

A step costs about as much as reading the weights, and each row a little more. So a draft token is
worth its row if the chance that it is accepted exceeds the row's share of the step's cost.
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
_LOGGED_ERRORS: deque[str] = deque(maxlen=64)  # the last errors of drafters

# Rows that cost as much as the step itself. Measured: 0.35 B in float32 on 1 core takes 0.5 s for 8
# rows, 1.0 s for 16.
ROWS_PER_STEP_COST = 8
MIN_ACCEPTANCE_RATE = 0.1  # a draft token of a lower chance is not proposed, however few the rows
RATE_WINDOW = 8.0  # verified draft tokens that the rate averages over
MAX_COOLDOWN_STEPS = 64  # between two retries


class Drafter(Protocol):
    """Proposes drafts for the running requests. A wrong draft costs time, never a token."""

    def propose(self, running: Sequence[Request]) -> Iterator[tuple[Request, tuple[int, ...]]]:
        """Yields (request, draft) for each request that `accepts_drafts`; called before each step.

        A draft has at most `max_drafts` tokens, and is often empty.
        """

    def verified(self, request: Request, num_accepted: int) -> None:
        """The first `num_accepted` tokens of `request.draft` became output, the others did not."""


class Proposer(Protocol):
    """A source of draft tokens."""

    def propose(self, request: Request, limit: int) -> tuple[int, ...]:
        """At most `limit` draft tokens for what follows `request.sequence.tokens`; often none."""


def propose_drafts(drafter: Drafter, running: Sequence[Request]) -> None:
    """Set `request.draft` of running requests; log a drafter that raises, once per message."""
    try:
        for request, draft in drafter.propose(running):
            request.draft = draft
    except Exception as error:  # noqa: BLE001 - drafts are optional
        message = f"{type(error).__name__}: {error}"
        if message not in _LOGGED_ERRORS:
            _LOGGED_ERRORS.append(message)
            logger.warning("the drafter failed, requests decode without drafts: %s", message)


def accepts_drafts(request: Request) -> bool:
    """Whether a request decodes: its next step computes one token, alone and without children."""
    return (
        request.sequence.num_uncomputed == 1
        and not request.num_failed_steps
        and not request.pending_children
    )


def max_drafts(request: Request) -> int:
    """Maximum draft length: with all accepted, the token sampled after them is the last."""
    return request.max_len - len(request.sequence.tokens) - 1


class PrefixTreeProposer:
    """Drafts the tokens that followed the request's context before, from the prefix cache's tree.

    The request's lease is its node in the tree and moves on as its pages are published. So only the
    tokens behind the lease are looked up.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def propose(self, request: Request, limit: int) -> tuple[int, ...]:
        """See `Proposer`."""
        lease = request.sequence.lease
        assert lease is not None
        if any(salt.start >= lease.num_tokens for salt in request.sequence.salts):
            return ()  # behind the lease lie tokens of other owners, too: propose none
        tail = request.sequence.tokens[lease.num_tokens :]
        return tuple(self._cache.continuation(lease, tail, limit))


class NgramProposer:
    """Drafts the tokens that followed the last ones earlier in the same request."""

    def __init__(self) -> None:
        self._indexes = WeakKeyDictionary[Request, NgramIndex]()

    def propose(self, request: Request, limit: int) -> tuple[int, ...]:
        """See `Proposer`."""
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = NgramIndex()
        index.extend(request.sequence.tokens[len(index.tokens) :])
        return index.propose(limit)


@dataclass(slots=True)
class AcceptanceRate:
    """Recent acceptance rate of one proposer for one request, and its cooldown."""

    num_accepted: float = 0.8 * RATE_WINDOW / 4  # a prior that a few verified tokens outweigh
    num_verified: float = RATE_WINDOW / 4
    cooldown: int = 0  # steps between retries while drafts are not worth their rows
    cooldown_left: int = 0

    def num_worthwhile(self, num_rows: int, limit: int) -> int:
        """Draft length, at most `limit`, worth its rows in a step of `num_rows` other rows."""
        rate, chance = self.num_accepted / self.num_verified, 1.0
        for length in range(limit):
            chance *= rate  # that all drafts up to this one are accepted
            rows = num_rows + length
            if chance < max(MIN_ACCEPTANCE_RATE, rows / (rows + ROWS_PER_STEP_COST)):
                break
        else:
            length = limit
        if length or not limit:
            return length
        if self.cooldown_left:
            self.cooldown_left -= 1
            return 0
        self.cooldown = self.cooldown_left = min(2 * self.cooldown + 1, MAX_COOLDOWN_STEPS)
        return 1

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Update the rate. Draft tokens after the first rejected one do not count."""
        self.num_accepted += num_accepted
        self.num_verified += min(num_accepted + 1, num_drafted)
        if self.num_verified > RATE_WINDOW:
            self.num_accepted *= RATE_WINDOW / self.num_verified
            self.num_verified = RATE_WINDOW
        if num_accepted:
            self.cooldown = self.cooldown_left = 0


@dataclass(slots=True)
class DraftState:
    """The drafter's state of a request."""

    acceptance: dict[str, AcceptanceRate] = field(default_factory=dict)  # by proposer
    proposer: str = ""  # of the drafts that the next step verifies


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Verified draft tokens of one proposer."""

    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """num_accepted / num_drafted; 0 before the first."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


class AdaptiveDrafter:
    """Drafts from the first proposer that has tokens; adapts draft lengths to acceptance rates.

    A request that runs alone gets long drafts, one among many only drafts that are nearly certain.
    A proposer whose drafts are not worth their rows pauses, longer after each failed retry.

    Args:
        proposers: by name, in order of preference.
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
        """Draft tokens since the engine was built, by proposer."""
        return {name: DraftStats(*counts) for name, counts in self._counts.items()}

    def propose(self, running: Sequence[Request]) -> Iterator[tuple[Request, tuple[int, ...]]]:
        """See `Drafter`."""
        num_rows = sum(request.sequence.num_uncomputed for request in running)
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
        for name, proposer in self._proposers.items():
            rate = state.acceptance.setdefault(name, AcceptanceRate())
            length = rate.num_worthwhile(num_rows, limit)
            draft = proposer.propose(request, length) if length > 0 else ()
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
    """The drafter of the option `speculative`; None if it is "off"."""
    options = config.requested.speculative
    proposers: dict[str, Proposer] = {}
    if options.speculative in ("tree", "auto"):
        proposers["tree"] = PrefixTreeProposer(cache)
    if options.speculative in ("ngram", "auto"):
        proposers["ngram"] = NgramProposer()
    if not proposers:
        return None
    return AdaptiveDrafter(
        proposers,
        max_draft_tokens=options.max_draft_tokens,
        max_batch_tokens=config.max_batch_tokens,
    )
