"""Replays prompts through the cache rules of their models."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from copy import copy
from dataclasses import replace

import msgspec

from ramify.analysis.corpus import Corpus, StoredRequest
from ramify.analysis.providers.caches.breakpoints import BreakpointCache
from ramify.analysis.providers.caches.page_cache import NoCache, PageCache
from ramify.analysis.providers.caches.page_pool import MIN_PAGE, ReplicaPools
from ramify.analysis.providers.caches.segment_cache import SegmentCache
from ramify.analysis.providers.conditions import AS_LOGGED, Conditions
from ramify.analysis.providers.detection import provider_of, provider_of_log
from ramify.analysis.providers.prompts import (
    UNTIMED,
    Prediction,
    PromptLayout,
    ReplayPrompt,
    RuleCache,
)
from ramify.analysis.providers.rules import ModelRule, Rules
from ramify.analysis.records import LoggedRequest
from ramify.errors import ConfigError


class CacheModel:
    """Which cache rule each request of a corpus falls under."""

    def __init__(
        self, corpus: Corpus, provider: str, rules: Rules, *, is_given: bool = True
    ) -> None:
        self.corpus, self.provider, self.rules = corpus, provider, rules
        self.capacity_tokens: int | None = None  # of each replica's cache of pages; None: no limit
        self._is_given = is_given
        self._rules: dict[tuple[str, str | None, float | None], ModelRule] = {}
        self._changed_rules: dict[tuple[int, str], ModelRule] = {}
        self._names: dict[int, str] = {}  # of models, by unit
        self._providers: dict[tuple[object, ...], str] = {}  # by what names them in a request
        self._usual_answerer = _usual_answerers(corpus)
        rules.rule_of(provider, None)  # an unknown provider is an error here

    @classmethod
    def of_log(cls, corpus: Corpus, rules: Rules) -> CacheModel:
        """Each request under the rule of its own provider; `provider` is that of most requests."""
        provider = provider_of_log(corpus, rules.providers)
        return cls(corpus, provider, rules, is_given=False)

    def with_capacity(self, capacity_tokens: int | None) -> CacheModel:
        """The same rules with caches of pages of this capacity; None: nothing is evicted.

        Raises:
            ConfigError: it holds no page, or no request falls under a rule of pages.
        """
        if capacity_tokens is not None and capacity_tokens < MIN_PAGE:
            raise ConfigError(
                f"capacity={capacity_tokens} tokens is less than a page of {MIN_PAGE}; give more, "
                "or leave it out: nothing is evicted then"
            )
        model = copy(self)
        model.capacity_tokens = capacity_tokens
        has_none = len(self.corpus) > 0 and not any(map(model.has_capacity, self.corpus))
        if capacity_tokens is not None and has_none:
            raise ConfigError(
                f"capacity={capacity_tokens} cannot be replayed: the rule of {self.provider} has "
                "lifetimes, not a capacity; leave --capacity out, or replay the log under an "
                "engine's rule with --provider vllm, sglang or ramify"
            )
        return model

    def has_capacity(self, request: StoredRequest) -> bool:
        """Whether a request falls under a rule of pages, to which the capacity applies."""
        return self._kind_of(request.info, self.rule_of(ReplayPrompt.of(request))) == "grid"

    def provider_of(self, info: LoggedRequest) -> str:
        """The provider whose rule a request falls under."""
        if self._is_given:
            return self.provider
        key = info.provider, info.response_model or info.model, info.api, info.hashed is None
        provider = self._providers.get(key)
        if provider is None:
            provider = self._providers[key] = (
                provider_of(info, self.rules.providers) or self.provider
            )
        return provider

    def rule_of(self, prompt: ReplayPrompt) -> ModelRule:
        """The rule of the model that a prompt asks for."""
        info = prompt.request.info
        key = self.provider_of(info), self.model_of(prompt), info.retention_s
        rule = self._rules.get(key)
        if rule is None:
            rule = _with_retention(self.rules.priced_rule_of(*key[:2]), info.retention_s)
            self._rules[key] = rule
        return rule

    def model_of(self, prompt: ReplayPrompt) -> str | None:
        """The model that a prompt asks for, which a mended prompt may have changed."""
        if not prompt.paths or prompt.paths[0] != "settings.model":
            return prompt.request.info.model
        unit = int(prompt.units[0])
        name = self._names.get(unit)
        if name is None:
            name = self._names[unit] = self.corpus.text(unit)
        return name

    def answered_by(self, prompt: ReplayPrompt) -> str | None:
        """The model that answered; where that is not known, the model that mostly does."""
        info, model = prompt.request.info, self.model_of(prompt)
        if info.response_model is not None and model == info.model:
            return info.response_model
        return self._usual_answerer.get(model)

    def layout(self, prompt: ReplayPrompt, conditions: Conditions = AS_LOGGED) -> PromptLayout:
        """A prompt as its rule sees it."""
        rule = self._rule_under(self.rule_of(prompt), conditions)
        answerer = self.answered_by(prompt)
        return PromptLayout(self.corpus, prompt, rule, answerer, conditions.ignored)

    def _rule_under(self, rule: ModelRule, conditions: Conditions) -> ModelRule:
        key = id(rule), conditions.lifetime
        changed = self._changed_rules.get(key)
        if changed is None:
            changed = self._changed_rules[key] = conditions.rule(rule)
        return changed

    def replay(
        self, prompts: Iterable[ReplayPrompt], conditions: Conditions = AS_LOGGED
    ) -> list[Prediction]:
        """What each prompt reads and writes; prompts in the order of their starts."""
        caches: dict[tuple[str, int], RuleCache] = {}
        pools = self._pools(conditions)
        predictions, numbers = [], []
        for prompt in prompts:
            info = prompt.request.info
            layout = self.layout(prompt, conditions)
            kind = self._kind_of(info, layout.rule)
            cache = caches.get((kind, id(layout.rule)))
            if cache is None:
                cache = caches[kind, id(layout.rule)] = self._cache(kind, layout.rule, pools)
            predictions.append(cache.process(layout, conditions.timing(info)))
            numbers.append(prompt.request.number)
        unread: dict[int, int] = {}
        for cache in caches.values():
            unread.update(cache.unread_tokens())
        return [
            replace(prediction, num_unread=unread[number]) if number in unread else prediction
            for prediction, number in zip(predictions, numbers, strict=True)
        ]

    def shared_as_sent(self) -> dict[int, int]:
        """Tokens of the longest prefix that any earlier request has too, by the request's number.

        An infinite cache of steps of `MIN_PAGE` tokens without times or replicas: only settings, keys
        and scopes that lose the cache part prompts. Answers are read where the rule stores them.
        """
        bare: dict[int, PageCache] = {}
        shared = {}
        for prompt in prompts_of(self.corpus):
            rule = self.rule_of(prompt)
            cache = bare.get(id(rule))
            if cache is None:
                cache = bare[id(rule)] = PageCache(without_limits(rule))
            layout = PromptLayout(
                self.corpus, prompt, rule, ignored=frozenset({"replica", "model"})
            )
            shared[prompt.request.number] = cache.process(layout, UNTIMED).billed.num_read
        return shared

    def _cache(self, kind: str, rule: ModelRule, pools: ReplicaPools | None) -> RuleCache:
        """An empty cache of a kind: grid, breakpoints, units or none."""
        if kind == "grid":
            return PageCache(rule, pools)
        if kind == "breakpoints":
            return BreakpointCache(self.corpus, rule)
        return SegmentCache(rule) if kind == "units" else NoCache(rule)

    def _pools(self, conditions: Conditions) -> ReplicaPools | None:
        if self.capacity_tokens is None:
            return None
        is_merged = "replica" in conditions.ignored
        num_replicas = len({request.info.replica for request in self.corpus})
        return ReplicaPools(self.capacity_tokens, num_replicas if is_merged else 0)

    @staticmethod
    def _kind_of(info: LoggedRequest, rule: ModelRule) -> str:
        """Of a hashed prompt only the ids of blocks are known: it is cached in pages."""
        return "grid" if info.hashed is not None and rule.cache != "none" else rule.cache


def without_limits(rule: ModelRule) -> ModelRule:
    """The rule of a cache that keeps every page for ever, with the same settings and keys."""
    return msgspec.structs.replace(
        rule,
        cache="grid",
        min_tokens=0,
        step_tokens=MIN_PAGE,
        computes_last_token=False,
        lifetimes_s=(),
    )


def _with_retention(rule: ModelRule, retention_s: float | None) -> ModelRule:
    """The rule for requests that ask for one of its lifetimes; where it is not on offer, the usual."""
    if retention_s not in rule.lifetimes_s[1:]:
        return rule
    low, high = rule.lifetime_high_s, retention_s  # longer than without, up to what is asked for
    return msgspec.structs.replace(
        rule, lifetimes_s=(retention_s,), lifetime_low_s=low, lifetime_high_s=high
    )


def _usual_answerers(corpus: Corpus) -> dict[str | None, str]:
    """The model that mostly answers when a model is asked for."""
    counts: dict[str | None, Counter[str]] = defaultdict(Counter)
    for request in corpus:
        if request.info.response_model is not None:
            counts[request.info.model][request.info.response_model] += 1
    return {model: names.most_common(1)[0][0] for model, names in counts.items()}


def in_start_order(prompts: Iterable[ReplayPrompt]) -> list[ReplayPrompt]:
    """Prompts by start where it is logged, else by line."""
    return sorted(prompts, key=lambda prompt: prompt.request.start_key())


def prompts_of(corpus: Corpus) -> list[ReplayPrompt]:
    """The prompts of a corpus as they were sent, in the order of their starts."""
    return in_start_order(map(ReplayPrompt.of, corpus))
