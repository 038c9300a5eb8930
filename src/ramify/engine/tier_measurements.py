"""`TierMeasurements`: measures the reads of the tiers and the steps, for the choice of `TierCosts`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ramify.attention.batch import AttentionBatch
from ramify.cache.tier_costs import StepModel, TierCosts, TierSpeed
from ramify.cache.tier_loads import Load
from ramify.engine.tier_parts import TierParts
from ramify.kv.mover_jobs import Probe, ProbeEnded, ReadEnded

MIN_PROMPT_TOKENS = 32  # of a step that tells how long a token takes: prefill, not decode
START_LIMIT_S = 0.05  # that the start of an engine waits for the first reads of all tiers
SPEEDS_S = 1.0  # figures for people are made so often at most
PROBE_LIMIT_S = 2.0  # no read of a probe begins later; nobody waits for it


@dataclass(slots=True)
class _Span:
    """The reads of one load from one tier: from the first one's begin to the last one's end."""

    begin_s: float
    end_s: float
    num_pages: int


class TierMeasurements:
    """What loading and computing take. For the engine's thread.

    Args:
        model: of a step.
        is_calibrated: it is not corrected by the engine's steps.
        max_step_tokens: of a prompt in one step.
        max_model_len: of a prompt.
    """

    def __init__(
        self,
        model: StepModel,
        clock: Callable[[], float],
        *,
        is_calibrated: bool,
        page_size: int,
        max_step_tokens: int,
        max_model_len: int,
    ) -> None:
        self.costs = TierCosts(model, page_size=page_size, max_step_tokens=max_step_tokens)
        self._is_calibrated = is_calibrated
        self._clock, self._max_pages = clock, max(1, max_model_len // page_size)
        self._step_begin_s = 0.0
        self._speeds: tuple[float, dict[str, TierSpeed]] = -math.inf, {}  # with its time

    def begin(self, parts: TierParts) -> None:
        """Measure these stores from now on; nothing is in flight."""
        self._parts = parts
        self._speeds = -math.inf, {}
        self._spans: dict[tuple[int, str], _Span] = {}  # by number of the load, and tier
        self._probing: set[str] = set()
        for store in parts.stores:
            self._probe(store.tier)

    @property
    def is_probing(self) -> bool:
        """Whether a tier's probe has not ended."""
        return bool(self._probing)

    def _probe(self, tier: str) -> None:
        self._probing.add(tier)
        self.costs.probe_begun(tier)
        self._parts.mover.read(Probe(tier, time.monotonic() + PROBE_LIMIT_S))

    def probe_ended(self, result: ProbeEnded) -> None:
        """Take the result of a probe."""
        self._probing.discard(result.probe.tier)
        self.costs.probe_ended(result.probe.tier, result.reads)

    def refused(self, tier: str) -> None:
        """No load was begun since computing is sooner: now and then, measure the tier again."""
        if self.costs.must_probe(tier, self._clock()):
            self._probe(tier)

    def read_ended(self, load: Load, result: ReadEnded) -> None:
        """Count a read of a load, which has taken its pages; with its last one the load."""
        tier, num_pages = result.read.tier, sum(map(bool, result.outcomes))
        span = self._spans.setdefault(
            (load.number, tier), _Span(result.begin_s, result.end_s, num_pages=0)
        )
        span.begin_s = min(span.begin_s, result.begin_s)
        span.end_s = max(span.end_s, result.end_s)
        span.num_pages += num_pages
        if not load.num_reading and (load.is_dropped or load.num_requested >= load.end):
            for name in set(load.tiers):
                ended = self._spans.pop((load.number, name), None)
                if ended is not None:
                    self.costs.loaded(name, ended.num_pages, ended.end_s - ended.begin_s)

    def step_begun(self) -> None:
        """A step was planned."""
        self._step_begin_s = self._clock()

    def step_ended(self, batch: AttentionBatch) -> None:
        """Count the step that was begun last, if it computed a prompt."""
        if batch.max_q_len >= MIN_PROMPT_TOKENS and not self._is_calibrated:
            num_reads = int(batch.positions.sum()) + batch.num_tokens
            self.costs.computed(batch.num_tokens, num_reads, self._clock() - self._step_begin_s)

    def speeds(self) -> dict[str, TierSpeed]:
        """What each tier is worth, as of the last second."""
        now_s = self._clock()
        if now_s >= self._speeds[0] + SPEEDS_S:
            self._speeds = (
                now_s,
                {
                    store.tier: self.costs.speed_of(store.tier, self._max_pages)
                    for store in self._parts.stores
                },
            )
        return self._speeds[1]
