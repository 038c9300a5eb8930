"""The cache of whole units: a stored unit is read whole or not at all.

DeepSeek stores a unit up to the end of the user's input, one up to the end of the answer, and one up to
where a prompt parts from an earlier prompt, once the two have been seen.
"""

from __future__ import annotations

from math import inf

import numpy as np

from ramify.analysis.prefix_index import PrefixIndex
from ramify.analysis.prefix_table import PrefixTable
from ramify.analysis.providers.money import price_of
from ramify.analysis.providers.prompts import Billed, Prediction, PromptLayout, RuleCache, Timing
from ramify.analysis.providers.rules import ModelRule
from ramify.analysis.tokens import Tokens


class SegmentCache(RuleCache):
    """Units of one rule; prompts come in the order of their starts."""

    def __init__(self, rule: ModelRule) -> None:
        self._rule = rule
        self._lifetime_s = rule.lifetime_s or inf
        self._units = PrefixTable()
        self._prefixes = PrefixIndex(rule.step_tokens, self._lifetime_s, stride=rule.step_tokens)

    def process(self, layout: PromptLayout, timing: Timing) -> Prediction:
        """Look a prompt up, then store its units."""
        request, step = layout.prompt.request, self._rule.step_tokens
        hashes = layout.token_chain
        num_input = len(hashes) - 1
        deepest = self._search(hashes, timing)
        read, if_ready, if_kept = (self._readable(length) for length, _ in deepest)
        shared = self._prefixes.share(request.number, hashes, timing)
        ready = deepest[0][0]
        self._store(hashes, num_input, request.number, timing)
        if shared.read > ready:
            self._store(hashes, shared.read, request.number, timing)
        if ready:
            slots = self._units.find(hashes[ready : ready + 1])
            self._units.used_s[slots] = np.maximum(self._units.used_s[slots], timing.used_s)
        if layout.stores_output:
            answered = layout.token_chain_with_output
            self._store(answered, len(answered) - 1, request.number, timing.of_answer)
        return Prediction(
            price_of(Billed(num_input, read), self._rule, request.info),
            segment=layout.segment_at(read),
            read_if_ready=max(read, if_ready),
            read_if_kept=max(read, if_kept),
            read_if_in_reach=read,
            read_if_long_enough=ready // step * step,
            read_if_marked=max(read, self._readable(shared.read)),
            read_if_resident=read,
            in_flight=deepest[1][1] if if_ready > read else None,
            expired=deepest[2][1] if if_kept > read else None,
            read_from=deepest[0][1] if read else None,
        )

    def _readable(self, length: int) -> int:
        tokens = length // self._rule.step_tokens * self._rule.step_tokens
        return tokens if tokens >= self._rule.min_tokens else 0

    def _search(
        self, hashes: Tokens, timing: Timing
    ) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Length and writer of the deepest unit: readable; were all ready; did none expire."""
        read = if_ready = if_kept = (0, -1)
        units = self._units
        slots = units.find(hashes[1:])
        for place in np.flatnonzero(slots >= 0)[::-1].tolist():
            slot = slots[place]
            unit = place + 1, int(units.writer[slot])
            is_ready = timing.is_ready(units.ready_s[slot])
            is_kept = timing.is_kept(units.used_s[slot] + self._lifetime_s)
            if is_kept and not if_ready[0]:
                if_ready = unit
            if is_ready and not if_kept[0]:
                if_kept = unit
            if is_ready and is_kept:
                read = unit
                break
        return read, if_ready, if_kept

    def _store(self, hashes: Tokens, length: int, number: int, timing: Timing) -> None:
        units, key = self._units, hashes[length : length + 1]
        (slot,) = units.find(key).tolist()
        if slot < 0:
            (slot,) = units.insert(key).tolist()
        elif timing.is_kept(units.used_s[slot] + self._lifetime_s):
            units.ready_s[slot] = min(units.ready_s[slot], timing.ready_s)
            units.used_s[slot] = max(units.used_s[slot], timing.used_s)
            return
        units.ready_s[slot], units.used_s[slot] = timing.ready_s, timing.written_s
        units.writer[slot] = number
