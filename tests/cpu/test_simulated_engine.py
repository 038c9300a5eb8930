"""The simulator beside the engine: on the same requests it predicts the hit rate that was measured."""

import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ramify.analysis.records import LoggedRequest, Segment, SegmentKind, TextForm
from ramify.analysis.simulation.replays.calibration import Stopwatch, calibrate
from ramify.analysis.simulation.replays.cost_model import StepSample, fit_cost
from ramify.analysis.simulation.replays.engine_replay import EngineRun, replay_engine
from ramify.analysis.simulation.sources import page_trace
from ramify.cli import app
from ramify.engine.llm import LLM
from ramify.params import SamplingParams
from ramify.step_cost import CostModel

CONCURRENT = 16
PAGE = 16
POOL = 3200  # tokens
BATCH = 128
VOCAB = 280
TOLERANCE = 0.005


@dataclass
class Chat:
    """A conversation: its history, and when its user sends the next turn."""

    history: list[int]
    send_s: float
    turns_left: int
    sent_s: float = 0.0


@dataclass
class Served:
    """What a real engine did, as a log."""

    requests: list[LoggedRequest] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    most_running: int = 0

    @property
    def hit_rate(self) -> float:
        return self.num_cached / self.num_tokens


def serve(llm: LLM, num_chats: int, cost: CostModel | None, *, gap_s: float, seed: int) -> Served:
    """Serve conversations at their times.

    Args:
        cost: what a step adds to the clock; None: the time that it takes on this machine.
    """
    rng = random.Random(seed)
    heads = [[rng.randrange(3, VOCAB) for _ in range(64)] for _ in range(3)]
    chats = [
        Chat(list(rng.choice(heads)), rng.uniform(0, gap_s * num_chats), rng.randrange(2, 6))
        for _ in range(num_chats)
    ]
    core, served, now_s = llm.core, Served(), 0.0
    watch = Stopwatch(core.executor)
    core.executor = watch
    live: dict[int, Chat] = {}
    while chats or live:
        if not live:
            now_s = max(now_s, min(chat.send_s for chat in chats))
        for chat in sorted(chats, key=lambda chat: chat.send_s):
            if chat.send_s <= now_s:
                chats.remove(chat)
                chat.history += [rng.randrange(3, VOCAB) for _ in range(rng.randrange(10, 80))]
                chat.sent_s = chat.send_s
                params = SamplingParams(max_tokens=rng.randrange(60, 160), ignore_eos=True)
                live[core.add_request(chat.history, params)] = chat
        served.most_running = max(served.most_running, len(core.scheduler.running))
        start = time.perf_counter()
        events = core.step()
        seconds = time.perf_counter() - start
        served.steps.append(StepSample(watch.num_tokens, watch.num_reads, seconds))
        now_s += seconds if cost is None else cost.step(watch.num_tokens, watch.num_reads)
        for event in events:
            if event.output is None:
                continue
            chat, output = live.pop(event.request_id), event.output
            served.requests.append(logged(chat, output.token_ids))
            served.num_tokens += len(chat.history)
            served.num_cached += output.usage.cached_tokens
            served.num_preemptions += output.metrics.preemptions
            chat.history = [*chat.history, *output.token_ids]
            chat.turns_left -= 1
            if chat.turns_left and len(chat.history) < 700:
                chat.send_s = now_s + rng.expovariate(1 / gap_s)
                chats.append(chat)
    core.executor = watch.inner
    return served


def logged(chat: Chat, answer: tuple[int, ...]) -> LoggedRequest:
    def segment(tokens: list[int] | tuple[int, ...]) -> Segment:
        text = " ".join(map(str, tokens))
        return Segment("prompt", SegmentKind.MESSAGE, text, TextForm.TOKENS)

    return LoggedRequest(
        "log", 1, segments=(segment(chat.history),), output=(segment(answer),), start_s=chat.sent_s
    )


def engine(policy: str) -> LLM:
    """An engine whose pool is smaller than 16 running answers, its kernels compiled."""
    llm = LLM(
        "ramify-tiny",
        kv_cache_tokens=POOL,
        page_size=PAGE,
        policy=policy,
        max_num_seqs=CONCURRENT,
        max_batch_tokens=BATCH,
        check_sample=0.0,
    )
    llm.core.add_request(list(range(3, 40)), SamplingParams(max_tokens=4))
    while llm.core.has_unfinished:
        llm.core.step()
    llm.core.cache.clear()
    return llm


def simulated(served: Served, policy: str, cost: CostModel) -> EngineRun:
    trace = page_trace(served.requests, page_size=PAGE, insert_outputs=True).trace
    return replay_engine(trace, POOL, policy, cost, max_num_seqs=CONCURRENT, max_batch_tokens=BATCH)


@pytest.mark.parametrize(("policy", "seed"), [("auto", 1), ("lru", 2)])
def test_simulated_hits_are_those_of_the_engine(policy: str, seed: int) -> None:
    """16 running, a full pool, timed arrivals, preemptions: the hit rate agrees within 0.5 points."""
    llm = engine(policy)
    cost = CostModel(step_s=4e-4, token_s=1.2e-5, read_s=8e-9)

    served = serve(llm, 32, cost, gap_s=0.005, seed=seed)
    run = simulated(served, policy, cost)

    assert served.num_preemptions > 5
    assert served.most_running == CONCURRENT
    assert llm.core.cache.stats().evicted_pages > 3 * POOL // PAGE
    assert run.num_requests == len(served.requests) > 90
    assert run.num_preemptions == pytest.approx(served.num_preemptions, rel=0.5)
    assert run.hit_rate == pytest.approx(served.hit_rate, abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "seed"), [("auto", 3), ("lru", 4)])
def test_calibrated_costs_predict_the_engine_in_real_time(policy: str, seed: int) -> None:
    """With the clock of this machine, costs fitted to the steps predict the hit rate as well."""
    llm = engine(policy)

    served = serve(llm, 200, None, gap_s=0.01, seed=seed)
    run = simulated(served, policy, fit_cost(served.steps))

    assert served.num_preemptions > 0
    assert run.hit_rate == pytest.approx(served.hit_rate, abs=TOLERANCE)


def test_calibration_measures_this_machine() -> None:
    """`calibrate` fits a model to steps of the real engine: more tokens take longer."""
    cost = calibrate("ramify-tiny", max_seconds=5, max_model_len=600)

    rates = cost.facts["prefill_tokens_per_s"]
    assert cost.step(512, 512 * 256) > cost.step(1, 64) > 0
    assert all(rate > 0 for rate in rates.values())
    assert set(cost.facts["decode_step_s"]) <= {"1", "4", "16"}
    assert np.isfinite(cost.facts["p90_error"])


def test_a_cost_file_goes_from_calibrate_to_simulate(tmp_path: Path) -> None:
    """`ramify calibrate --json` writes what `ramify simulate --cost` reads."""
    cost, trace, report = (tmp_path / name for name in ("cost.json", "trace.jsonl", "report.json"))
    row = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [0, 1]}
    trace.write_text(2 * (json.dumps(row) + "\n"), encoding="utf-8")
    run = CliRunner().invoke

    measured = run(app, ["calibrate", "--max-seconds", "1", "--json", str(cost)])
    done = run(
        app,
        ["simulate", str(trace), "--cost", str(cost), "--capacity", "1M", "--json", str(report)],
    )

    assert measured.exit_code == done.exit_code == 0, measured.output + done.output
    assert "us a token" in measured.stdout
    assert "TTFT p50" in done.stdout
    runs = json.loads(report.read_text(encoding="utf-8"))["engine"]["runs"]
    assert runs["lru"]["1000000"]["hit_rate"] == pytest.approx(512 / 1200)
    assert run(app, ["calibrate", "--max-seconds", "0"]).exit_code == 2
