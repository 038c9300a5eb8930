"""What a cache rule sees of a prompt, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.corpus import Corpus, StoredRequest
from ramify.analysis.providers.rules import ModelRule
from ramify.analysis.records import LoggedRequest, SegmentKind, TextForm
from ramify.analysis.tokens import Tokens, spread_ids

WHOLE = (1 << 64) - 1
SPLITS = frozenset({"replica", "key", "model"})  # what splits a cache beside the prompt


@dataclass(frozen=True, slots=True)
class ReplayPrompt:
    """A prompt to replay: a request's own, or the request's mended."""

    request: StoredRequest
    units: NDArray[np.uint32]  # [segments]
    paths: tuple[str, ...]  # [segments]
    breakpoints: tuple[tuple[int, float], ...]  # segment, lifetime in seconds

    @classmethod
    def of(cls, request: StoredRequest) -> ReplayPrompt:
        """The prompt as it was sent."""
        return cls(request, request.units, request.paths, request.breakpoints)


@dataclass(frozen=True, slots=True)
class Billed:
    """Tokens of a request by a cache rule; `num_input` has reads and writes in it."""

    num_input: int
    num_read: int
    num_written: int = 0  # where writes are billed
    num_written_1h: int = 0  # of those, with a lifetime of an hour
    money: float | None = None  # US dollars for the input; None: no price is known

    @property
    def num_ordinary(self) -> int:
        """Tokens at the price of input."""
        return self.num_input - self.num_read - self.num_written


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a request reads and writes by the rule, and why it reads no more.

    The `read_if_` counts are what it would read if one restriction were lifted, at least `num_read`.
    """

    billed: Billed
    segment: int = -1  # the last one that is read whole or in part; -1: none
    read_if_ready: int = 0  # if entries of requests in flight could be read
    read_if_kept: int = 0  # if entries did not expire
    read_if_in_reach: int = 0  # if a breakpoint looked back without limit
    read_if_long_enough: int = 0  # without a minimum
    read_if_marked: int = 0  # if all segments of earlier prompts ended in a breakpoint
    read_if_resident: int = 0  # if a cache of finite capacity had evicted nothing
    in_flight: int | None = None  # number of the request whose entry was not ready
    expired: int | None = None  # number of the request whose entry has expired
    read_from: int | None = None  # number of the request that wrote the deepest entry read
    num_unread: int = 0  # of the written tokens, those that no later request reads


@dataclass(frozen=True, slots=True)
class Timing:
    """When a request looks entries up, and when its own can be read; infinite where unknown."""

    lookup_s: float | None  # None: not known
    ready_s: float  # entries of the prompt
    done_s: float  # entries of the answer

    @classmethod
    def of(cls, info: LoggedRequest) -> Timing:
        """By start, first output and end, as far as they are logged."""
        if info.start_s is None or info.is_batch:
            return UNTIMED
        ready = first_known(info.first_output_s, info.end_s, info.start_s)
        return cls(info.start_s, ready, first_known(info.end_s, ready))

    def since(self, earlier: LoggedRequest) -> float | None:
        """Seconds between an earlier request's end and this look-up; None if they are not known."""
        before = Timing.of(earlier)
        if self.lookup_s is None or before.lookup_s is None:
            return None
        return self.lookup_s - before.done_s

    @property
    def of_answer(self) -> Timing:
        """The times of an entry that ends with the answer."""
        return replace(self, ready_s=self.done_s)

    @property
    def used_s(self) -> float:
        """When the prompt uses entries; infinite where that is not known."""
        return inf if self.lookup_s is None else self.lookup_s

    @property
    def written_s(self) -> float:
        """When the lifetime of the prompt's own entries begins; infinite where that is not known."""
        return inf if self.lookup_s is None else self.ready_s

    def is_ready(self, ready_s: float) -> bool:
        """Whether an entry that is ready at a time can be read."""
        return self.lookup_s is None or ready_s <= self.lookup_s

    def is_kept(self, expiry_s: float) -> bool:
        """Whether an entry that expires at a time can be read."""
        return self.lookup_s is None or self.lookup_s < expiry_s


UNTIMED = Timing(None, -inf, -inf)


def first_known(*times: float | None) -> float:
    """The first time that is not None."""
    return next(time for time in times if time is not None)


@dataclass(frozen=True)
class PromptLayout:
    """A prompt without settings, in the vendor's order; settings become salts of hashes."""

    corpus: Corpus
    prompt: ReplayPrompt
    rule: ModelRule
    answered_by: str | None = None  # the model that answered
    ignored: frozenset[str] = frozenset()  # "scope", or of `SPLITS`: what does not split the cache

    @cached_property
    def num_settings(self) -> int:
        """Segments before the first tool, system or message."""
        units = self.corpus.units
        kinds = (units[unit].kind for unit in self.prompt.units.tolist())
        return sum(1 for _ in takewhile(lambda kind: kind is SegmentKind.SETTING, kinds))

    @cached_property
    def units(self) -> NDArray[np.uint32]:
        """[content] units of tools, system and messages."""
        return self.prompt.units[self.num_settings :]

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """[content + 1] tokens before each content segment, and after the last."""
        ends = np.zeros(len(self.units) + 1, np.int64)
        np.cumsum(self.corpus.lengths_of(self.units), out=ends[1:])
        return ends

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt without settings."""
        hashed = self.prompt.request.info.hashed
        return int(self.ends[-1]) if hashed is None else hashed.num_tokens

    @property
    def stores_output(self) -> bool:
        """Whether the answer is logged, and cached by the rule."""
        return self.rule.stores_output and bool(self.prompt.request.info.output)

    @cached_property
    def level_starts(self) -> dict[str, int]:
        """First content segment of `system` and of `messages`; the level `all` starts at 0."""
        kinds = [self.corpus.units[unit].kind for unit in self.units.tolist()]
        return {
            "system": _index(kinds, (SegmentKind.SYSTEM, SegmentKind.MESSAGE)),
            "messages": _index(kinds, (SegmentKind.MESSAGE,)),
        }

    @cached_property
    def salts(self) -> dict[str, int]:
        """Hash of the settings, scope and images that lose the cache from each level on."""
        info, rule = self.prompt.request.info, self.rule
        parts: dict[str, list[object]] = {"all": [], "system": [], "messages": []}
        if "scope" not in self.ignored:
            parts["all"].append(info.cache_scope)
        for unit, path in zip(self.prompt.units.tolist(), self.prompt.paths, strict=True):
            if not path.startswith("settings."):
                break
            level = rule.settings.get(path.removeprefix("settings."), "none")
            if level != "none":
                parts[level].append((path, unit))
        if "replica" not in self.ignored:
            parts["all"].append(info.replica)
        if "model" not in self.ignored:
            parts["all"].append(self.answered_by)
        if rule.key_isolates and "key" not in self.ignored:
            parts["all"].append(info.cache_key)
        if rule.images_reset_messages and self._has_image():
            parts["messages"].append("image")
        return {level: hash(tuple(part)) & WHOLE if part else 0 for level, part in parts.items()}

    def _has_image(self) -> bool:
        corpus = self.corpus
        return any(
            corpus.units[unit].form is TextForm.MEDIA
            and corpus.text(unit).startswith(("image", "input_image"))
            for unit in self.units.tolist()
        )

    def _salt(self, hashes: Tokens, place: Callable[[int], int]) -> Tokens:
        """Salt hashes of prefixes of 0, 1, … items, in place, from the first item of each level on.

        Args:
            hashes: of the prefixes.
            place: items before a content segment.
        """
        hashes ^= np.uint64(self.salts["all"])
        for level in ("system", "messages"):
            if salt := self.salts[level]:
                hashes[place(self.level_starts[level]) + 1 :] ^= np.uint64(salt)
        return hashes

    @cached_property
    def chain(self) -> Tokens:
        """[content + 1] hashes of the prefixes that end with a segment, the empty one first."""
        keys = self.corpus.keys_of(self.units)
        return self._salt(self.corpus.hasher.prefix_hashes(keys), lambda segment: segment)

    @cached_property
    def token_chain(self) -> Tokens:
        """[num_tokens + 1] hashes of all prefixes of the prompt's tokens."""
        return self._hash_tokens(self.units.tolist())

    @cached_property
    def token_chain_with_output(self) -> Tokens:
        """[num_tokens + output + 1] hashes of all prefixes of prompt and answer."""
        output = [self.corpus.unit_of(segment) for segment in self.prompt.request.info.output]
        return self._hash_tokens(self.units.tolist() + output)

    def _hash_tokens(self, units: list[int]) -> Tokens:
        arrays = [self.corpus.tokens(unit) for unit in units]
        tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.uint64)
        hashes = self.corpus.hasher.prefix_hashes(tokens)
        return self._salt(hashes, lambda segment: int(self.ends[segment]))

    @cached_property
    def block_chain(self) -> Tokens:
        """[full blocks + 1] hashes of the prefixes of a hashed prompt."""
        hashed = self.prompt.request.info.hashed
        assert hashed is not None
        ids = spread_ids(np.array(hashed.full_blocks, np.int64))
        return self._salt(np.concatenate([np.zeros(1, np.uint64), ids]), lambda _: 0)

    def copy(self) -> PromptLayout:
        """The same without what was computed, which may be large."""
        return replace(self)

    @cached_property
    def breakpoints(self) -> tuple[tuple[int, float], ...]:
        """Content segment and lifetime of each breakpoint, in order."""
        first = self.num_settings
        return tuple(
            sorted((at - first, ttl) for at, ttl in self.prompt.breakpoints if at >= first)
        )

    def segment_at(self, num_tokens: int) -> int:
        """Segment of the prompt, settings counted, in which its first `num_tokens` tokens end."""
        if not num_tokens or not len(self.units):
            return -1
        return self.num_settings + int(np.searchsorted(self.ends, num_tokens)) - 1


class RuleCache(Protocol):
    """The entries of one rule while prompts are replayed, in the order of their starts."""

    def process(self, layout: PromptLayout, timing: Timing) -> Prediction:
        """Look a prompt up, then write and refresh entries."""
        ...

    def unread_tokens(self) -> dict[int, int]:
        """Tokens that requests wrote at a price and no later request read, by the request's number."""
        return {}


def _index(kinds: list[SegmentKind], wanted: Collection[SegmentKind]) -> int:
    return next((at for at, kind in enumerate(kinds) if kind in wanted), len(kinds))
