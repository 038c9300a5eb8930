"""A fleet in virtual time: what is counted, and that the router finds what replicas have cached."""

from __future__ import annotations

import numpy as np
import pytest

from ramify.analysis.simulation.page_trace import PageTrace, PageTraceBuilder
from ramify.cluster.simulation.fleet import serve_trace
from ramify.cluster.simulation.replicas import CHUNK_TOKENS, SimulatedReplica, SimulatedRequest
from ramify.cluster.simulation.rules import REPORT_S, RULES, RamifyRouter
from ramify.cluster.simulation.traffic import agents, conversations
from ramify.errors import ConfigError
from ramify.step_cost import CostModel

COST = CostModel(step_s=0.01, token_s=0.001, read_s=0.0)


def trace_of(*requests: tuple[float, list[int]], num_output: int = 1) -> PageTrace:
    """Requests of pages of 10 tokens, each with its time."""
    builder = PageTraceBuilder(10)
    for start_s, pages in requests:
        builder.add(pages, num_tokens=len(pages) * 10 + 1, num_output=num_output, start_s=start_s)
    return builder.build()


def test_a_request_waits_for_the_prompt_before_it_and_hits_what_that_computed() -> None:
    """Two prompts of 41 tokens at once: 0.051 s, then 0.011 s more for the one token of the second."""
    trace = trace_of((5.0, [1, 2, 3, 4]), (5.0, [1, 2, 3, 4]))

    run = serve_trace(trace, RULES["round robin"], num_replicas=1, replica_tokens=1000, cost=COST)

    assert run.ttft_s == pytest.approx([0.051, 0.062])
    assert run.hit_rate == pytest.approx(40 / 82)
    assert run.makespan_s == pytest.approx(0.072)


def test_a_full_batch_makes_requests_wait() -> None:
    """With one row, the second prompt begins when the first answer has ended."""
    trace = trace_of((0.0, [1]), (0.0, [2]), num_output=10)

    run = serve_trace(
        trace, RULES["round robin"], num_replicas=1, replica_tokens=1000, cost=COST, max_rows=1
    )

    assert run.ttft_s == pytest.approx([0.021, 0.021 + 0.1 + 0.021])


def test_the_router_hits_what_round_robin_computes_twice() -> None:
    """A second turn goes to the replica of the first, or hits nothing."""
    turns = [(10.0 * at, list(range(at, at + 4))) for at in range(0, 600, 100)]
    again = [(start_s + 1, [*pages, 7000]) for start_s, pages in turns]
    trace = trace_of(*sorted(turns + again))

    hits = {
        rule: serve_trace(
            trace, RULES[rule], num_replicas=3, replica_tokens=1000, cost=COST
        ).hit_rate
        for rule in ("ramify", "round robin", "first page", "tree of requests", "ray affinity")
    }

    most = 6 * 40 / trace.total_tokens
    assert hits.pop("round robin") == 0
    assert list(hits.values()) == pytest.approx([most] * 4)


@pytest.mark.parametrize("rule", RULES)
def test_every_request_is_served_once_by_every_rule(rule: str) -> None:
    """Generated traffic on small caches: each request has a time to first token, none is negative."""
    trace = conversations(12, per_s=2.0)

    run = serve_trace(trace, RULES[rule], num_replicas=3, replica_tokens=9_000, cost=COST)

    assert run.num_requests == len(trace) == len(run.ttft_s)
    assert (run.ttft_s > 0).all()
    assert 0 < run.hit_rate < 1
    assert 1 <= run.work_imbalance <= 3


def test_the_router_is_fairer_than_affinity_alone() -> None:
    """On a hot first page, hashing it sends everything to one replica; the router does not."""
    trace = trace_of(*[(at / 100, [1, 2, 1000 + at]) for at in range(200)], num_output=20)

    runs = {
        rule: serve_trace(trace, RULES[rule], num_replicas=4, replica_tokens=9_000, cost=COST)
        for rule in ("ramify", "first page")
    }

    assert runs["first page"].work_imbalance == 4
    assert runs["ramify"].work_imbalance < 1.3
    assert runs["ramify"].percentile_s(99) < runs["first page"].percentile_s(99)


def test_each_minute_is_compared_on_its_own() -> None:
    """A replica that computes in the first minute and one that does in the second are equal over the run."""
    late = [(70.0, [3]), (70.1, [4])]
    trace = trace_of((0.0, [1]), (0.1, [1]), *late, (125.0, [5]), num_output=5)

    runs = {
        rule: serve_trace(trace, RULES[rule], num_replicas=2, replica_tokens=90, cost=COST)
        for rule in ("round robin", "first page")
    }

    # 0.036 s and 0.016 s of the two prompts and answers; the second one hits nothing elsewhere.
    assert runs["round robin"].minutes == pytest.approx([1.0, 1.0])
    assert runs["first page"].minutes[0] == 2
    assert len(runs["first page"].minutes) == 2


def test_the_router_hears_of_steps_before_a_prompt_is_computed() -> None:
    """Of 20,000 tokens that take 20 s, whole steps are done 10 s later, as of the report's age."""
    replica = SimulatedReplica("r0", 3_000, 10, COST, 64)
    rule = RamifyRouter([replica], 10)
    request = SimulatedRequest.of(0, list(range(2_000)), 2_000, 20_000, 1, 0.0)
    rule.choose(request, 0.0).add(request)
    replica.begin(0.0)
    rule.changed(replica, 0.0)
    state = rule.router._replicas["r0"]

    assert state.waiting_tokens == 20_000
    rule.take_reports(REPORT_S)
    assert state.waiting_tokens == 20_000
    rule.take_reports(10.0 + REPORT_S)
    assert state.waiting_tokens == 20_000 - 4 * CHUNK_TOKENS
    rule.take_reports(30.0)
    assert state.waiting_tokens == 0
    assert (state.num_requests, state.num_unseen) == (1, 0)


def test_generated_traffic_is_the_same_in_every_run() -> None:
    """The seed decides; sessions grow, and share system prompts."""
    trace = agents(3, per_s=1.0)

    assert np.array_equal(trace.page_ids, agents(3, per_s=1.0).page_ids)
    assert not np.array_equal(trace.page_ids, agents(3, per_s=1.0, seed=1).page_ids)
    assert trace.has_times and trace.num_ids < len(trace.page_ids) / 2


def test_what_cannot_be_simulated_is_refused() -> None:
    """A trace without times, and a request that no replica can hold."""
    builder = PageTraceBuilder(10)
    builder.add([1, 2], num_tokens=20)

    with pytest.raises(ConfigError, match="no arrival times"):
        serve_trace(builder.build(), RULES["ramify"], num_replicas=1, replica_tokens=100, cost=COST)
    with pytest.raises(
        ConfigError, match="a request has 4 pages of 10 tokens, but a replica holds 3"
    ):
        serve_trace(
            trace_of((0.0, [1, 2, 3, 4])),
            RULES["ramify"],
            num_replicas=1,
            replica_tokens=39,
            cost=COST,
        )
