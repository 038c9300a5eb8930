"""`serve_trace`: a trace through a fleet in virtual time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.simulation.page_trace import PageTrace
from ramify.cluster.simulation.replicas import SimulatedReplica, SimulatedRequest
from ramify.cluster.simulation.rules import RamifyRouter, Rule
from ramify.errors import ConfigError
from ramify.step_cost import CostModel

BUSY_REQUESTS = 2.0  # for each replica: below, one request more is no imbalance
WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class FleetRun:
    """What a fleet did with a trace."""

    num_requests: int
    hit_rate: float  # share of the prompts' tokens
    ttft_s: NDArray[np.float64]  # [requests] from arrival to the end of the prompt
    imbalance: NDArray[np.float64]  # [busy arrivals] most requests of a replica but one / the mean
    minutes: NDArray[np.float64]  # [busy minutes] as `work_imbalance`, of a minute
    work_imbalance: float  # most seconds of a replica's work / the mean
    makespan_s: float
    num_events: int  # of the caches, where the rule reads them
    event_bytes_per_s: float
    num_index_entries: int
    index_bytes: int

    def percentile_s(self, share: float) -> float:
        """Of the times to first token."""
        return float(np.percentile(self.ttft_s, share)) if len(self.ttft_s) else 0.0


def serve_trace(
    trace: PageTrace,
    rule: Callable[[Sequence[SimulatedReplica], int], Rule],
    *,
    num_replicas: int,
    replica_tokens: int,
    cost: CostModel,
    max_rows: int = 64,
    speed_up: float = 1.0,
) -> FleetRun:
    """Serve a trace with arrival times.

    Args:
        rule: makes the rule, of the replicas and the tokens of a page.
        replica_tokens: K/V capacity of each replica.
        cost: of steps; `read_s` is not used.
        speed_up: the trace's times are divided by it.

    Raises:
        ConfigError: the trace has no times, or a request is larger than a replica.
    """
    if not trace.has_times:
        raise ConfigError("the trace has no arrival times, which a fleet's queues depend on")
    num_pages = replica_tokens // trace.page_size
    longest = int(np.diff(trace.offsets).max()) if len(trace) else 0
    if longest > num_pages:
        raise ConfigError(
            f"a request has {longest:,} pages of {trace.page_size} tokens, but a replica holds "
            f"{num_pages:,}; give it {longest * trace.page_size:,} tokens or more"
        )
    replicas = [
        SimulatedReplica(f"r{number}", num_pages, trace.page_size, cost, max_rows)
        for number in range(num_replicas)
    ]
    return _Fleet(trace, replicas, rule(replicas, trace.page_size), speed_up).run()


class _Fleet:
    def __init__(
        self, trace: PageTrace, replicas: list[SimulatedReplica], rule: Rule, speed_up: float
    ) -> None:
        self.trace, self.replicas, self.rule = trace, replicas, rule
        self.starts = ((trace.start_s - trace.start_s[0]) / speed_up).tolist()
        # (time, number of the entry, replica, request whose answer ends; None: a prompt is computed)
        self.ends: list[tuple[float, int, SimulatedReplica, SimulatedRequest | None]] = []
        self.num_ends = 0
        self.ttft_s: list[float] = []
        self.imbalance: list[float] = []
        self.minutes: list[float] = []
        self.window_end_s, self.busy_before_s = WINDOW_S, np.zeros(len(replicas))
        self.num_arrived = self.most_arrived = 0  # of a minute
        self.num_hit = 0

    def run(self) -> FleetRun:
        now_s = 0.0
        for number, start_s in enumerate(self.starts):
            while self.ends and self.ends[0][0] <= start_s:
                now_s = self._end()
            while start_s >= self.window_end_s:
                self._end_window()
            self._arrive(number, start_s)
        while self.ends:
            now_s = self._end()
        busy = [replica.busy_s for replica in self.replicas]
        rule, trace = self.rule, self.trace
        num_events = num_bytes = num_entries = index_bytes = 0
        if isinstance(rule, RamifyRouter):
            rule.take_reports(math.inf)
            num_events, num_bytes = rule.num_events, rule.event_bytes
            num_entries, index_bytes = len(rule.mirrors.index), rule.mirrors.index.num_bytes
            assert not rule.router.num_in_flight
        return FleetRun(
            num_requests=len(trace),
            hit_rate=self.num_hit / trace.total_tokens if trace.total_tokens else 0.0,
            ttft_s=np.array(self.ttft_s),
            imbalance=np.array(self.imbalance),
            minutes=np.array(self.minutes),
            work_imbalance=max(busy) / (sum(busy) / len(busy)) if sum(busy) else 1.0,
            makespan_s=now_s,
            num_events=num_events,
            event_bytes_per_s=num_bytes / now_s if now_s else 0.0,
            num_index_entries=num_entries,
            index_bytes=index_bytes,
        )

    def _end_window(self) -> None:
        busy_s = np.array([replica.busy_s for replica in self.replicas])
        window_s = busy_s - self.busy_before_s
        self.busy_before_s = busy_s
        self.window_end_s += WINDOW_S
        self.most_arrived = max(self.most_arrived, self.num_arrived)
        is_busy = self.num_arrived * 2 >= self.most_arrived
        self.num_arrived = 0
        if window_s.any() and is_busy:
            self.minutes.append(float(window_s.max() / window_s.mean()))

    def _arrive(self, number: int, now_s: float) -> None:
        trace = self.trace
        self.num_arrived += 1
        request = SimulatedRequest.of(
            number,
            trace.pages(number).tolist(),
            int(trace.num_lookup_pages[number]),
            max(1, int(trace.num_tokens[number])),
            max(1, int(trace.num_output[number])),
            now_s,
        )
        replica = self.rule.choose(request, now_s)
        replica.add(request)
        counts = [state.num_requests for state in self.replicas]
        mean = sum(counts) / len(counts)
        if mean >= BUSY_REQUESTS:
            self.imbalance.append((max(counts) - 1) / mean)
        self._begin(replica, now_s)

    def _end(self) -> float:
        now_s, _, replica, request = heapq.heappop(self.ends)
        if request is not None:
            replica.end_answer(request, now_s)
            self.rule.finished(request)
        else:
            request, end_s = replica.end_prompt(now_s)
            self.ttft_s.append(now_s - request.arrival_s)
            self.num_hit += request.num_hit
            self.rule.computed(request)
            self._push(end_s, replica, request)
        self._begin(replica, now_s)
        return now_s

    def _begin(self, replica: SimulatedReplica, now_s: float) -> None:
        end_s = replica.begin(now_s)
        if end_s is not None:
            self._push(end_s, replica, None)
        self.rule.changed(replica, now_s)

    def _push(
        self, end_s: float, replica: SimulatedReplica, request: SimulatedRequest | None
    ) -> None:
        self.num_ends += 1
        heapq.heappush(self.ends, (end_s, self.num_ends, replica, request))
