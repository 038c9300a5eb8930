"""What a simulation found, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ramify.analysis.simulation.replays.cache_replay import ReplayResult

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """The log as it was simulated."""

    num_requests: int
    num_tokens: int  # input tokens that the hit rates are shares of
    page_size: int
    num_references: int  # pages of all requests
    num_distinct_pages: int
    warm_up: float  # share of the requests that only fill the cache
    insert_outputs: bool
    is_exact: bool  # False: token counts are estimates
    has_times: bool
    num_without_prompt: int
    num_incomplete: int

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON."""
        return {
            "num_requests": self.num_requests,
            "input_tokens": self.num_tokens,
            "page_size": self.page_size,
            "page_references": self.num_references,
            "distinct_pages": self.num_distinct_pages,
            "warm_up": self.warm_up,
            "outputs_inserted": self.insert_outputs,
            "token_counts": "exact" if self.is_exact else "estimated",
            "has_times": self.has_times,
            "requests_without_prompt": self.num_without_prompt,
            "requests_with_cut_text": self.num_incomplete,
            "denominator": "all input tokens of the requests after the warm-up",
        }


@dataclass(frozen=True, slots=True)
class Simulation:
    """Hit rates as shares of all input tokens; capacities in tokens, lifetimes in seconds."""

    facts: TraceFacts
    policies: Mapping[str, Mapping[int, ReplayResult]]  # replays of `PrefixCache`
    one_pass_lru: Mapping[int, float]
    infinite: float
    belady: Mapping[int, float]
    ttl: Mapping[float, float]
    lru_points: tuple[tuple[int, float], ...] = ()  # the whole curve, thinned for a chart
    extra: Mapping[str, Any] = field(default_factory=dict)  # JSON of the parts asked for
    is_partial: bool = False  # interrupted: some parts are missing

    @property
    def curve(self) -> dict[str, dict[int, float]]:
        """Hit rate by policy and capacity."""
        return {
            policy: {capacity: result.hit_rate for capacity, result in results.items()}
            for policy, results in self.policies.items()
        }

    def to_json(self) -> dict[str, Any]:
        """The document of `ramify simulate --json`."""
        return {
            "schema": SCHEMA,
            "curve": {policy: _text_keys(rates) for policy, rates in self.curve.items()},
            "one_pass_lru": _text_keys(self.one_pass_lru),
            "infinite": self.infinite,
            "belady": _text_keys(self.belady),
            "ttl": _text_keys(self.ttl),
            "computed_tokens": {
                policy: {str(capacity): item.num_computed for capacity, item in results.items()}
                for policy, results in self.policies.items()
            },
            "lru_points": [list(point) for point in self.lru_points],
            "trace": self.facts.to_json(),
            "partial": self.is_partial,
            **self.extra,
        }


def _text_keys(rates: Mapping[int, float] | Mapping[float, float]) -> dict[str, float]:
    """`60.0` as the key `60`."""
    return {f"{key:.15g}": rate for key, rate in rates.items()}
