"""The cluster's router alone: a decision, events, and the index, for 100 replicas of 100,000 pages.

    make bench-router                          about three minutes
    make bench-router ARGS="--quick"           10 replicas, a few seconds
    make bench-router ARGS="--json out.json"

Chains of pages are random hashes, as a cache's are. Two fleets: in the first every chain is on four
replicas, in the second all pages are different, the worst case of an index. One prefix is on all
replicas: prompts behind it are a row of their own, each beside 500 others in flight behind it. Hashing
a prompt is stated apart, since the server does it once for each request, whatever the number of
replicas; so are the garbage collector's pauses, with what was made before left out, as in the server.

The limits, for 100 replicas x 100,000 pages: a decision 200 us at the 99th percentile for prompts up
to 32k tokens, events 5 us an entry, the index 100 MB at stride 8, and no growth over 10^6 requests.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

from machine import commit, cpu_model

from ramify.cache.events import CacheEvent, SnapshotChunk
from ramify.cache.key import HASH_BYTES, CacheKey
from ramify.cluster.decisions import Decision, Load
from ramify.cluster.mirrors import Mirrors
from ramify.cluster.router import Router

PAGE_SIZE = 16
RUN_PAGES = 16  # of a run of pages in events
PROMPT_TOKENS = (1_024, 4_096, 32_768)
HOT_PAGES = 600  # of the prefix that all replicas have
NUM_LIVE = 500
NUM_DECISIONS = 2_000
LIMITS = {"decision_p99_us": 200.0, "event_us": 5.0, "index_mb": 100.0}


class Fleet:
    """Chains of random page hashes, and a router whose mirrors have them."""

    def __init__(
        self, num_replicas: int, num_pages: int, stride: int, *, shared: int, chain_pages: int
    ) -> None:
        self.rng = random.Random(0)
        self.mirrors = Mirrors(stride=stride)
        self.router = Router(self.mirrors, PAGE_SIZE)
        self.names = [f"replica-{number}" for number in range(num_replicas)]
        self.chains: list[bytes] = []
        self.sequences = dict.fromkeys(self.names, 0)
        for number, name in enumerate(self.names):
            self.mirrors.add(name, number)
            self.router.add(name)
            self.router.load(name, self.draw_load())
        for request in self.mirrors.due_snapshots(0.0):
            empty = SnapshotChunk(0, 0, (), True, bytes(HASH_BYTES))
            self.mirrors.snapshot(request.replica, request.incarnation, request.number, empty)
        self.event_s, self.num_entries = 0.0, 0
        num_chains = num_replicas * num_pages // (shared * chain_pages)
        for number in range(num_chains):
            chain = self.rng.randbytes(HASH_BYTES * chain_pages)
            if number < NUM_DECISIONS:
                self.chains.append(chain)
            for copy in range(shared):
                # Copies are on replicas that lie apart, and all of them get as many chains.
                place = (number + copy * (num_replicas // shared or 1)) % num_replicas
                self._store(place, chain)
        self.hot = self.rng.randbytes(HASH_BYTES * HOT_PAGES)
        for place in range(num_replicas):
            self._store(place, self.hot)

    def draw_load(self) -> Load:
        """A random report of a busy replica."""
        running = self.rng.randrange(64)
        return Load(self.rng.randrange(4096), 0, running, 1e-4, 2e-2)

    def _store(self, place: int, chain: bytes) -> None:
        name, events = self.names[place], []
        for start in range(0, len(chain) // HASH_BYTES, RUN_PAGES):
            self.sequences[name] += 1
            hashes = chain[start * HASH_BYTES : (start + RUN_PAGES) * HASH_BYTES]
            events.append(
                CacheEvent(self.sequences[name], "stored", b"", b"", start=start, hashes=hashes)
            )
        begin = time.thread_time()
        self.mirrors.apply(name, place, events)
        self.event_s += time.thread_time() - begin
        self.num_entries += len(chain) // HASH_BYTES

    def prompt(self, num_pages: int) -> bytes:
        """The page hashes of a prompt that begins with cached pages and ends with others; a tenth has none cached."""
        chain = self.rng.choice(self.chains)
        known = self.rng.choice((0, *range(1, 10))) * min(num_pages, len(chain) // HASH_BYTES) // 10
        return chain[: known * HASH_BYTES] + self.rng.randbytes((num_pages - known) * HASH_BYTES)

    def hot_prompt(self) -> bytes:
        """The page hashes of a prompt behind the prefix that all replicas have."""
        return self.hot + self.rng.randbytes(HASH_BYTES * self.rng.randrange(1, 64))

    def decide(self, page_hashes: bytes) -> tuple[Decision, float]:
        """A decision, and seconds of this thread: other programs' share of the core is not in it."""
        num_tokens = len(page_hashes) // HASH_BYTES * PAGE_SIZE + 1
        begin = time.thread_time()
        decision = self.router.choose(page_hashes, num_tokens)
        seconds = time.thread_time() - begin
        assert isinstance(decision, Decision)
        return decision, seconds


def decisions(fleet: Fleet) -> dict[str, Any]:
    """Times of decisions by prompt, with `NUM_LIVE` requests in flight."""
    result = {}
    for num_tokens in PROMPT_TOKENS:
        num_pages = num_tokens // PAGE_SIZE
        result[f"{num_tokens:,} tokens"] = times_of(fleet, partial(fleet.prompt, num_pages))
    result["behind one prefix"] = times_of(fleet, fleet.hot_prompt)
    return result


def times_of(fleet: Fleet, draw_prompt: Callable[[], bytes]) -> dict[str, float]:
    """Times of decisions, and the longest pause of the garbage collector in them."""
    live: list[int] = []
    times: list[float] = []
    gc.collect()
    gc.freeze()
    with Pauses() as pauses:
        for _ in range(NUM_DECISIONS):
            decision, seconds = fleet.decide(draw_prompt())
            times.append(seconds * 1e6)
            live.append(decision.reservation)
            if len(live) > NUM_LIVE:
                fleet.router.finished(live.pop(0), 100)
            name = fleet.rng.choice(fleet.names)
            fleet.router.load(name, fleet.draw_load())
    gc.unfreeze()
    for number in live:
        fleet.router.finished(number)
    times.sort()
    return {
        "p50_us": statistics.median(times),
        "p99_us": times[int(len(times) * 0.99)],
        "max_us": times[-1],
        "num_gc": len(pauses.seconds),
        "longest_gc_us": max(pauses.seconds, default=0.0) * 1e6,
    }


class Pauses:
    """The garbage collector's pauses within a `with` block, in seconds of this thread."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begin_s = 0.0

    def __enter__(self) -> Self:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        del info
        if phase == "start":
            self._begin_s = time.thread_time()
        else:
            self.seconds.append(time.thread_time() - self._begin_s)


def hashing() -> dict[str, float]:
    """Microseconds to hash prompts, by tokens."""
    result = {}
    for num_tokens in (*PROMPT_TOKENS, 131_072):
        key = CacheKey(array("i", range(num_tokens)))
        times = []
        for _ in range(7):
            begin = time.thread_time()
            key.packed_hashes(PAGE_SIZE)
            times.append(time.thread_time() - begin)
        result[str(num_tokens)] = statistics.median(times) * 1e6
    return result


def index_bytes(num_replicas: int, num_pages: int, stride: int, shared: int) -> dict[str, float]:
    """Memory of the mirrors, as Python's allocator counts it."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    fleet = Fleet(num_replicas, num_pages, stride, shared=shared, chain_pages=256)
    fleet.chains.clear()
    gc.collect()
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return {"entries": len(fleet.mirrors.index), "mb": size / 1e6}


def soak(fleet: Fleet, num_requests: int) -> Iterator[tuple[int, float]]:
    """Requests that come, are computed, evict others and end; yields resident MB now and then."""
    live: list[int] = []
    prompt = fleet.prompt(64)
    for number in range(num_requests):
        if not number % 16:
            prompt = fleet.prompt(64)
        decision, _ = fleet.decide(prompt)
        live.append(decision.reservation)
        place = fleet.names.index(decision.replica)
        # The replica computes 16 pages, and evicts what it computed before.
        fresh = fleet.rng.randbytes(16 * HASH_BYTES)
        events = []
        for kind in ("stored", "removed"):
            fleet.sequences[decision.replica] += 1
            sequence = fleet.sequences[decision.replica]
            events.append(CacheEvent(sequence, kind, b"", b"", start=48, hashes=fresh))
        fleet.mirrors.apply(decision.replica, place, events)
        if number % 10_000 == 9_999:
            fleet.sequences[decision.replica] += 1
            cleared = CacheEvent(fleet.sequences[decision.replica], "cleared")
            fleet.mirrors.apply(decision.replica, place, [cleared])
        if len(live) > NUM_LIVE:
            fleet.router.finished(live.pop(0), 100, 0)
        if number % (num_requests // 10) == 0:
            yield number, resident_mb()
    for reservation in live:
        fleet.router.finished(reservation)
    assert not fleet.router.num_in_flight
    yield num_requests, resident_mb()


def resident_mb() -> float:
    """Resident memory of this process now; its peak where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return pages * resource.getpagesize() / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10 replicas of 10,000 pages")
    parser.add_argument("--soak", type=int, default=1_000_000, help="requests of the soak; 0: none")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    num_replicas, num_pages = (10, 10_000) if args.quick else (100, 100_000)
    num_soak = min(args.soak, 20_000) if args.quick else args.soak
    results: dict[str, Any] = {"commit": commit(), "cpu": cpu_model(), "hashing_us": hashing()}
    print(f"{num_replicas} replicas x {num_pages:,} pages of {PAGE_SIZE} tokens; {cpu_model()}")
    print("hashing, us:", {tokens: round(us) for tokens, us in results["hashing_us"].items()})
    worst = {"decision_p99_us": 0.0, "event_us": 0.0, "index_mb": 0.0}
    for stride in (8, 1):
        shared = 4
        chain_pages = 2_048 if not args.quick else 512
        fleet = Fleet(num_replicas, num_pages, stride, shared=shared, chain_pages=chain_pages)
        row: dict[str, Any] = {
            "event_us": fleet.event_s / fleet.num_entries * 1e6,
            "decisions": decisions(fleet),
        }
        if stride == 8 and num_soak:
            row["soak_mb"] = [round(mb, 1) for _, mb in soak(fleet, num_soak)]
        del fleet
        row["index"] = {"shared by 4": index_bytes(num_replicas, num_pages, stride, 4)}
        if stride == 8:
            row["index"]["all different"] = index_bytes(num_replicas, num_pages, stride, 1)
            worst["index_mb"] = max(size["mb"] for size in row["index"].values())
        worst["event_us"] = max(worst["event_us"], row["event_us"])
        slowest = max(times["p99_us"] for times in row["decisions"].values())
        worst["decision_p99_us"] = max(worst["decision_p99_us"], slowest)
        results[f"stride {stride}"] = row
        print(f"\nstride {stride}: events {row['event_us']:.2f} us an entry")
        for kind, times in row["decisions"].items():
            print(
                f"  {kind:>17}: p50 {times['p50_us']:.0f} us, p99 {times['p99_us']:.0f}, longest "
                f"{times['max_us']:.0f}; longest collection {times['longest_gc_us']:.0f}"
            )
        for kind, size in row["index"].items():
            print(f"  index, pages {kind}: {size['entries']:,} entries, {size['mb']:.0f} MB")
        if "soak_mb" in row:
            print(f"  resident MB over {num_soak:,} requests: {row['soak_mb']}")
    missed = {name: worst[name] for name, limit in LIMITS.items() if worst[name] > limit}
    print("\nabove its limit:", missed or "nothing")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main())
