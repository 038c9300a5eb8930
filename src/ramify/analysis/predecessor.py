"""Finds the best match of each request among all earlier ones that are not in flight.

The best match would share most if removable causes were mended. Comparing with every earlier request is
quadratic, so that a few candidates come from indexes, each linear in the log, and are compared exactly:

- a radix tree of the prompts as sent, for the longest raw prefix,
- a radix tree of the mended prompts (`Templates.canonical`, no tools, no reasoning),
- the newest requests with the same tools, of the same conversation, and with the same last message,
- the newest requests whose last user message has the lines of an older one of this request.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from ramify.analysis.compare.comparing import PAGE_SIZE, Comparer, Comparison
from ramify.analysis.compare.prompt_sides import Difference, Side, WalkStep
from ramify.analysis.compare.templates import Templates
from ramify.analysis.corpus import Corpus, StoredRequest
from ramify.analysis.records import HashedPrompt, LoggedRequest, SegmentKind
from ramify.analysis.unit_tree import Units, UnitTree

NUM_NEWEST = 3  # requests that an index remembers for a key
MAX_CANDIDATES = 14
FEW_TOKENS = 4  # by which prefixes of one length may differ: a word that two questions begin with


@dataclass(frozen=True, slots=True)
class Match:
    """A request and the earlier request that it could share most with."""

    request: StoredRequest
    match: StoredRequest | None
    raw_tokens: int = 0  # shared as sent
    mended_tokens: int = 0  # shared if all causes were mended
    differences: tuple[Difference, ...] = ()
    in_flight: StoredRequest | None = None  # could share more, but had not answered yet
    steps: tuple[WalkStep, ...] = ()
    end: tuple[int, int] = (0, 0)


class PredecessorFinder:
    """Matches the requests of a log in the order of their starts."""

    def __init__(self, corpus: Corpus, templates: Templates) -> None:
        self._corpus, self._templates = corpus, templates
        self._comparer = Comparer(corpus, templates)
        self._raw: dict[tuple[object, ...], UnitTree] = {}
        self._mended = UnitTree(corpus)
        # Of hashed prompts: the newest request that has each block, by what parts caches.
        self._newest_with_block: dict[tuple[object, ...], dict[int, int]] = {}
        self._newest: dict[tuple[object, ...], list[int]] = {}
        self._rank: dict[int, int] = {}
        self._pending: list[tuple[float, int]] = []
        self._routed = _models_with_versions(corpus)
        self._pending_chains: dict[int, dict[int, None]] = {}  # numbers in order of start

    @property
    def comparer(self) -> Comparer:
        """Compares any two requests in the way of the finder."""
        return self._comparer

    def matches(self, requests: Iterable[StoredRequest]) -> Iterator[Match]:
        """The match of each request, in the order of starts."""
        for rank, request in enumerate(sorted(requests, key=StoredRequest.start_key)):
            self._rank[request.number] = rank
            start = request.info.start_s
            while self._pending and (start is None or self._pending[0][0] <= start):
                self._insert(self._corpus.requests[heapq.heappop(self._pending)[1]])
            yield self._match(request)
            ready = _ready_s(request)
            if ready is None or start is None or ready <= start:
                self._insert(request)
            else:
                heapq.heappush(self._pending, (ready, request.number))
                if request.info.hashed is None:
                    self._note_pending(request)

    def _match(self, request: StoredRequest) -> Match:
        hashed = request.info.hashed
        if hashed is not None:
            return self._match_hashed(request, hashed)
        best: tuple[StoredRequest, Comparison] | None = None
        candidates = [self._corpus.requests[number] for number in self._candidates(request)]
        compared = [(earlier, self._comparer.compare(earlier, request)) for earlier in candidates]
        longest = max(
            (len(earlier.units) for earlier, item in compared if item.is_extension), default=0
        )
        # The conversation goes on from there: a shorter one with other messages is another branch.
        compared = [
            item
            for item in compared
            if len(item[0].units) > longest
            or not any(difference.is_waste_in_message for difference in item[1].differences)
        ]
        if compared:
            deepest = max(comparison.mended_tokens for _, comparison in compared)
            tied = [item for item in compared if item[1].mended_tokens >= deepest - PAGE_SIZE]
            if deepest < PAGE_SIZE:
                # Nothing is shared but the conversation that a summary goes on with.
                tied = [item for item in tied if item[1].differences] or tied
            best = self._longest(tied)
            # Of prefixes of one length the one that the request can read: of its tenant, key and model.
            readable = [
                item for item in tied if item[1].raw_tokens >= best[1].text_tokens - FEW_TOKENS
            ]
            best = self._longest(readable or tied)
        known = 0 if best is None else best[1].mended_tokens
        in_flight = self._in_flight(request, known + PAGE_SIZE)
        if best is None or not (best[1].mended_tokens or best[1].differences):
            return Match(request, None, in_flight=in_flight)
        earlier, comparison = best
        self._comparer.note_match(request, comparison)
        return Match(
            request,
            earlier,
            comparison.raw_tokens,
            comparison.mended_tokens,
            tuple(item.quoted() for item in comparison.differences),
            in_flight,
            comparison.steps,
            comparison.end,
        )

    def _match_hashed(self, request: StoredRequest, prompt: HashedPrompt) -> Match:
        """The newest of the requests with the longest prefix of whole blocks: equal ids, equal prefixes.

        Nothing can be mended without texts. What the last block has of its tokens is not known of both
        prompts.
        """
        newest = self._newest_with_block.get(_cache_of(request.info, prompt), {})
        holders = [newest[block] for block in takewhile(newest.__contains__, prompt.full_blocks)]
        if not holders:
            return Match(request, None)
        shared = len(holders) * prompt.block_size
        return Match(request, self._corpus.requests[holders[-1]], shared, shared)

    def _longest(
        self, compared: Sequence[tuple[StoredRequest, Comparison]]
    ) -> tuple[StoredRequest, Comparison]:
        """The one with the longest text as sent, of equals the newest."""
        return max(compared, key=lambda item: (item[1].text_tokens, self._rank[item[0].number]))

    # Candidates

    def _raw_keys(self, side: Side) -> list[tuple[object, ...]]:
        """The trees of a prompt: that of its cache scope and model, and that of equal texts in any."""
        info, settings = side.request.info, tuple(side.settings.items())
        version = info.response_model if info.model in self._routed else None
        if info.cache_scope or version:
            return [(info.cache_scope, version, settings), (None, None, settings)]
        return [(None, None, settings)]

    def _candidates(self, request: StoredRequest) -> list[int]:
        side = self._comparer.side(request)
        numbers: dict[int, None] = {}
        for tree in filter(None, map(self._raw.get, self._raw_keys(side))):
            for recent in reversed(tree.visit(side.prompt)[-2:]):
                numbers.update(dict.fromkeys(recent[:-3:-1]))
        for recent in reversed(self._mended.visit(self._mended_prompt(side))[-3:]):
            numbers.update(dict.fromkeys(recent[:-3:-1]))
        for key in self._keys_to_find(side):
            numbers.update(dict.fromkeys(self._newest.get(key, [])[:-3:-1]))
        return list(numbers)[:MAX_CANDIDATES]

    def _insert(self, request: StoredRequest) -> None:
        if request.info.hashed is not None:
            hashed = request.info.hashed
            self._newest_with_block.setdefault(_cache_of(request.info, hashed), {}).update(
                dict.fromkeys(hashed.full_blocks, request.number)
            )
            return
        side = self._comparer.side(request)
        self._drop_pending(request)
        for key in self._raw_keys(side):
            tree = self._raw.get(key)
            if tree is None:
                tree = self._raw[key] = UnitTree(self._corpus)
            tree.insert(side.prompt, request.number)
        self._mended.insert(self._mended_prompt(side), request.number)
        for key in self._keys_to_store(side):
            newest = self._newest.setdefault(key, [])
            newest.append(request.number)
            if len(newest) > NUM_NEWEST:
                del newest[0]

    def _mended_prompt(self, side: Side) -> Units:
        units = [
            self._templates.canonical(unit)
            for at, unit in enumerate(side.rest)
            if not side.is_reasoning(at)
        ]
        return np.array(units, np.uint32)

    def _own_keys(self, side: Side) -> Iterator[tuple[object, ...]]:
        """Keys under which a request is stored, and finds those before it."""
        yield ("tools", *sorted(self._templates.canonical(unit) for unit in side.tools))
        if side.request.info.conversation is not None:
            yield ("conversation", side.request.info.conversation)

    def _keys_to_store(self, side: Side) -> Iterator[tuple[object, ...]]:
        yield from self._own_keys(side)
        for normal in side.last_message:
            yield ("last", self._templates.canonical(normal))
            yield from self._lines(normal)
        if side.last_at and side.role(side.last_at) == "system":
            # A note at the end may stand at the top later: the message before it stays.
            yield ("last", self._templates.canonical(side.normals[side.last_at - 1]))

    def _keys_to_find(self, side: Side) -> Iterator[tuple[object, ...]]:
        yield from self._own_keys(side)
        older = [
            at
            for at in range(side.last_at - 1, -1, -1)
            if self._corpus.units[side.rest[at]].kind is SegmentKind.MESSAGE
            and not side.is_answer(at)
        ]
        for at in older[:4]:
            yield ("last", self._templates.canonical(side.normals[at]))
        for at in older[:2]:
            yield from self._lines(side.normals[at])

    def _lines(self, normal: int) -> Iterator[tuple[object, ...]]:
        stored = self._corpus.units[normal]
        if not stored.label.startswith("user"):
            return
        lines = {line for line in self._corpus.text(normal).split("\n") if len(line) >= 16}
        for line in sorted(lines, key=lambda line: (len(line), line))[-4:]:
            yield ("line", hash(line))

    # Requests in flight

    def _chains(self, request: StoredRequest) -> list[tuple[int, int]]:
        """Hash and tokens of each prefix of whole units, longest first."""
        side = self._comparer.side(request)
        chain, total, chains = 0, 0, []
        for unit in [*side.tools, *self._mended_prompt(side).tolist()]:
            chain = hash((chain, unit))
            total += self._corpus.units[unit].num_tokens
            chains.append((chain, total))
        return chains[::-1]

    def _note_pending(self, request: StoredRequest) -> None:
        for chain, _ in self._chains(request):
            self._pending_chains.setdefault(chain, {})[request.number] = None

    def _drop_pending(self, request: StoredRequest) -> None:
        if not self._pending_chains:
            return
        for chain, _ in self._chains(request):
            numbers = self._pending_chains.get(chain)
            if numbers and request.number in numbers:
                del numbers[request.number]
                if not numbers:
                    del self._pending_chains[chain]

    def _in_flight(self, request: StoredRequest, num_tokens: int) -> StoredRequest | None:
        """The newest request in flight that shares more than `num_tokens`."""
        if not self._pending_chains:
            return None
        for chain, total in self._chains(request):
            if total <= num_tokens:
                return None
            numbers = self._pending_chains.get(chain)
            if numbers:
                return self._corpus.requests[next(reversed(numbers))]
        return None


def _models_with_versions(corpus: Corpus) -> frozenset[str | None]:
    """Models that more than one model has answered for."""
    answered: dict[str | None, set[str]] = {}
    for request in corpus:
        if request.info.response_model is not None:
            answered.setdefault(request.info.model, set()).add(request.info.response_model)
    return frozenset(model for model, versions in answered.items() if len(versions) > 1)


def _cache_of(info: LoggedRequest, prompt: HashedPrompt) -> tuple[object, ...]:
    """Equal for hashed prompts that may share blocks."""
    return info.cache_scope, info.model, prompt.block_size


def _ready_s(request: StoredRequest) -> float | None:
    info = request.info
    if info.is_batch:
        return None
    return info.first_output_s if info.first_output_s is not None else info.end_s
