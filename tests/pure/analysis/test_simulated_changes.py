"""What-if simulations: the engine with a cost model, sizes in bytes."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from ramify.analysis.corpus import Corpus
from ramify.analysis.records import LoggedRequest, Segment, SegmentKind, Usage
from ramify.analysis.simulation.calls import simulate
from ramify.analysis.simulation.kv_bytes import kv_token_bytes
from ramify.analysis.simulation.replays.cache_replay import replay
from ramify.analysis.simulation.replays.cost_model import StepSample, fit_cost
from ramify.analysis.simulation.replays.engine_replay import replay_engine
from ramify.analysis.simulation.sources import page_trace
from ramify.errors import CheckpointError, ConfigError
from ramify.step_cost import CostModel
from tests.pure.analysis.simulated_traces import (
    BLOCK,
    PATHS,
    Path_,
    hashed_request,
)

COST = CostModel(step_s=0.01, token_s=0.001, read_s=0.0)


def timed(paths: Sequence[Path_], gap_s: float) -> list[LoggedRequest]:
    return [
        hashed_request(path, number, start_s=number * gap_s, output=3)
        for number, path in enumerate(paths)
    ]


@given(PATHS)
def test_requests_far_apart_hit_what_the_replay_hits(paths: list[Path_]) -> None:
    """Without overlap the engine is the sequential replay: same hits, waits of a prefill each."""
    trace = page_trace(timed(paths, 1000.0)).trace

    run = replay_engine(trace, 400 * BLOCK, "lru", COST)

    assert run.num_hit == replay(trace, 400 * BLOCK, "lru").num_hit
    assert (run.num_requests, run.num_refused, run.num_preemptions) == (len(paths), 0, 0)
    longest = 0.01 + 0.001 * (6 * BLOCK + 1)
    assert 0.01 < run.ttft_s.max() <= longest + 1e-9


def test_first_tokens_wait_for_the_queue() -> None:
    """Requests that arrive together wait for each other; a cost twice as high doubles the times."""
    trace = page_trace(timed([(number,) * 5 for number in range(3)] * 4, 0.0)).trace

    slow = CostModel(step_s=0.02, token_s=0.002, read_s=0.0)
    run, slower = (
        replay_engine(trace, 400 * BLOCK, "lru", cost, max_num_seqs=2) for cost in (COST, slow)
    )

    assert np.all(np.diff(np.sort(run.ttft_s)[::2]) > 0)
    assert slower.ttft_s == pytest.approx(2 * run.ttft_s)
    assert slower.to_json()["ttft_p50_s"] == pytest.approx(2 * run.to_json()["ttft_p50_s"])


def test_a_request_longer_than_the_cache_is_refused() -> None:
    """The engine refuses what can never run; its tokens stay in the denominator."""
    trace = page_trace(timed([(0,), (0, 1, 2, 0, 1, 2), (0,)], 1000.0)).trace

    run = replay_engine(trace, 3 * BLOCK, "lru", COST)

    assert (run.num_requests, run.num_refused) == (2, 1)
    assert run.hit_rate == pytest.approx(BLOCK / trace.total_tokens)


def test_preempted_requests_read_their_pages_again() -> None:
    """A pool that is too small for all answers preempts, and every request still finishes."""
    requests = [
        hashed_request((number,), number, start_s=0.0, output=10 * BLOCK) for number in range(6)
    ]

    run = replay_engine(page_trace(requests).trace, 16 * BLOCK, "lru", COST, max_num_seqs=6)

    assert run.num_preemptions > 0
    assert run.num_requests == 6


def test_costs_are_fitted_and_kept(tmp_path: Path) -> None:
    """Steps made by a cost model give its constants back; the file of it is read again."""
    true = CostModel(step_s=0.002, token_s=3e-5, read_s=2e-9)
    samples = [
        StepSample(tokens, reads, true.step(tokens, reads))
        for tokens, reads in ((1, 100), (16, 4000), (512, 10**6), (512, 4 * 10**6), (64, 5000))
    ]

    fitted = fit_cost(samples, model="tiny")
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(fitted.to_json()), encoding="utf-8")

    assert (fitted.step_s, fitted.token_s, fitted.read_s) == pytest.approx((0.002, 3e-5, 2e-9))
    assert CostModel.load(path) == fitted
    assert fitted.facts["p90_error"] < 1e-9


def test_no_constant_is_negative() -> None:
    """Noise never makes a step cheaper by more tokens."""
    samples = [StepSample(1, 10, 0.01), StepSample(100, 10, 0.009), StepSample(1, 5000, 0.008)]

    fitted = fit_cost(samples)

    assert min(fitted.step_s, fitted.token_s, fitted.read_s) >= 0
    with pytest.raises(ConfigError, match="3 or more"):
        fit_cost(samples[:2])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step_s": -1, "token_s": 0, "read_s": 0}'])
def test_a_bad_cost_file_is_named(tmp_path: Path, text: str) -> None:
    """A cost file without its constants is refused, with the command that writes such a file."""
    path = tmp_path / "cost.json"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match=r"cost\.json"):
        CostModel.load(path)


def test_sizes_in_bytes_follow_from_the_model() -> None:
    """K/V of the built-in model takes 2,048 bytes a token; capacities in bytes become tokens."""
    requests = [hashed_request((0, 1), number) for number in range(2)]

    report = simulate(requests, capacity="4MB", policy="lru", model="ramify-tiny").to_json()

    assert kv_token_bytes("ramify-tiny") == report["kv"]["token_bytes"] == 2048
    assert list(report["one_pass_lru"]) == ["1953"]
    assert report["kv"]["gigabytes"]["1953"] == pytest.approx(0.004, rel=0.01)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        kv_token_bytes("no-such-model")


def test_a_corpus_is_simulated_like_its_requests() -> None:
    """A corpus that was read before gives the same rates as the requests themselves."""
    requests = [
        LoggedRequest(
            "log",
            line,
            segments=(
                Segment("settings.model", SegmentKind.SETTING, "m"),
                Segment("messages[0]", SegmentKind.MESSAGE, "a b c d e f g h " * 9, label="user"),
                Segment("messages[1]", SegmentKind.MESSAGE, f"question {line}", label="user"),
            ),
            usage=Usage(num_output=line),
        )
        for line in range(1, 5)
    ]
    corpus = Corpus()
    for request in requests:
        corpus.add(request)

    from_requests = simulate(requests, capacity=10_000, policy="lru").to_json()

    assert from_requests["infinite"] > 0.5
    assert simulate(corpus, capacity=10_000, policy="lru").to_json() == from_requests


def test_all_changes_are_in_the_report(tmp_path: Path) -> None:
    """Twice the memory and the engine are parts of the JSON, by capacity."""
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(COST.to_json()), encoding="utf-8")

    report = simulate(
        timed([(0, 1), (0, 2), (1,)] * 4, 1.0),
        capacity=[16, 64],
        policy="lru",
        cost=path,
    ).to_json()

    capacities = {"16", "64"}
    assert set(report["double_capacity"]) == capacities
    assert set(report["engine"]["runs"]["lru"]) == capacities
    assert report["engine"]["runs"]["lru"]["64"]["ttft_p90_s"] > 0
    assert json.loads(json.dumps(report)) == report
