"""What one call costs as the tree grows: nodes, long prompts, stalls, memory, explanations."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np

from core.contract import Core, Make, Tokens
from core.replay import PAGE_SIZE, resident_mb, serve
from core.workloads import WORKLOADS, tokens_of

Row = dict[str, Any]
Grower = Iterator[Tokens]  # whole pages; serving one adds one node

LONG = 131_072  # tokens of the long prompt
LEVELS = 8  # edges of a path in the branchy tree
PROBES = 200
PATIENCE_S = 120  # for one phase of a core that is slow when its tree is large
CHUNK = 4_096


def flat() -> Grower:
    """Return prompts of one page each, all children of the root."""
    chunk = 0
    while True:
        yield from tokens_of(20, chunk, CHUNK * PAGE_SIZE).reshape(CHUNK, PAGE_SIZE)
        chunk += 1


def branchy() -> Grower:
    """Return combs: paths of eight one-page nodes, each but the last with a second child."""
    comb = 0
    while True:
        pages = tokens_of(21, comb, 2 * LEVELS * PAGE_SIZE).reshape(2 * LEVELS, PAGE_SIZE)
        for level in range(LEVELS):
            stem = pages[:level].reshape(-1)
            yield np.concatenate([stem, pages[level]])
            if level:
                yield np.concatenate([stem, pages[LEVELS + level]])
        comb += 1


SHAPES: dict[str, Callable[[], Grower]] = {"flat": flat, "branchy": branchy}


def grow(make: Make, options: Row, _: bool) -> list[Row]:
    """Measure match, publish and evict at several node counts in a growing tree."""
    sizes: list[int] = options["sizes"]
    shape: str = options["shape"]
    core = make(sizes[-1] + 8 * CHUNK, PAGE_SIZE)
    grower = SHAPES[shape]()
    recent: list[Tokens] = []  # paths of full depth; older ones may be evicted
    depth = PAGE_SIZE * (LEVELS if shape == "branchy" else 1)
    num_nodes = 0
    rows: list[Row] = []
    for size in sizes:
        while num_nodes < size:
            path = next(grower)
            serve(core, path[:-1], path[-1:])
            num_nodes += 1
            if len(path) == depth:
                recent.append(path)
        del recent[: -max(PROBES, len(recent) // 2)]
        rows.append({"shape": shape, "nodes": size, **_probe(core, recent, size)})
    return rows


def _probe(core: Core, paths: list[Tokens], size: int) -> Row:
    """Return median microseconds of a full-path hit and of publishing two more pages."""
    clock = time.perf_counter_ns
    rng = np.random.default_rng(size)
    match_ns: list[int] = []
    publish_ns: list[int] = []
    for probe in range(PROBES):
        path = paths[int(rng.integers(len(paths)))]
        prompt = np.concatenate([path, tokens_of(22, size + probe, PAGE_SIZE + 1)])
        request = core.prepare(prompt, tokens_of(23, size + probe, PAGE_SIZE - 1))
        t0 = clock()
        hit = core.match(request)
        t1 = clock()
        assert hit == len(path), f"{hit} tokens hit of {len(path)}"
        core.alloc(request)
        t2 = clock()
        core.insert(request)
        t3 = clock()
        match_ns.append(t1 - t0)
        publish_ns.append(t3 - t2)
    row = {"match_us": median(match_ns) / 1e3, "publish_us": median(publish_ns) / 1e3}
    for count, repeats in ((1, 50), (64, 5 if size < 10_000 else 20)):
        spent: list[int] = []
        for _ in range(repeats):
            t0 = clock()
            core.evict(count)
            spent.append(clock() - t0)
        row[f"evict_{count}_us"] = median(spent) / 1e3
    return row


# -- one long prompt -----------------------------------------------------------------------------


def long_prompt(make: Make, options: Row, _: bool) -> list[Row]:
    """Measure a hit of 131,072 tokens in 1 and in 64 nodes, beside a memcmp of their bytes."""
    repeats: int = options["repeats"]
    rows = []
    for num_nodes in (1, 64):
        core = make(8 * LONG // PAGE_SIZE, PAGE_SIZE)
        prompt = tokens_of(24, num_nodes, LONG)
        step = LONG // num_nodes
        for end in range(step, LONG + 1, step):
            serve(core, prompt[: end - 1], prompt[end - 1 : end])
            if num_nodes > 1 and end < LONG:  # a second child keeps the node from growing
                serve(
                    core, np.concatenate([prompt[:end], tokens_of(25, end, PAGE_SIZE)]), prompt[:1]
                )
        rows.append({"nodes": num_nodes, **_hit_whole(core, prompt, repeats)})
    return rows


def _hit_whole(core: Core, prompt: Tokens, repeats: int) -> Row:
    clock = time.perf_counter_ns
    kept = prompt.tobytes()
    spent: dict[str, list[int]] = {
        "memcmp_us": [],
        "match_us": [],
        "republish_us": [],
        "twin_us": [],
    }
    for repeat in range(repeats):
        fresh = prompt.tobytes()
        t0 = clock()
        equal = kept == fresh
        spent["memcmp_us"].append(clock() - t0)
        assert equal
        longer = np.concatenate([prompt, tokens_of(26, repeat, 2)])
        request = core.prepare(longer, longer[-1:])
        t0 = clock()
        hit = core.match(request)
        spent["match_us"].append(clock() - t0)
        assert hit == len(prompt), f"{hit} tokens hit of {len(prompt)}"
        core.alloc(request)
        core.insert(request)
        # The same again from a hit: all but its last page is pinned, all of it is known.
        request = core.prepare(prompt[:-1], prompt[-1:])
        core.match(request)
        core.alloc(request)
        t0 = clock()
        core.insert(request)
        spent["republish_us"].append(clock() - t0)
        # Two cold requests for the same prompt; the second publishes what the first just did.
        cold = tokens_of(27, repeat, LONG)
        twins = [core.prepare(cold[:-1], cold[-1:]) for _ in range(2)]
        for twin in twins:
            core.match(twin)
            core.alloc(twin)
        core.insert(twins[0])
        t0 = clock()
        core.insert(twins[1])
        spent["twin_us"].append(clock() - t0)
    return {name: median(times) / 1e3 for name, times in spent.items()}


# -- stalls and memory ---------------------------------------------------------------------------


def stalls(make: Make, options: Row, _: bool) -> list[Row]:
    """Measure the slowest call in a large tree with the garbage collector on, and node memory."""
    size: int = options["size"]
    watch = _Pauses()
    gc.collect()
    before = resident_mb()
    core = make(size, PAGE_SIZE)
    empty = resident_mb()
    grower = flat()
    gc.callbacks.append(watch)
    growing_ns, num_nodes = _slowest_call(core, grower, size)
    grown = resident_mb()
    steady_ns, num_steady = _slowest_call(core, grower, options["steady"])  # every request evicts
    gc.callbacks.remove(watch)
    begin = time.perf_counter_ns()
    gc.collect()
    collect_ns = time.perf_counter_ns() - begin
    row: Row = {
        "nodes": num_nodes,
        "growing_ms": growing_ns / 1e6,
        "steady": num_steady,
        "steady_ms": steady_ns / 1e6,
        "collections": watch.num,
        "full_collections": watch.num_full,
        "pause_ms": watch.longest_ns / 1e6,
        "collect_ms": collect_ns / 1e6,
        "bytes_per_node": None,
        "empty_bytes_per_page": None,
    }
    if before is not None and empty is not None and grown is not None:
        row["bytes_per_node"] = (grown - before) * 2**20 / num_nodes
        row["empty_bytes_per_page"] = (empty - before) * 2**20 / size
    return [row]


class _Pauses:
    """Counts automatic garbage collections and times the longest; append it to `gc.callbacks`."""

    def __init__(self) -> None:
        self.num = self.num_full = self.longest_ns = 0
        self._began = 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter_ns()
            return
        self.longest_ns = max(self.longest_ns, time.perf_counter_ns() - self._began)
        self.num += 1
        self.num_full += info["generation"] == 2


def _slowest_call(core: Core, grower: Grower, count: int) -> tuple[int, int]:
    """Return the nanoseconds of the slowest call over many one-page requests, and their number."""
    clock = time.perf_counter_ns
    slowest = 0
    end = clock() + PATIENCE_S * 10**9
    done = 0
    while done < count and clock() < end:
        path = next(grower)
        request = core.prepare(path[:-1], path[-1:])
        t0 = clock()
        core.match(request)
        t1 = clock()
        core.alloc(request)
        t2 = clock()
        core.insert(request)
        t3 = clock()
        slowest = max(slowest, t1 - t0, t2 - t1, t3 - t2)
        done += 1
    return slowest, done


def memory(make: Make, options: Row, _: bool) -> list[Row]:
    """Measure bytes per cached token after the chats, including the empty pool."""
    workload = WORKLOADS["chat"]
    requests = workload.load(options.get("limit"), None)
    warm = make(CHUNK, PAGE_SIZE)
    serve(warm, *requests[0])
    del warm
    gc.collect()
    before = resident_mb()
    num_tokens = sum(len(prompt) + len(output) for prompt, output in requests)
    core = make(workload.num_tokens // PAGE_SIZE, PAGE_SIZE)
    cached = 0
    for prompt, output in requests:
        request = core.prepare(prompt, output)
        cached += (len(prompt) + len(output)) // PAGE_SIZE * PAGE_SIZE - core.match(request)
        core.alloc(request)
        core.insert(request)
        del request
    gc.collect()
    after = resident_mb()
    if before is None or after is None:
        return [{"tokens": cached, "bytes_per_token": None}]
    return [
        {
            "served_tokens": num_tokens,
            "tokens": cached,
            "bytes_per_token": (after - before) * 2**20 / cached,
        }
    ]


def explanations(make: Make, options: Row, ours: bool) -> list[Row]:
    """Compare `match` with `explain` for a cached, an evicted and an unseen prompt."""
    core: Any = make(WORKLOADS["unshared"].num_tokens // PAGE_SIZE, PAGE_SIZE)
    if not ours or not hasattr(core.cache, "explain"):
        return []
    requests = WORKLOADS["unshared"].load(options.get("limit"), None)
    for prompt, output in requests:
        serve(core, prompt, output)
    clock = time.perf_counter_ns
    prompts = {
        "cached": [prompt for prompt, _ in requests[-PROBES:]],
        "evicted": [prompt for prompt, _ in requests[:PROBES]],
        "never seen": [tokens_of(28, at, 960) for at in range(PROBES)],
    }
    rows = []
    for name, chosen in prompts.items():
        match_ns: list[int] = []
        explain_ns: list[int] = []
        for prompt in chosen:
            key = core.prepare(prompt, prompt[:1]).prompt
            t0 = clock()
            core.cache.match(key)
            t1 = clock()
            core.cache.explain(key)
            t2 = clock()
            match_ns.append(t1 - t0)
            explain_ns.append(t2 - t1)
        rows.append(
            {
                "prompt": name,
                "match_us": median(match_ns) / 1e3,
                "explain_us": median(explain_ns) / 1e3,
            }
        )
    return rows


ROWS: dict[str, Callable[[Make, Row, bool], list[Row]]] = {
    "grow": grow,
    "long_prompt": long_prompt,
    "stalls": stalls,
    "memory": memory,
    "explanations": explanations,
}
