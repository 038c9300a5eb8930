"""`simulate`: every curve and bound of a log in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ramify.analysis.simulation.bounds import belady, ttl_curve
from ramify.analysis.simulation.capacities import (
    DEFAULT_CAPACITIES,
    DEFAULT_LIFETIMES_S,
    validate_capacities,
)
from ramify.analysis.simulation.page_trace import PageTrace
from ramify.analysis.simulation.replay import ReplayResult, replay
from ramify.analysis.simulation.results import Simulation, TraceFacts
from ramify.analysis.simulation.reuse import ReuseRuns
from ramify.analysis.simulation.sources import TraceSource
from ramify.analysis.simulation.stack_distances import lru_curve
from ramify.cache import POLICIES
from ramify.errors import ConfigError

Progress = Callable[[str, int, int], None]  # part, requests done, requests in all


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """What to simulate."""

    capacities: tuple[int, ...] = DEFAULT_CAPACITIES  # tokens
    policies: tuple[str, ...] = ("lru", "auto")
    lifetimes_s: tuple[float, ...] = DEFAULT_LIFETIMES_S
    warm_up: float = 0.0  # share of the requests that fill the cache and are not counted

    def validate(self, page_size: int) -> None:
        """Raise ConfigError for what cannot be simulated."""
        validate_capacities(self.capacities, page_size)
        for policy in self.policies:
            if policy not in POLICIES:
                raise ConfigError(
                    f"policy={policy!r} is unknown; the policies are {', '.join(sorted(POLICIES))}"
                )
        if not 0 <= self.warm_up < 1:
            raise ConfigError(f"warm_up={self.warm_up} but it must be a share of 0 to below 1")
        for lifetime in self.lifetimes_s:
            if not lifetime > 0:
                raise ConfigError(f"ttl={lifetime} but a time to live is more than 0 seconds")


@dataclass(slots=True)
class _Parts:
    """Results so far; an interrupt leaves those that are complete."""

    policies: dict[str, dict[int, ReplayResult]] = field(default_factory=dict)
    one_pass_lru: dict[int, float] = field(default_factory=dict)
    infinite: float = 0.0
    belady: dict[int, float] = field(default_factory=dict)
    ttl: dict[float, float] = field(default_factory=dict)
    lru_points: tuple[tuple[int, float], ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


def simulate_trace(
    source: TraceSource,
    options: SimulationOptions,
    *,
    insert_outputs: bool = False,
    progress: Progress | None = None,
) -> Simulation:
    """Simulate all that the options name; Ctrl-C ends with the parts that are complete.

    Raises:
        ConfigError: an option is not possible for this trace.
    """
    trace = source.trace
    options.validate(trace.page_size)
    first_counted = int(options.warm_up * len(trace))
    facts = TraceFacts(
        num_requests=len(trace),
        num_tokens=int(trace.num_tokens[first_counted:].sum()),
        page_size=trace.page_size,
        num_references=len(trace.page_ids),
        num_distinct_pages=num_distinct(trace),
        warm_up=options.warm_up,
        insert_outputs=insert_outputs,
        is_exact=source.is_exact,
        has_times=trace.has_times,
        num_without_prompt=source.num_without_prompt,
        num_incomplete=source.num_incomplete,
    )
    parts, is_partial = _Parts(), False
    try:
        _simulate(trace, options, first_counted, parts, progress)
    except KeyboardInterrupt:
        is_partial = True
    return Simulation(
        facts=facts,
        policies=parts.policies,
        one_pass_lru=parts.one_pass_lru,
        infinite=parts.infinite,
        belady=parts.belady,
        ttl=parts.ttl,
        lru_points=parts.lru_points,
        extra=parts.extra,
        is_partial=is_partial,
    )


def _simulate(
    trace: PageTrace,
    options: SimulationOptions,
    first_counted: int,
    parts: _Parts,
    progress: Progress | None,
) -> None:
    capacities = sorted(set(options.capacities))
    report = progress or (lambda _part, _done, _all: None)
    report("stack distances", 0, 1)
    reuse = ReuseRuns.of(trace)
    curve = lru_curve(reuse, first_counted=first_counted)
    parts.infinite = curve.infinite
    parts.one_pass_lru = {capacity: curve.hit_rate(capacity) for capacity in capacities}
    parts.lru_points = tuple(curve.points())
    if trace.has_times:
        parts.ttl = ttl_curve(reuse, options.lifetimes_s, first_counted=first_counted)
    report("stack distances", 1, 1)
    for done, capacity in enumerate(capacities):
        report("Belady", done, len(capacities))
        parts.belady[capacity] = belady(reuse, capacity, first_counted=first_counted)
    report("Belady", len(capacities), len(capacities))
    for policy in dict.fromkeys(options.policies):
        results = parts.policies.setdefault(policy, {})
        for done, capacity in enumerate(capacities):
            before = done * len(trace)

            def advance(request: int, before: int = before, policy: str = policy) -> None:
                report(policy, before + request, len(capacities) * len(trace))

            results[capacity] = replay(
                trace, capacity, policy, first_counted=first_counted, progress=advance
            )
        report(policy, 1, 1)


def num_distinct(trace: PageTrace) -> int:
    """Pages that the trace refers to, each once."""
    is_used = np.zeros(trace.num_ids, np.bool_)
    is_used[trace.page_ids] = True
    return int(is_used.sum())
