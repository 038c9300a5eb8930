"""Random trees of hashed prompts, and caches over them that are too simple to be wrong."""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from ramify.analysis.records import HashedPrompt, LoggedRequest, Usage
from ramify.analysis.simulation.page_trace import PageTrace
from ramify.analysis.simulation.sources import page_trace

TRACE = Path("shared", "data", "mooncake", "conversation_trace.jsonl")
FOLDERS = Path(__file__).parents[4:6]  # beside the checkout, or above its neighbours
MOONCAKE = next((at / TRACE for at in FOLDERS if (at / TRACE).exists()), FOLDERS[0] / TRACE)
BLOCK = 4
Path_ = tuple[int, ...]

# A prompt is a path in a tree with few branches, so that prompts share heads of many lengths.
PATHS = st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), min_size=1, max_size=40)


def hashed_request(
    path: Sequence[int],
    number: int,
    *,
    tail: int = 1,
    start_s: float | None = None,
    output: int = 0,
) -> LoggedRequest:
    """A request whose blocks are named by their path from the root, and `tail` tokens more."""
    ids = tuple(prefix_id(path[: depth + 1]) for depth in range(len(path)))
    ids += (prefix_id((*path, 7, number)),) if tail else ()
    return LoggedRequest(
        "trace.jsonl",
        number + 1,
        hashed=HashedPrompt(BLOCK, ids, len(path) * BLOCK + tail),
        start_s=float(number) if start_s is None else start_s,
        usage=Usage(num_output=output),
    )


def prefix_id(path: Sequence[int]) -> int:
    number = 1
    for step in path:
        number = number * 1009 + step + 1
    return number % (1 << 61)


def trace_of(paths: Sequence[Sequence[int]], **options: int) -> PageTrace:
    requests = [hashed_request(path, number, **options) for number, path in enumerate(paths)]
    return page_trace(requests).trace


def lru_hits(paths: Sequence[Path_], capacity: int) -> int:
    """Pages that an LRU cache of this many pages hits, each path refreshed from leaf to root."""
    cache: OrderedDict[Path_, None] = OrderedDict()
    hits = 0
    for path in paths:
        prefixes = [path[: depth + 1] for depth in range(len(path))]
        hits += sum(1 for _ in itertools.takewhile(lambda prefix: prefix in cache, prefixes))
        for prefix in reversed(prefixes):
            cache[prefix] = None
            cache.move_to_end(prefix)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def best_hits(paths: Sequence[Path_], capacity: int) -> int:
    """The most pages that any choice of what to keep hits, by trying all choices, holes included."""
    states: dict[frozenset[Path_], int] = {frozenset(): 0}
    for path in paths:
        prefixes = [path[: depth + 1] for depth in range(len(path))]
        after: dict[frozenset[Path_], int] = {}
        for kept, hits in states.items():
            num_hits = hits + sum(prefix in kept for prefix in prefixes)
            pool = kept | set(prefixes)
            size = min(capacity, len(pool))
            for choice in itertools.combinations(sorted(pool), size):
                state = frozenset(choice)
                after[state] = max(after.get(state, 0), num_hits)
        states = after
    return max(states.values(), default=0)


def leaf_first_hits(paths: Sequence[Path_], capacity: int, policy: str) -> int:
    """Pages that a cache of this many pages hits that evicts the oldest page without kept pages behind.

    The age is that of the last use for "lru", of the computation for "fifo". Pages that the request
    itself hits are not evicted for its other pages.
    """
    kept: dict[Path_, int] = {}
    hits = 0
    for number, path in enumerate(paths):
        prefixes = [path[: depth + 1] for depth in range(len(path))]
        cached = list(itertools.takewhile(kept.__contains__, prefixes))
        hits += len(cached)
        missing = prefixes[len(cached) :]
        while len(kept) + len(missing) > capacity:
            inner = {page[:-1] for page in kept} | set(cached)
            del kept[min((page for page in kept if page not in inner), key=kept.__getitem__)]
        kept |= dict.fromkeys(prefixes if policy == "lru" else missing, number)
    return hits
