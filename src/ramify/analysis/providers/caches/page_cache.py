"""The cache of a grid: all whole steps of earlier prompts can be read, up to the first difference.

Older models of OpenAI have steps of 128 tokens from 1,024 on; vLLM, SGLang and Ramify have pages.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ramify.analysis.prefix_index import PrefixIndex, Shared
from ramify.analysis.providers.caches.page_pool import MIN_PAGE, ReplicaPools
from ramify.analysis.providers.money import price_of
from ramify.analysis.providers.prompts import Billed, Prediction, PromptLayout, RuleCache, Timing
from ramify.analysis.providers.rules import ModelRule
from ramify.analysis.tokens import Tokens


class PageCache(RuleCache):
    """Pages of one rule; prompts come in the order of their starts."""

    def __init__(self, rule: ModelRule, pools: ReplicaPools | None = None) -> None:
        self._rule, self._pools = rule, pools
        self._lifetime_s = rule.lifetime_s or inf
        self._prompts: dict[int, tuple[PromptLayout, Timing]] = {}
        self._tokens = PrefixIndex(rule.step_tokens, self._lifetime_s, self._token_hashes)
        self._blocks: dict[int, PrefixIndex] = {}  # of hashed prompts, by the size of a block

    def process(self, layout: PromptLayout, timing: Timing) -> Prediction:
        """Look a prompt up, then store and refresh its pages."""
        request = layout.prompt.request
        self._prompts[request.number] = layout.copy(), timing
        if request.info.hashed is None:
            step, shared = self._rule.step_tokens, self._share_tokens(layout, timing)
        else:
            step, shared = request.info.hashed.block_size, self._share_blocks(layout, timing)
        num_input = layout.num_tokens
        limit = (num_input - self._rule.computes_last_token) // step * step
        least = self._rule.min_tokens

        def readable(num_shared: int) -> int:
            tokens = min(num_shared, limit)
            return tokens if tokens >= least else 0

        if_resident = readable(shared.read)
        if self._pools is not None:
            shared = self._clip(shared, layout, timing, self._pools)
        num_read = readable(shared.read)
        return Prediction(
            price_of(Billed(num_input, num_read), self._rule, request.info),
            segment=layout.segment_at(num_read),
            read_if_ready=readable(shared.if_ready),
            read_if_kept=readable(shared.if_kept),
            read_if_in_reach=num_read,
            read_if_long_enough=min(shared.read, limit),
            read_if_marked=num_read,
            read_if_resident=if_resident,
            in_flight=shared.in_flight,
            expired=shared.expired,
            read_from=shared.writer if num_read else None,
        )

    def _share_tokens(self, layout: PromptLayout, timing: Timing) -> Shared:
        number = layout.prompt.request.number
        goes_on = layout.stores_output
        shared = self._tokens.share(number, layout.token_chain, timing, will_go_on=goes_on)
        if goes_on:
            self._tokens.share(number, layout.token_chain_with_output, timing.of_answer)
        return shared

    def _clip(
        self, shared: Shared, layout: PromptLayout, timing: Timing, pools: ReplicaPools
    ) -> Shared:
        """What is shared, as far as a cache of finite capacity keeps it; the request's pages enter it."""
        info = layout.prompt.request.info
        if info.hashed is None:
            step = self._rule.step_tokens
            page_size = max(step, MIN_PAGE // step * step)
            keys = layout.token_chain[page_size::page_size]
            num_lookup = len(keys)
            if layout.stores_output:
                keys = layout.token_chain_with_output[page_size::page_size]
        else:
            page_size, keys = info.hashed.block_size, layout.block_chain[1:]
            num_lookup = len(keys)
        resident = pools.pool_of(info).use(keys, page_size, num_lookup, timing)
        return replace(
            shared,
            read=resident.clip(shared.read),
            if_ready=resident.clip_if_ready(shared.if_ready),
            if_kept=resident.clip(shared.if_kept),
        )

    def _token_hashes(self, number: int) -> tuple[Tokens, Timing]:
        """Hashes of a prompt with its answer; the times are those of the last part."""
        layout, timing = self._prompts[number]
        layout = layout.copy()
        if layout.stores_output:
            return layout.token_chain_with_output, timing.of_answer
        return layout.token_chain, timing

    def _share_blocks(self, layout: PromptLayout, timing: Timing) -> Shared:
        hashed = layout.prompt.request.info.hashed
        assert hashed is not None
        size = hashed.block_size
        index = self._blocks.get(size)
        if index is None:
            index = self._blocks[size] = PrefixIndex(1, self._lifetime_s, stride=1)
        shared = index.share(layout.prompt.request.number, layout.block_chain, timing)
        return replace(
            shared,
            read=shared.read * size,
            if_ready=shared.if_ready * size,
            if_kept=shared.if_kept * size,
        )


class NoCache(RuleCache):
    """Models without a prompt cache: every token is computed."""

    def __init__(self, rule: ModelRule) -> None:
        self._rule = rule

    def process(self, layout: PromptLayout, timing: Timing) -> Prediction:  # noqa: ARG002
        """Nothing is read."""
        counts = Billed(layout.num_tokens, 0)
        return Prediction(price_of(counts, self._rule, layout.prompt.request.info))
