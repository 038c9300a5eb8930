"""Deterministic streams of (prompt, output), in the order in which they are served."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from core.contract import AbsentError, Tokens

Request = tuple[Tokens, Tokens]  # prompt, output

VOCABULARY = 128_000
RESERVED = 256  # ids that no workload uses
TRACE_PAGE = 512  # tokens that one hash id of a Mooncake trace stands for
TRACE_VARIABLE = "RAMIFY_TRACE"
DEFAULT_TRACE = (
    Path(__file__).parents[3] / "shared" / "data" / "mooncake" / "conversation_trace.jsonl"
)
HOW_TO_GET_THE_TRACE = (
    "take conversation_trace.jsonl from the FAST25 release in the repository kvcache-ai/Mooncake "
    f"on GitHub and name it with --trace or {TRACE_VARIABLE}"
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A stream of requests and the size of the pool that serves it."""

    name: str
    title: str
    num_tokens: int  # capacity of the pool
    evicts: bool  # with False, every core that works has the same hits
    load: Callable[[int | None, Path | None], list[Request]]  # number of requests, trace


def tokens_of(space: int, item: int, count: int) -> Tokens:
    """Return `count` token ids, a pure function of `space` and `item`."""
    with np.errstate(over="ignore"):
        bits = np.arange(count, dtype=np.uint64) + np.uint64((space << 56) + (item << 24))
        return _mixed(bits)


def _mixed(bits: np.ndarray[tuple[int, ...], np.dtype[np.uint64]]) -> Tokens:
    """Map counters to token ids with the finaliser of splitmix64."""
    with np.errstate(over="ignore"):
        bits = bits + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
    return (bits % np.uint64(VOCABULARY - RESERVED) + np.uint64(RESERVED)).astype(np.int32)


# -- the four workloads of the table -------------------------------------------------------------


def conversation(limit: int | None, trace: Path | None) -> list[Request]:
    """The first requests of a Mooncake trace; each hash id expands to a fixed 512 tokens."""
    offsets = np.arange(TRACE_PAGE, dtype=np.uint64)
    requests: list[Request] = []
    for at, line in enumerate(islice(read_trace(find_trace(trace)), limit or 2_000)):
        ids = np.array(line.hash_ids, dtype=np.uint64)[:, None] * np.uint64(TRACE_PAGE)
        prompt = _mixed((ids + offsets).reshape(-1))[: line.input_length]
        requests.append((prompt, tokens_of(1, at, max(1, line.output_length))))
    return requests


def few_shot(limit: int | None, _: Path | None) -> list[Request]:
    """64 system prompts of 4,096 tokens, 64 questions to each, in shuffled order."""
    shared = [tokens_of(2, group, 4_096) for group in range(64)]
    order = np.repeat(np.arange(64), 64)
    np.random.default_rng(1).shuffle(order)
    return [
        (np.concatenate([shared[group], tokens_of(3, at, 64)]), tokens_of(4, at, 128))
        for at, group in enumerate(order[:limit])
    ]


def chat(limit: int | None, _: Path | None) -> list[Request]:
    """256 chats of eight turns; each turn is 768 user tokens and 256 model tokens."""
    rng = np.random.default_rng(2)
    history = [np.empty(0, np.int32) for _ in range(256)]
    requests: list[Request] = []
    for turn in range(8):
        for user in rng.permutation(256):
            at = int(user) * 8 + turn
            prompt = np.concatenate([history[user], tokens_of(5, at, 768)])
            output = tokens_of(6, at, 256)
            requests.append((prompt, output))
            history[user] = np.concatenate([prompt, output])
    if limit is None:
        return requests
    kept = {len(requests) * at // limit for at in range(limit)}  # of every turn
    return [request for at, request in enumerate(requests) if at in kept]


def nothing_shared(limit: int | None, _: Path | None) -> list[Request]:
    """2,048 requests of 1,024 tokens with nothing in common; the pool holds 500 of them."""
    return [(tokens_of(7, at, 960), tokens_of(8, at, 64)) for at in range(limit or 2_048)]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("trace", "A. conversation trace, 2 M tokens", 2_000_000, True, conversation),
        Workload("few-shot", "B. few-shot, 64 × 64", 2_000_000, False, few_shot),
        Workload("chat", "C. chat, 256 × 8 turns", 4_000_000, False, chat),
        Workload("unshared", "D. nothing shared, full pool", 512_000, True, nothing_shared),
    )
}


def small_and_tight(page_size: int) -> list[Request]:
    """Random requests that share and branch, for a pool of 64 pages: for the audit."""
    rng = np.random.default_rng(3)
    known = [np.empty(0, np.int32)]
    requests: list[Request] = []
    for at in range(600):
        stem = known[int(rng.integers(max(0, len(known) - 12), len(known)))]
        kept = stem[: int(rng.integers(0, len(stem) + 1))]
        prompt = np.concatenate([kept, tokens_of(9, at, int(rng.integers(1, 4 * page_size)))])
        output = tokens_of(10, at, int(rng.integers(1, 2 * page_size)))
        requests.append((prompt, output))
        whole = np.concatenate([prompt, output])
        known.append(whole[: 24 * page_size])
    return requests


# -- traces --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request of a Mooncake trace; lengths in tokens."""

    input_length: int
    output_length: int
    hash_ids: list[int]


def find_trace(given: Path | None) -> Path:
    """The trace that was named, or the default one.

    Raises:
        AbsentError: it is not there.
    """
    path = given or Path(os.environ.get(TRACE_VARIABLE) or DEFAULT_TRACE)
    if not path.is_file():
        raise AbsentError(f"no trace at {path}: {HOW_TO_GET_THE_TRACE}")
    return path


def read_trace(path: Path) -> Iterator[TraceLine]:
    """Yield the requests of a trace, in order of arrival."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            yield TraceLine(record["input_length"], record["output_length"], record["hash_ids"])
