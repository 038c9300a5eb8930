"""Conditions under which prompts are replayed: as logged, or with a restriction lifted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from ramify.analysis.providers.prompts import Timing
from ramify.analysis.providers.rules import ModelRule
from ramify.analysis.records import LoggedRequest

Lifetime = Literal["usual", "low", "high", "longest"]


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a replay takes for granted.

    `ignored` may name "replica", "key", "model" (that answered) and "scope": what then does not split
    the cache. `lifetime` is the rule's usual one, the ends of the vendor's range, or the longest on
    offer. `waits` makes entries readable as soon as their request starts: later requests wait for it.
    """

    ignored: frozenset[str] = frozenset()
    lifetime: Lifetime = "usual"
    waits: bool = False

    def rule(self, rule: ModelRule) -> ModelRule:
        """The rule with the chosen lifetime."""
        chosen: float | None = None
        if self.lifetime == "low":
            chosen = rule.lifetime_low_s
        elif self.lifetime == "high":
            chosen = rule.lifetime_high_s
        elif self.lifetime == "longest":
            chosen = max(rule.lifetimes_s, default=None)
        return rule if chosen is None else msgspec.structs.replace(rule, lifetimes_s=(chosen,))

    def timing(self, info: LoggedRequest) -> Timing:
        """When a request looks up and is ready."""
        timing = Timing.of(info)
        if self.waits and timing.lookup_s is not None:
            return replace(timing, ready_s=timing.lookup_s)
        return timing


AS_LOGGED = Conditions()
