"""Hit rate of a cluster on this machine beside the simulator's prediction for the same traffic.

    make bench-prediction                                   4 replicas, 2 to 3 minutes
    make bench-prediction ARGS="--sessions 20 --seed 3"

Conversations are drawn with their times. A simulated fleet serves them in virtual time, with steps
as long as one replica here was measured to take; then as many real engines serve them in real time,
through the client that `ramify serve --replicas` uses. Questions are random token ids, answers are what
the model says. Exits with 1 if the hit rates differ by more than `LIMIT`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from machine import commit, cpu_model

from ramify.analysis.simulation.page_trace import PageTrace
from ramify.cluster.client import ClusterLLM
from ramify.cluster.cpu_shares import shares_of_this_machine
from ramify.cluster.launch import local_cluster
from ramify.cluster.local_processes import LocalOptions
from ramify.cluster.simulation.fleet import FleetRun, serve_trace
from ramify.cluster.simulation.rules import RULES
from ramify.cluster.simulation.traffic import PAGE_SIZE, sessions
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams
from ramify.step_cost import CostModel

MODEL = "ramify-tiny"
MAX_ROWS = 64
LIMIT = 0.03  # of the hit rates' difference
PROBE_TOKENS, NUM_PROBES = 512, 5


def traffic(num_sessions: int, per_s: float, seed: int) -> PageTrace:
    """Conversations that fit into the model's context of 2,048 tokens, in whole pages."""
    trace = sessions(
        num_sessions,
        per_s,
        seed,
        turns=(1, 8),
        pause_s=(0.5, 4.0),
        system=(8, 24),
        question=(1, 6),
        answer=(1, 3),
        num_systems=8,
    )
    return dataclasses.replace(trace, num_tokens=trace.num_lookup_pages * np.int64(PAGE_SIZE))


class TracePages:
    """Token ids of a trace's pages: random for a question, what the model said for an answer."""

    def __init__(self, trace: PageTrace, vocab_size: int, seed: int) -> None:
        self._trace = trace
        rng = random.Random(seed)
        loop = asyncio.get_running_loop()
        # A prompt waits for the answers that it has in it.
        self._ids: dict[int, asyncio.Future[Sequence[int]]] = {}
        for number in range(len(trace)):
            for page in self._answer(number):
                self._ids[page] = loop.create_future()
        for page in np.unique(trace.page_ids).tolist():
            if page not in self._ids:
                self._ids[page] = loop.create_future()
                self._ids[page].set_result([rng.randrange(3, vocab_size) for _ in range(PAGE_SIZE)])

    def _answer(self, number: int) -> list[int]:
        pages: list[int] = self._trace.pages(number).tolist()
        return pages[self._trace.num_lookup_pages[number] :]

    async def prompt(self, number: int) -> list[int]:
        """The prompt of a request, as soon as the answers in it are complete."""
        pages = self._trace.pages(number)[: self._trace.num_lookup_pages[number]].tolist()
        ids: list[int] = []
        for page in pages:
            ids += await self._ids[page]
        return ids

    def set_answer(self, number: int, token_ids: Sequence[int]) -> None:
        """What the model said, and a token: the last one of an answer is not computed."""
        for at, page in enumerate(self._answer(number)):
            self._ids[page].set_result(token_ids[at * PAGE_SIZE : (at + 1) * PAGE_SIZE])


async def serve(
    llm: ClusterLLM, trace: PageTrace, seed: int
) -> tuple[list[RequestOutput], list[float]]:
    """The outputs of a trace's requests, and how late each was sent."""
    pages = TracePages(trace, llm.description.vocab_size, seed)
    begin_s = time.monotonic()

    async def serve_one(number: int) -> tuple[RequestOutput, float]:
        due_s = begin_s + float(trace.start_s[number])
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        prompt = await pages.prompt(number)
        late_s = time.monotonic() - due_s
        num_output = int(trace.num_output[number])
        output = await llm.generate(prompt, params(num_output + 1))
        if output.error is not None:
            raise output.error
        pages.set_answer(number, output.token_ids[:num_output])
        return output, late_s

    served = await asyncio.gather(*(serve_one(number) for number in range(len(trace))))
    return [output for output, _ in served], [late_s for _, late_s in served]


def params(num_output: int) -> SamplingParams:
    """An answer of exactly this length."""
    return SamplingParams(max_tokens=num_output, ignore_eos=True, temperature=1.0)


async def measure(llm: ClusterLLM, seed: int) -> CostModel:
    """Times of steps on an idle replica: the medians of a few prompts; clears the caches."""
    rng = random.Random(seed)
    vocab_size = llm.description.vocab_size
    first_s, decode_s, short_s = [], [], []
    for _ in range(NUM_PROBES):
        ids = [rng.randrange(3, vocab_size) for _ in range(PROBE_TOKENS)]
        metrics = (await llm.generate(ids, params(33))).metrics
        assert metrics.ttft_s is not None
        first_s.append(metrics.ttft_s)
        decode_s.append((metrics.total_s - metrics.ttft_s) / 32)
        short = (await llm.generate(ids[-PAGE_SIZE:], params(1))).metrics
        assert short.ttft_s is not None
        short_s.append(short.ttft_s)
    token_s = (statistics.median(first_s) - statistics.median(short_s)) / (PROBE_TOKENS - PAGE_SIZE)
    await llm.cache.clear()
    return CostModel(statistics.median(decode_s), max(0.0, token_s), 0.0)


def predict(trace: PageTrace, args: argparse.Namespace, cost: CostModel) -> FleetRun:
    return serve_trace(
        trace,
        RULES["ramify"],
        num_replicas=args.replicas,
        replica_tokens=args.kv_cache_tokens,
        cost=cost,
        max_rows=MAX_ROWS,
    )


async def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Predicted and measured hit rates and times to first token."""
    trace = traffic(args.sessions, args.rate, args.seed)
    engine = {
        "kv_cache_tokens": args.kv_cache_tokens,
        "page_size": PAGE_SIZE,
        "max_num_seqs": MAX_ROWS,
    }
    options = LocalOptions(
        model=MODEL, engine=engine, shares=shares_of_this_machine(args.replicas, 1)
    )
    async with local_cluster(options) as llm:
        cost = await measure(llm, args.seed)
        run = predict(trace, args, cost)
        outputs, late_s = await serve(llm, trace, args.seed)
    num_hit = sum(output.cache.read_tokens + output.cache.shared_tokens for output in outputs)
    ttft_s = [output.metrics.ttft_s or 0.0 for output in outputs]
    hit_rate = num_hit / trace.total_tokens
    return {
        "commit": commit(),
        "cpu": cpu_model(),
        "requests": len(trace),
        "step_ms": round(cost.step_s * 1e3, 3),
        "token_us": round(cost.token_s * 1e6, 2),
        "predicted_hit_rate": round(run.hit_rate, 4),
        "hit_rate": round(hit_rate, 4),
        "difference": round(hit_rate - run.hit_rate, 4),
        "predicted_ttft_p50_ms": round(run.percentile_s(50) * 1e3, 1),
        "ttft_p50_ms": round(statistics.median(ttft_s) * 1e3, 1),
        "late_p99_s": round(float(np.percentile(late_s, 99)), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--kv-cache-tokens", type=int, default=8192, help="of each replica")
    parser.add_argument("--sessions", type=int, default=120)
    parser.add_argument("--rate", type=float, default=2.0, help="sessions that begin a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = asyncio.run(compare(args))
    for name, value in result.items():
        print(f"{name:22} {value}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(abs(result["difference"]) > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
