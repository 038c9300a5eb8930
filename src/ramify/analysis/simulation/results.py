"""What a simulation found, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ramify.analysis.simulation.replays.cache_replay import ReplayResult

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """The log as it was simulated; the fields are those of the JSON."""

    num_requests: int
    input_tokens: int  # that the hit rates are shares of
    page_size: int
    page_references: int  # pages of all requests
    distinct_pages: int
    warm_up: float  # share of the requests that only fill the cache
    outputs_inserted: bool
    token_counts: str  # exact or estimated
    has_times: bool
    requests_without_prompt: int
    requests_with_cut_text: int
    denominator: str = "all input tokens of the requests after the warm-up"


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
            "trace": asdict(self.facts),
            "partial": self.is_partial,
            **self.extra,
        }


def _text_keys(rates: Mapping[int, float] | Mapping[float, float]) -> dict[str, float]:
    """`60.0` as the key `60`."""
    return {f"{key:.15g}": rate for key, rate in rates.items()}
