"""Whether loading pages is sooner than computing them: what a read of each tier takes, and a prefill.

A read takes `latency_s + page_s * pages`, behind the pages that others read from the same tier. A
prefill takes what a step model says, times how much longer or shorter the last steps took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from statistics import median, median_low
from typing import Final, Protocol

NUM_SAMPLES: Final = 15
LEAST_LIMIT_S: Final = 0.01  # below this a late wake-up of a thread would cancel good loads
PATIENCE: Final = 0.1  # of computing, that a request may lose by waiting for a tier
TOLERANCE: Final = 1.2  # a load may take that much longer than expected
# A tier that was slower than computing is measured again, since its other load may be over.
RETRY_S: Final = 30.0
FIRST_RETRY_S: Final = 1.0  # after a load that was late; doubles up to RETRY_S


class StepModel(Protocol):
    """Seconds of a step; `step_cost.CostModel`."""

    def step(self, num_tokens: int, num_reads: float) -> float:
        """Seconds of `num_tokens` query rows that attend to `num_reads` tokens in all."""
        ...


class ReadSpeed:
    """What reads of a tier take: a line through the last of them, by the medians of Theil and Sen.

    The slope is the median over all pairs of reads of different lengths, and the latency the median
    of what it leaves over: a few reads that had to wait move neither.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=NUM_SAMPLES)
        self.latency_s = 0.0
        self.page_s = 0.0

    @property
    def is_known(self) -> bool:
        """Whether a read was measured."""
        return bool(self._samples)

    def add(self, num_pages: int, seconds: float) -> None:
        """Count a read of `num_pages` pages."""
        if num_pages < 1 or seconds < 0:
            return
        slope_before = self.page_s if self._samples else inf
        self._samples.append((num_pages, seconds))
        slopes = [
            (second[1] - first[1]) / (second[0] - first[0])
            for first, second in combinations(self._samples, 2)
            if first[0] != second[0]
        ]
        slope = max(0.0, median(slopes)) if slopes else slope_before
        # Reads of one length do not tell latency from bandwidth, but bound the bandwidth.
        self.page_s = min(slope, median(taken / pages for pages, taken in self._samples))
        left_over = (taken - self.page_s * pages for pages, taken in self._samples)
        self.latency_s = max(0.0, median(left_over))

    def read_s(self, num_pages: int) -> float:
        """Seconds to read pages with nothing before them."""
        return self.latency_s + self.page_s * num_pages


class PrefillSpeed:
    """What computing tokens of a prompt takes: the step model's seconds, by what the last steps took.

    Args:
        max_step_tokens: a longer prompt takes several steps.
    """

    def __init__(self, model: StepModel, max_step_tokens: int) -> None:
        self._model, self._max_step_tokens = model, max_step_tokens
        # The model counts as a first step, and the lower median of an even number as theirs: a
        # first step that compiles does not make loads look cheap.
        self._ratios: deque[float] = deque([1.0], maxlen=NUM_SAMPLES)
        self.ratio = 1.0

    def add(self, num_tokens: int, num_reads: float, seconds: float) -> None:
        """Count a step."""
        modelled_s = self._model.step(num_tokens, num_reads)
        if modelled_s > 0 and seconds > 0:
            self._ratios.append(seconds / modelled_s)
            self.ratio = median_low(self._ratios)

    def compute_s(self, first: int, end: int) -> float:
        """Seconds to compute the tokens `first` to `end` (exclusive) of a prompt."""
        num_tokens = end - first
        if num_tokens <= 0:
            return 0.0
        num_reads = num_tokens * first + num_tokens * (num_tokens + 1) / 2
        num_steps = -(-num_tokens // self._max_step_tokens)
        # One call for all steps counts the constant of a step once.
        step_s = self._model.step(0, 0.0)
        return self.ratio * (self._model.step(num_tokens, num_reads) + (num_steps - 1) * step_s)


@dataclass(slots=True)
class _Tier:
    """What is known of a tier, and whether it is being measured."""

    speed: ReadSpeed
    is_probing: bool = False
    # A load was late: what is known is not true any more, and is measured anew.
    is_doubtful: bool = False
    retry_s: float = inf  # when to measure it anew, of the engine's clock; inf: not planned
    pause_s: float = FIRST_RETRY_S


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How much of a prompt to load. `num_pages` of 0: computing is sooner."""

    num_pages: int
    load_s: float  # expected; 0 if a tier was never measured
    compute_s: float  # of everything, without a load


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """What a tier is worth to this engine.

    Args:
        latency_s, page_s: None: not measured yet.
        pays_from: the least number of pages whose load is sooner than computing them; None: none.
        reason: of that, in words.
    """

    latency_s: float | None
    page_s: float | None
    pays_from: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """A request that could run, and waits for a load.

    Args:
        begin_s: since when it could run.
        limit_s: how long it may wait with no page to show for it.
        first: page from which on it computes what does not come.
        end: tokens of its prompt.
    """

    begin_s: float
    limit_s: float
    first: int
    end: int


class TierCosts:
    """The choice between loading and computing.

    Args:
        model: of a step, as calibrated or estimated at the start.
    """

    def __init__(self, model: StepModel, *, page_size: int, max_step_tokens: int) -> None:
        self.prefill = PrefillSpeed(model, max_step_tokens)
        self._size = page_size
        self._tiers: dict[str, _Tier] = {}

    def _tier(self, tier: str) -> _Tier:
        return self._tiers.setdefault(tier, _Tier(ReadSpeed()))

    # -- measurements --------------------------------------------------------------------------

    def computed(self, num_tokens: int, num_reads: float, seconds: float) -> None:
        """Count a step that computed prompt tokens."""
        self.prefill.add(num_tokens, num_reads, seconds)

    def loaded(self, tier: str, num_pages: int, seconds: float) -> None:
        """Count a load that gave `num_pages` pages of a tier, without what it waited for others."""
        self._tier(tier).speed.add(num_pages, seconds)

    def in_time(self, tier: str) -> None:
        """A load of this tier was worth its wait."""
        self._tier(tier).pause_s = FIRST_RETRY_S

    def late(self, tier: str, now_s: float) -> None:
        """A request gave up a load: use the tier no more until it is measured anew."""
        state = self._tier(tier)
        if not state.is_doubtful:
            state.is_doubtful, state.retry_s = True, now_s + state.pause_s
            state.pause_s = min(RETRY_S, 2 * state.pause_s)

    def probe_begun(self, tier: str) -> None:
        """A tier is being measured: if it was before, no load begins until that ends."""
        self._tier(tier).is_probing = True

    def probe_ended(self, tier: str, reads: Iterable[tuple[int, float]]) -> None:
        """Replace what is known of a tier by the pages and seconds of each read, if there were any."""
        state, speed = self._tier(tier), ReadSpeed()
        for num_pages, seconds in reads:
            speed.add(num_pages, seconds)
        known = speed if speed.is_known or state.is_doubtful else state.speed
        self._tiers[tier] = _Tier(known, pause_s=state.pause_s)

    def must_probe(self, tier: str, now_s: float) -> bool:
        """Whether to measure a tier now that a load was just refused for."""
        state = self._tier(tier)
        if state.is_probing:
            return False
        if state.retry_s == inf:
            state.retry_s = now_s + RETRY_S
        return now_s >= state.retry_s

    # -- the choice ----------------------------------------------------------------------------

    def plan(
        self, tiers: Sequence[str], first: int, num_tokens: int, queued: Mapping[str, int]
    ) -> LoadPlan:
        """How many of the next pages of a prompt to load, so that it is ready soonest.

        Loading takes as long whatever the pages' place in the prompt, and computing the longer the
        later it is: the best length ends where the tier changes, or is all.

        Args:
            tiers: of the pages after `first`, which the pool has the pages before.
            num_tokens: of the prompt.
            queued: pages that other loads have still to read, by tier.
        """
        begin, compute_s = first * self._size, self.prefill.compute_s
        best = LoadPlan(0, 0.0, compute_s(begin, num_tokens))
        best_s = best.compute_s
        latency_s = pages_s = 0.0
        seen: set[str] = set()
        at = 0
        while at < len(tiers):
            tier, start = tiers[at], at
            while at < len(tiers) and tiers[at] == tier:
                at += 1
            state = self._tier(tier)
            # Before the first reads of all have ended, a load tells as much, for a tenth of computing.
            if state.is_doubtful or (state.is_probing and state.speed.is_known):
                break
            if state.speed.is_known:
                latency_s = max(latency_s, state.speed.latency_s)
                num_before = 0 if tier in seen else queued.get(tier, 0)
                pages_s += state.speed.page_s * (at - start + num_before)
                seen.add(tier)
            load_s = latency_s + pages_s
            total_s = load_s + compute_s(begin + at * self._size, num_tokens)
            if total_s < best_s:
                best, best_s = LoadPlan(at, load_s, best.compute_s), total_s
        return best

    def wait(self, now_s: float, expected_end_s: float, first: int, num_tokens: int) -> Wait:
        """Let a request wait from now on for a load that is expected to end at `expected_end_s`."""
        compute_s = self.prefill.compute_s(first * self._size, num_tokens)
        limit_s = max(LEAST_LIMIT_S, PATIENCE * compute_s, TOLERANCE * (expected_end_s - now_s))
        return Wait(now_s, limit_s, first, num_tokens)

    def is_lost(self, wait: Wait, now_s: float, next_page: int, last: int, left_s: float) -> bool:
        """Whether a request had better compute than wait on.

        So the request ends later than without the load by `Wait.limit_s` at most, whatever the tier
        does: each page that came has saved the time to compute it.

        Args:
            next_page: of the prompt; those before it have come.
            last: page behind the last one that it waits for.
            left_s: until the pages up to `last` are there, as the load goes.
        """
        elapsed_s = now_s - wait.begin_s
        if elapsed_s <= wait.limit_s:
            return False
        size, compute_s = self._size, self.prefill.compute_s
        all_s = compute_s(wait.first * size, wait.end)
        rest_s = compute_s(next_page * size, wait.end)
        if elapsed_s > wait.limit_s + all_s - rest_s:
            return True
        return left_s > rest_s - compute_s(last * size, wait.end)

    # -- what is told --------------------------------------------------------------------------

    def speed_of(self, tier: str, max_pages: int) -> TierSpeed:
        """What a tier is worth; `max_pages` is the longest prompt."""
        state = self._tier(tier)
        speed = state.speed
        if not speed.is_known:
            reason = (
                "its first reads have not ended" if state.is_probing else "nothing was read yet"
            )
            return TierSpeed(None, None, None, reason)
        pays_from = self._pays_from(speed, max_pages)
        shown = pays_from or max_pages
        compute_s, load_s = self.prefill.compute_s(0, shown * self._size), speed.read_s(shown)
        pages = "a page" if shown == 1 else f"{shown:,} pages"
        figures = f"{pages}: computed in {_shown(compute_s)}, loaded in {_shown(load_s)}"
        if pays_from is None:
            figures = f"computing is faster at any length; {figures}"
        return TierSpeed(speed.latency_s, speed.page_s, pays_from, figures)

    def _pays_from(self, speed: ReadSpeed, max_pages: int) -> int | None:
        def pays(num_pages: int) -> bool:
            end = num_pages * self._size + 1  # the last token is always computed
            compute_s = self.prefill.compute_s
            return speed.read_s(num_pages) + compute_s(end - 1, end) < compute_s(0, end)

        num_pages = 1
        while not pays(num_pages):
            if num_pages >= max_pages:
                return None
            num_pages = min(max_pages, 2 * num_pages)
        least, most = num_pages // 2, num_pages  # does not pay, or 0; pays
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (least, middle) if pays(middle) else (middle, most)
        return most


def _shown(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.1 else f"{seconds:,.2f} s"
