"""Rows of `cluster_link.py --ray`: the same engines in processes of Ray, their tokens carried by Ray.

    ray serve    a Serve deployment; its replicas' tokens by a streaming `DeploymentHandle`
    ray actors   plain actors; tokens by streaming generators

`ray_cpu_us` is the processor time of Ray's own processes per token. "Ray itself" below the table is
what it takes without any engine: seconds from nothing to ready, and the memory of its processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
import ray
from cluster_link import PROMPT, child_cpu_s, make_llm, measure
from ray import serve

from ramify.params import SamplingParams

OBJECT_STORE_BYTES = 80 << 20
PARAMS = SamplingParams(max_tokens=30_000, ignore_eos=True)


@dataclass(frozen=True)
class Tokens:
    """What a stream yields: the tokens of one step."""

    new_token_ids: Sequence[int]


class Engine:
    """The engine of the other rows; its streams are generators of token lists."""

    def __init__(self, rate: float, streams: int) -> None:
        self._llm = make_llm(rate, streams)
        self._stopped: set[int] = set()

    def pid(self) -> int:
        return os.getpid()

    async def tokens(self, key: int) -> AsyncIterator[list[int]]:
        stream = self._llm.stream(PROMPT, PARAMS)
        try:
            async for event in stream:
                if key in self._stopped:
                    break
                yield list(event.new_token_ids)
        finally:
            self._stopped.discard(key)
            await stream.aclose()

    async def stop(self, key: int) -> None:
        self._stopped.add(key)


class RemoteStream:
    """An answer that Ray carries."""

    def __init__(self, parts: AsyncIterator[list[int]], stop: Callable[[], Awaitable[Any]]) -> None:
        self._parts, self._stop = parts, stop

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        async for ids in self._parts:
            yield Tokens(ids)

    async def aclose(self) -> None:
        await self._stop()
        async for _ in self._parts:  # until the engine has noticed
            pass


class ServeEngines:
    """`stream` as that of an `AsyncLLM`, over a `DeploymentHandle`."""

    def __init__(self, handle: Any) -> None:
        self._handle, self._keys = handle, count()

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> RemoteStream:
        key = next(self._keys)
        parts = self._handle.options(stream=True).tokens.remote(key)

        async def stop() -> None:
            response = self._handle.broadcast("stop", key)
            await response.results_async()

        return RemoteStream(aiter(parts), stop)


class ActorEngines:
    """The same over plain actors, in turn."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors, self._keys = actors, count()

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> RemoteStream:
        key = next(self._keys)
        actor = self._actors[key % len(self._actors)]
        references = actor.tokens.options(num_returns="streaming").remote(key)

        async def parts() -> AsyncIterator[list[int]]:
            async for reference in references:
                yield await reference

        async def stop() -> None:
            await actor.stop.remote(key)

        return RemoteStream(parts(), stop)


def descendants(root: int) -> set[int]:
    """The processes below a process."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text("ascii", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(path.parent.name)] = int(fields[1])
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {root}


def memory_mb(pids: Sequence[int]) -> tuple[float, float]:
    """Resident memory of processes, and what of it no other process shares."""
    resident = private = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
        except OSError:
            continue
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:]}
        resident += sizes["Rss"]
        private += sizes["Private_Clean"] + sizes["Private_Dirty"]
    return resident / 1024, private / 1024


def cpu_s(pids: Sequence[int]) -> dict[int, float]:
    """The processor time of each process that lives."""
    times = {}
    for pid in pids:
        with suppress(OSError):
            times[pid] = child_cpu_s([pid])
    return times


async def row(name: str, engines: Any, args: argparse.Namespace, pids: list[int]) -> dict[str, Any]:
    """Measure, and count the time of Ray's own processes."""
    others = sorted(descendants(os.getpid()) - set(pids))
    begin_s, begin_cpu = time.monotonic(), cpu_s(others)
    result = await measure(name, engines, args, pids)
    share = args.seconds / (time.monotonic() - begin_s)  # without the warming
    num_tokens = result["tokens_per_s"] * args.seconds
    used = sum(value - begin_cpu[pid] for pid, value in cpu_s(others).items()) * share
    return result | {"ray_cpu_us": round(used / num_tokens * 1e6, 1)}


async def over_serve(args: argparse.Namespace) -> dict[str, Any]:
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
    deployment = serve.deployment(
        num_replicas=args.replicas, max_ongoing_requests=10_000, ray_actor_options=options
    )(Engine)
    handle = serve.run(deployment.bind(args.rate, args.streams), route_prefix=None)
    try:
        pids = await handle.broadcast("pid").results_async()
        return await row("ray serve", ServeEngines(handle), args, pids)
    finally:
        serve.delete("default")


async def over_actors(args: argparse.Namespace) -> dict[str, Any]:
    options = {"num_cpus": 0, "max_concurrency": 10_000}
    actors = [
        ray.remote(Engine).options(**options).remote(args.rate, args.streams)
        for _ in range(args.replicas)
    ]
    try:
        pids = [await actor.pid.remote() for actor in actors]
        return await row("ray actors", ActorEngines(actors), args, pids)
    finally:
        for actor in actors:
            ray.kill(actor)


def rows(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows, and what Ray itself takes."""
    begin_s = time.monotonic()
    ray.init(
        address="local",
        num_cpus=8,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    init_s = time.monotonic() - begin_s
    pids = sorted(descendants(os.getpid()))
    resident, private = memory_mb(pids)
    begin_s = time.monotonic()
    serve.start(proxy_location="Disabled")
    serve_s = time.monotonic() - begin_s
    # The controller may live in a worker that Ray had started before.
    with_serve = memory_mb(sorted(descendants(os.getpid())))
    itself = {
        "start_s": round(init_s, 1),
        "processes": len(pids),
        "rss_mb": round(resident),
        "unique_mb": round(private),
        "serve_start_s": round(serve_s, 1),
        "rss_mb_with_serve": round(with_serve[0]),
        "unique_mb_with_serve": round(with_serve[1]),
    }
    try:
        return [asyncio.run(over_serve(args)), asyncio.run(over_actors(args))], itself
    finally:
        serve.shutdown()
        ray.shutdown()
