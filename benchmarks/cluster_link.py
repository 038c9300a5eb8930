"""CPU time and delay that the way through a cluster adds to a token, over engines without a model.

    make bench-cluster ARGS="[--streams 32] [--rate 50] [--seconds 5] [--replicas 1] [--ray] [--json]"

A fake engine makes a token for every stream `--rate` times a second; the token is the time at which
it was made. Each row is one way to its reader:

    engine   `AsyncLLM` in this process
    link     `ClusterLLM` and replicas in processes of their own

and with `--ray`, for which Ray must be installed (`pip install 'ramify[ray]'`), two more: `ray_ways.py`.

"CPU" is the processor time of reader and engine processes, apart, per token; "added" is the time from
the engine's clock to the reader. With `--rate 0` the engines do not wait: tokens per second, and
"first" is the time from a request to its first token, one request after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from ramify.cluster.client import ClusterLLM
from ramify.cluster.replica import Replica
from ramify.config import EngineConfig, resolve
from ramify.engine.async_llm import AsyncLLM
from ramify.engine.core import EngineCore
from ramify.engine.step import SampledTokens, StepPlan, StepResult
from ramify.params import SamplingParams

TICKS_PER_S = 100_000
VOCAB = 1 << 30
PROMPT = [1] * 8
NUM_FIRST = 300  # requests


class PacedExecutor:
    """Answers every sample with the time; waits for the next tick of `rate` before it does."""

    def __init__(self, rate: float) -> None:
        self._period_s = 1 / rate if rate else 0.0
        self._result = StepResult({}, {})

    def begin(self, plan: StepPlan) -> None:
        if self._period_s:
            time.sleep(self._period_s - time.monotonic() % self._period_s)
        sampled = SampledTokens((now_ticks(),))
        self._result = StepResult({spec.request_id: sampled for spec in plan.samples}, {})

    def finish(self) -> StepResult:
        return self._result

    def zero_pages(self, pages: Sequence[int]) -> None:
        pass

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        pass


def now_ticks() -> int:
    return int(time.monotonic() * TICKS_PER_S) % VOCAB


def make_llm(rate: float, streams: int) -> AsyncLLM:
    requested = EngineConfig.of(
        kv_cache_tokens=1 << 22, max_num_seqs=max(64, streams), max_waiting=4096
    )
    config = resolve(requested, model_max_len=1 << 15, token_bytes=1, free_memory=0)
    return AsyncLLM.from_core(EngineCore(config, PacedExecutor(rate), vocab_size=VOCAB))


def child_cpu_s(pids: Sequence[int]) -> float:
    total = 0.0
    for pid in pids:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:  # noqa: PTH123
            fields = file.read().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


async def read(llm: Any, seconds: float, delays: list[float]) -> int:
    """Read one stream for some seconds; returns its tokens."""
    params = SamplingParams(max_tokens=30_000, ignore_eos=True)
    stream = llm.stream(PROMPT, params)
    num_tokens, deadline = 0, time.monotonic() + seconds
    async for event in stream:
        now = now_ticks()
        for token in event.new_token_ids:
            delays.append((now - token) / TICKS_PER_S * 1e3)
        num_tokens += len(event.new_token_ids)
        if time.monotonic() > deadline:
            break
    await stream.aclose()
    return num_tokens


async def first_token_ms(llm: Any) -> list[float]:
    """From a request to its first token, with nothing else to compute."""
    times = []
    for _ in range(NUM_FIRST):
        begin_s = time.perf_counter()
        stream = llm.stream(PROMPT, SamplingParams(max_tokens=30_000, ignore_eos=True))
        await anext(stream)
        times.append((time.perf_counter() - begin_s) * 1e3)
        await stream.aclose()
    return times


async def measure(
    name: str, llm: Any, args: argparse.Namespace, pids: Sequence[int]
) -> dict[str, Any]:
    await asyncio.gather(*(read(llm, 1.0, []) for _ in range(args.streams)))  # warm
    delays: list[float] = []
    begin_s, begin_cpu, begin_child = time.monotonic(), time.process_time(), child_cpu_s(pids)
    counts = await asyncio.gather(*(read(llm, args.seconds, delays) for _ in range(args.streams)))
    wall_s = time.monotonic() - begin_s
    own, theirs = time.process_time() - begin_cpu, child_cpu_s(pids) - begin_child
    total = sum(counts)
    cuts = statistics.quantiles(delays, n=100)
    first = {}
    if not args.rate:  # else it is the wait for the next tick
        times = statistics.quantiles(await first_token_ms(llm), n=100)
        first = {"first_ms_p50": round(times[49], 2), "first_ms_p99": round(times[98], 2)}
    return {
        "way": name,
        "streams": args.streams,
        "tokens_per_s": round(total / wall_s),
        "reader_cpu_us": round(own / total * 1e6, 1),
        "engine_cpu_us": round(theirs / total * 1e6, 1),
        "added_ms_p50": round(cuts[49], 2),
        "added_ms_p99": round(cuts[98], 2),
        **first,
    }


async def in_process(args: argparse.Namespace) -> dict[str, Any]:
    async with make_llm(args.rate, args.streams) as llm:
        return await measure("engine", llm, args, [])


async def over_link(args: argparse.Namespace) -> dict[str, Any]:
    children = [
        await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--child", "--rate", str(args.rate),
            "--streams", str(args.streams), stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for _ in range(args.replicas)
    ]  # fmt: skip
    addresses = {}
    for number, child in enumerate(children):
        assert child.stdout is not None
        addresses[str(number)] = f"127.0.0.1:{int(await child.stdout.readline())}"
    llm = ClusterLLM(addresses, None)
    await llm.start()
    try:
        return await measure("link", llm, args, [child.pid for child in children])
    finally:
        await llm.aclose()
        for child in children:
            child.kill()
            await child.wait()


async def serve_child(args: argparse.Namespace) -> None:
    replica = Replica(make_llm(args.rate, args.streams))
    print(await replica.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await replica.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--ray", action="store_true", help="tokens carried by Ray beside them")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        asyncio.run(serve_child(args))
        return
    rows = [asyncio.run(in_process(args)), asyncio.run(over_link(args))]
    ray_itself: dict[str, Any] = {}
    if args.ray:
        import ray_ways

        ray_rows, ray_itself = ray_ways.rows(args)
        rows = [row | {"ray_cpu_us": 0.0} for row in rows] + ray_rows
    if args.json:
        print(json.dumps({"rows": rows, "ray": ray_itself} if args.ray else rows))
        return
    names = [*rows[0]]
    print(" | ".join(name.rjust(10) for name in names))
    for row in rows:
        print(" | ".join(str(row.get(name, "")).rjust(max(10, len(name))) for name in names))
    if ray_itself:
        print("Ray itself:", ", ".join(f"{name} {value}" for name, value in ray_itself.items()))


if __name__ == "__main__":
    main()
