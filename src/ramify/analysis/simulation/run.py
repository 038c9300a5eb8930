"""`simulate`: every curve and bound of a log in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ramify.analysis.progress import Progress, ignore_progress
from ramify.analysis.simulation.capacities import (
    DEFAULT_LIFETIMES_S,
    fitted_capacities,
    validate_capacities,
)
from ramify.analysis.simulation.curves.bounds import belady, ttl_curve
from ramify.analysis.simulation.curves.reuse import ReuseRuns
from ramify.analysis.simulation.curves.stack_distances import lru_curve
from ramify.analysis.simulation.page_trace import PageTrace
from ramify.analysis.simulation.replays.cache_replay import ReplayResult, replay
from ramify.analysis.simulation.replays.engine_replay import replay_engine
from ramify.analysis.simulation.replays.sessions import with_sessions
from ramify.analysis.simulation.results import Simulation, TraceFacts
from ramify.analysis.simulation.sources import TraceSource
from ramify.cache import POLICIES
from ramify.errors import ConfigError
from ramify.step_cost import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions:
    """What to simulate."""

    # In tokens; None: those in which this log's hit rate rises.
    capacities: tuple[int, ...] | None = None
    policies: tuple[str, ...] = ("lru", "auto")
    lifetimes_s: tuple[float, ...] = DEFAULT_LIFETIMES_S
    warm_up: float = 0.0  # share of the requests that fill the cache and are not counted
    # Replay again, with each session ended this long after its last request.
    end_sessions_s: float | None = None
    cost: CostModel | None = None  # replay the real engine with it
    max_num_seqs: int = 64  # of the engine
    max_batch_tokens: int = 512

    def validate(self, page_size: int) -> None:
        """Raise ConfigError for what cannot be simulated."""
        if self.capacities is not None:
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
        if self.end_sessions_s is not None and not 0 <= self.end_sessions_s < float("inf"):
            raise ConfigError(
                f"end_sessions={self.end_sessions_s} but it must be a number of seconds, 0 or more"
            )


@dataclass
class _Parts:
    """Fields of `Simulation` so far; an interrupt leaves those that are complete."""

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
    if options.end_sessions_s is not None and not trace.has_times:
        raise ConfigError(
            f"end_sessions={options.end_sessions_s} but the log has requests without a time; leave it "
            "out"
        )
    run = _Run(trace, options, progress or ignore_progress)
    facts = TraceFacts(
        num_requests=len(trace),
        input_tokens=int(trace.num_tokens[run.first_counted :].sum()),
        page_size=trace.page_size,
        page_references=len(trace.page_ids),
        distinct_pages=num_distinct(trace),
        warm_up=options.warm_up,
        outputs_inserted=insert_outputs,
        token_counts="exact" if source.is_exact else "estimated",
        has_times=trace.has_times,
        requests_without_prompt=source.num_without_prompt,
        requests_with_cut_text=source.num_incomplete,
    )
    is_partial = source.is_partial
    try:
        run.simulate()
    except KeyboardInterrupt:
        is_partial = True
    return Simulation(facts=facts, is_partial=is_partial, **vars(run.parts))


class _Run:
    """Computes the parts one after the other."""

    def __init__(self, trace: PageTrace, options: SimulationOptions, report: Progress) -> None:
        self.trace, self.options, self.report = trace, options, report
        self.first_counted = int(options.warm_up * len(trace))
        self.capacities = sorted(set(options.capacities or ()))
        self.parts = _Parts()

    def simulate(self) -> None:
        """All parts."""
        parts = self.parts
        self.report("stack distances", 0, 1)
        reuse = ReuseRuns.of(self.trace)
        curve = lru_curve(reuse, first_counted=self.first_counted)
        if self.options.capacities is None:
            page_size = self.trace.page_size
            num_tokens = curve.saturation_tokens or num_distinct(self.trace) * page_size
            self.capacities = list(fitted_capacities(num_tokens, page_size))
        num = len(self.capacities)
        parts.infinite = curve.infinite
        parts.one_pass_lru = {capacity: curve.hit_rate(capacity) for capacity in self.capacities}
        parts.lru_points = tuple(curve.points())
        if self.trace.has_times:
            parts.ttl = ttl_curve(reuse, self.options.lifetimes_s, first_counted=self.first_counted)
        self.report("stack distances", 1, 1)
        for done, capacity in enumerate(self.capacities):
            self.report("Belady", done, num)
            parts.belady[capacity] = belady(reuse, capacity, first_counted=self.first_counted)
        self.report("Belady", num, num)
        parts.extra["double_capacity"] = {
            str(capacity): curve.hit_rate(2 * capacity) for capacity in self.capacities
        }
        for policy, capacity, progress in self._replays(""):
            results = parts.policies.setdefault(policy, {})  # of an interrupted one too
            results[capacity] = replay(
                self.trace, capacity, policy, first_counted=self.first_counted, progress=progress
            )
        if self.options.end_sessions_s is not None:
            self._replay_ended(self.options.end_sessions_s)
        if self.options.cost is not None:
            self._replay_engine(self.options.cost)

    def _replays(self, prefix: str) -> Iterator[tuple[str, int, Callable[[int], None]]]:
        """Each policy at each capacity, with a call that reports the requests replayed."""
        num = len(self.trace)
        for policy in dict.fromkeys(self.options.policies):
            for done, capacity in enumerate(self.capacities):
                before, total = done * num, len(self.capacities) * num
                yield policy, capacity, partial(self._advance, prefix + policy, before, total)
            self.report(prefix + policy, 1, 1)

    def _advance(self, part: str, before: int, total: int, request: int) -> None:
        self.report(part, before + request, total)

    def _replay_ended(self, after_s: float) -> None:
        """The cache with sessions that end, by policy and capacity."""
        trace, is_inferred = with_sessions(self.trace)
        rates: dict[str, dict[str, float]] = {}
        self.parts.extra["ended_sessions"] = {
            "after_s": after_s,
            "num_sessions": len(np.unique(trace.session[trace.session >= 0])),
            "is_inferred": is_inferred,
            "curve": rates,
        }
        for policy, capacity, progress in self._replays("ended sessions, "):
            result = replay(
                trace,
                capacity,
                policy,
                first_counted=self.first_counted,
                end_sessions_s=after_s,
                progress=progress,
            )
            rates.setdefault(policy, {})[str(capacity)] = result.hit_rate

    def _replay_engine(self, cost: CostModel) -> None:
        """The engine itself, by policy and capacity."""
        options = self.options
        runs: dict[str, dict[str, Any]] = {}
        self.parts.extra["engine"] = {
            "cost": cost.to_json(),
            "max_num_seqs": options.max_num_seqs,
            "max_batch_tokens": options.max_batch_tokens,
            "runs": runs,
        }
        for policy, capacity, progress in self._replays("engine, "):
            run = replay_engine(
                self.trace,
                capacity,
                policy,
                cost,
                max_num_seqs=options.max_num_seqs,
                max_batch_tokens=options.max_batch_tokens,
                progress=progress,
            )
            runs.setdefault(policy, {})[str(capacity)] = run.to_json()


def num_distinct(trace: PageTrace) -> int:
    """Pages that the trace refers to, each once."""
    is_used = np.zeros(trace.num_ids, np.bool_)
    is_used[trace.page_ids] = True
    return int(is_used.sum())
