"""The cache of segments: a stored unit is read whole or not at all.

DeepSeek stores a unit up to the end of the user's input, one up to the end of the answer, and one up to
where a prompt parts from an earlier prompt, once the two have been seen.
"""

from __future__ import annotations

from math import inf

import numpy as np

from ramify.analysis.prefix_index import Depth, Flags, PrefixIndex, PrefixTable, Shared
from ramify.analysis.providers.money import price_of
from ramify.analysis.providers.prompts import Billed, Prediction, PromptLayout, RuleCache, Timing
from ramify.analysis.providers.rules import ModelRule
from ramify.analysis.tokens import Tokens


class SegmentCache(RuleCache):
    """Units of one rule; prompts come in the order of their starts."""

    def __init__(self, rule: ModelRule) -> None:
        self._rule = rule
        lifetime_s = rule.lifetime_s or inf
        self._units = PrefixTable(lifetime_s)
        self._prefixes = PrefixIndex(rule.step_tokens, lifetime_s, stride=rule.step_tokens)

    def process(self, layout: PromptLayout, timing: Timing) -> Prediction:
        """Look a prompt up, then store its units."""
        request, step = layout.prompt.request, self._rule.step_tokens
        hashes = layout.token_chain
        num_input = len(hashes) - 1
        unit = self._search(hashes, timing)
        read, if_ready, if_kept = map(self._readable, (unit.read, unit.if_ready, unit.if_kept))
        common = self._prefixes.share(request.number, hashes, timing).read
        self._store(hashes, num_input, timing, request.number)
        if common > unit.read:
            self._store(hashes, common, timing, request.number)
        if unit.read:
            slots = self._units.find(hashes[unit.read : unit.read + 1])
            self._units.used_s[slots] = np.maximum(self._units.used_s[slots], timing.used_s)
        if layout.stores_output:
            answered = layout.token_chain_with_output
            self._store(answered, len(answered) - 1, timing.of_answer, request.number)
        return Prediction(
            price_of(Billed(num_input, read), self._rule, request.info),
            segment=layout.segment_at(read),
            read_if_ready=max(read, if_ready),
            read_if_kept=max(read, if_kept),
            read_if_in_reach=read,
            read_if_long_enough=unit.read // step * step,
            read_if_marked=max(read, self._readable(common)),
            read_if_resident=read,
            in_flight=unit.in_flight if if_ready > read else None,
            expired=unit.expired if if_kept > read else None,
            read_from=unit.writer if read else None,
        )

    def _readable(self, length: int) -> int:
        tokens = length // self._rule.step_tokens * self._rule.step_tokens
        return tokens if tokens >= self._rule.min_tokens else 0

    def _search(self, hashes: Tokens, timing: Timing) -> Shared:
        """The deepest unit of the prompt."""
        slots = self._units.find(hashes[1:])
        lengths = np.flatnonzero(slots >= 0) + 1
        slots = slots[lengths - 1]
        is_ready = self._units.is_ready(slots, timing)
        is_kept = self._units.is_kept(slots, timing)

        def deepest(is_alive: Flags) -> Depth:
            places = np.flatnonzero(is_alive)
            if not len(places):
                return Depth()
            return Depth(int(lengths[places[-1]]), int(self._units.writer[slots[places[-1]]]))

        return Shared.of(deepest(is_ready & is_kept), deepest(is_kept), deepest(is_ready))

    def _store(self, hashes: Tokens, length: int, timing: Timing, number: int) -> None:
        key = hashes[length : length + 1]
        self._units.touch(key, self._units.find(key), timing, number)
