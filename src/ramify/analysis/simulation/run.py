"""`simulate`: every curve and bound of a log in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ramify.analysis.simulation.capacities import (
    DEFAULT_CAPACITIES,
    DEFAULT_LIFETIMES_S,
    validate_capacities,
)
from ramify.analysis.simulation.curves.bounds import belady, ttl_curve
from ramify.analysis.simulation.curves.reuse import ReuseRuns
from ramify.analysis.simulation.curves.routing import (
    perfect_routing,
    random_routing,
    reorder_by_prefix,
)
from ramify.analysis.simulation.curves.sampling import sampled_lru
from ramify.analysis.simulation.curves.stack_distances import LruCurve, lru_curve
from ramify.analysis.simulation.page_trace import PageTrace
from ramify.analysis.simulation.replays.cache_replay import ReplayResult, replay
from ramify.analysis.simulation.replays.cost_model import CostModel
from ramify.analysis.simulation.replays.engine_replay import replay_engine
from ramify.analysis.simulation.results import Simulation, TraceFacts
from ramify.analysis.simulation.sources import TraceSource
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
    replicas: int = 1  # each with a cache of each capacity
    sample: float | None = None  # share of the pages; estimate LRU's curve from it too
    num_seeds: int = 8  # samples, and random routings
    reorder_s: float | None = None  # window in which requests are served in order of prefixes
    cost: CostModel | None = None  # replay the real engine with it
    max_num_seqs: int = 64  # of the engine
    max_batch_tokens: int = 512

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
        if self.replicas < 1:
            raise ConfigError(f"replicas={self.replicas} but at least 1 serves the requests")


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
    parts, is_partial = _Parts(), source.is_partial
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
    _simulate_changes(trace, options, first_counted, curve, parts)
    for policy in dict.fromkeys(options.policies):
        results = parts.policies.setdefault(policy, {})
        for done, capacity in enumerate(capacities):
            results[capacity] = replay(
                trace,
                capacity,
                policy,
                first_counted=first_counted,
                progress=_advance(report, policy, done, len(capacities), len(trace)),
            )
        report(policy, 1, 1)
    if options.cost is not None:
        _replay_engine(trace, options, options.cost, parts, report)


def _advance(
    report: Progress, part: str, done: int, num_runs: int, num_requests: int
) -> Callable[[int], None]:
    """Progress within one of several runs over the trace."""
    before, total = done * num_requests, num_runs * num_requests
    return lambda request: report(part, before + request, total)


def _simulate_changes(
    trace: PageTrace,
    options: SimulationOptions,
    first_counted: int,
    curve: LruCurve,
    parts: _Parts,
) -> None:
    """Replicas, sampling and reordering, as far as they are asked for; LRU in one pass."""
    capacities = sorted(set(options.capacities))
    if options.replicas > 1:
        routed = [
            random_routing(
                trace, options.replicas, capacities, seed=seed, first_counted=first_counted
            )
            for seed in range(options.num_seeds)
        ]
        rates = np.array([[rates[capacity] for capacity in capacities] for rates in routed])
        perfect = perfect_routing(curve, options.replicas, capacities)
        parts.extra["replicas"] = {
            "count": options.replicas,
            "random": _by_capacity(capacities, rates.mean(axis=0).tolist()),
            "random_deviation": _by_capacity(capacities, rates.std(axis=0).tolist()),
            "perfect": _by_capacity(capacities, list(perfect.values())),
        }
    if options.sample is not None:
        estimates = sampled_lru(
            trace,
            options.sample,
            capacities,
            num_seeds=options.num_seeds,
            first_counted=first_counted,
        ).values()
        parts.extra["sampled_lru"] = {
            "share": options.sample,
            "seeds": options.num_seeds,
            "mean": _by_capacity(capacities, [item.mean for item in estimates]),
            "deviation": _by_capacity(capacities, [item.deviation for item in estimates]),
        }
    if options.reorder_s is not None:
        reordered = ReuseRuns.of(reorder_by_prefix(trace, options.reorder_s))
        new_curve = lru_curve(reordered, first_counted=first_counted)
        parts.extra["reordered"] = {
            "window_s": options.reorder_s,
            "one_pass_lru": _by_capacity(capacities, [*map(new_curve.hit_rate, capacities)]),
        }
    parts.extra["double_capacity"] = _by_capacity(
        capacities, [curve.hit_rate(2 * capacity) for capacity in capacities]
    )


def _by_capacity(capacities: list[int], rates: list[float]) -> dict[str, float]:
    return {str(capacity): rate for capacity, rate in zip(capacities, rates, strict=True)}


def _replay_engine(
    trace: PageTrace,
    options: SimulationOptions,
    cost: CostModel,
    parts: _Parts,
    report: Progress,
) -> None:
    """The engine itself, by policy and capacity."""
    capacities = sorted(set(options.capacities))
    runs: dict[str, dict[str, Any]] = {}
    parts.extra["engine"] = {
        "cost": cost.to_json(),
        "max_num_seqs": options.max_num_seqs,
        "max_batch_tokens": options.max_batch_tokens,
        "runs": runs,
    }
    for policy in dict.fromkeys(options.policies):
        part = f"engine, {policy}"
        for done, capacity in enumerate(capacities):
            run = replay_engine(
                trace,
                capacity,
                policy,
                cost,
                max_num_seqs=options.max_num_seqs,
                max_batch_tokens=options.max_batch_tokens,
                progress=_advance(report, part, done, len(capacities), len(trace)),
            )
            runs.setdefault(policy, {})[str(capacity)] = run.to_json()
        report(part, 1, 1)


def num_distinct(trace: PageTrace) -> int:
    """Pages that the trace refers to, each once."""
    is_used = np.zeros(trace.num_ids, np.bool_)
    is_used[trace.page_ids] = True
    return int(is_used.sum())
