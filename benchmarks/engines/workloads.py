"""Who asks what, how long the answers are, what is cached before the clock starts.

W1 to W5 are those of whole engines; the `SMALL` ones are prefill and decode by themselves, and small
batches on a shared prefix, short enough for many engines on a larger model.

Prompts are random token ids, new ones in every repetition, so that `cold` is cold for engines that
cannot be told to forget.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from engines.contract import Prompts
from engines.roofline import Turn


@dataclass(frozen=True, slots=True)
class Task:
    """One repetition of one workload, as a worker carries it out.

    Each turn appends its tokens to every user's conversation, answers included, and all users ask
    at once. The clock runs over the turns only.
    """

    before: Prompts  # answered off the clock
    turns: list[Prompts]  # turn → user → tokens that this user appends
    num_new: int
    before_new: int = 1  # tokens of each answer off the clock


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload: one table per model and dtype, one row per engine."""

    name: str
    title: str
    num_requests: int  # at once
    request_tokens: int  # of the longest one, output included
    kv_tokens: int  # that are alive at the same time when prefixes are shared
    make: Callable[[random.Random, int], Task]  # generator, vocabulary size
    roofline: tuple[Turn, ...]
    after: str = ""  # runs right after this one, on what that one left in the cache


def _ids(rng: random.Random, vocab: int, count: int) -> list[int]:
    return [rng.randrange(3, vocab) for _ in range(count)]


def _single(rng: random.Random, vocab: int) -> Task:
    return Task([], [[_ids(rng, vocab, 2048)]], 64)


def _shared(rng: random.Random, vocab: int) -> Task:
    prefix = _ids(rng, vocab, 1024)
    return Task([], [[prefix + _ids(rng, vocab, 32) for _ in range(32)]], 32)


def _shared_again(rng: random.Random, vocab: int) -> Task:
    prefix = _ids(rng, vocab, 1024)  # the generator of `_shared` starts the same way
    _ids(rng, vocab, 32 * 32)
    return Task([], [[prefix + _ids(rng, vocab, 32) for _ in range(32)]], 32)


def _decode(rng: random.Random, vocab: int) -> Task:
    return Task([], [[_ids(rng, vocab, 128)]], 64)


def _prefill(num_tokens: int) -> Callable[[random.Random, int], Task]:
    return lambda rng, vocab: Task([], [[_ids(rng, vocab, num_tokens)]], 1)


def _batch(num_requests: int, *, again: bool = False) -> Callable[[random.Random, int], Task]:
    """Requests on a prefix of 256 tokens with 16 own tokens each; `again`: other ones on the same prefix."""

    def make(rng: random.Random, vocab: int) -> Task:
        prefix = _ids(rng, vocab, 256)
        if again:
            _ids(rng, vocab, 16 * num_requests)
        return Task([], [[prefix + _ids(rng, vocab, 16) for _ in range(num_requests)]], 32)

    return make


def _talk(rng: random.Random, vocab: int) -> Task:
    system = _ids(rng, vocab, 512)
    turns = [[_ids(rng, vocab, 64) for _ in range(8)] for _ in range(4)]
    turns[0] = [system + tokens for tokens in turns[0]]
    return Task([], turns, 64)


def _unshared(rng: random.Random, vocab: int) -> Task:
    return Task([], [[_ids(rng, vocab, 512) for _ in range(32)]], 32)


def _long_prefix(rng: random.Random, vocab: int) -> Task:
    prefix = _ids(rng, vocab, 4096)
    before = [prefix + _ids(rng, vocab, 32)]
    return Task(before, [[prefix + _ids(rng, vocab, 32) for _ in range(32)]], 64)


def _talk_turns() -> tuple[Turn, ...]:
    """Turns of W3: earlier turns are cached, except the last answer token, which has no K/V yet."""
    lengths = [512 + 64 + turn * 128 for turn in range(4)]
    held = [0] + [length + 64 - 1 for length in lengths[:-1]]
    return tuple(
        Turn(cached, 512, length, 8, 64) for cached, length in zip(held, lengths, strict=True)
    )


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "W1", "one request, 2,048 prompt tokens, 64 new",
            1, 2048 + 64, 2112, _single, (Turn(0, 0, 2048, 1, 64),),
        ),
        Workload(
            "W2cold", "32 requests, 1,024 shared + 32 own tokens, 32 new, cold",
            32, 1056 + 32, 1024 + 32 * 80, _shared, (Turn(0, 1024, 1056, 32, 32),),
        ),
        Workload(
            "W2warm", "the same prefix, 32 other questions, warm",
            32, 1056 + 32, 1024 + 64 * 80, _shared_again, (Turn(1024, 1024, 1056, 32, 32),),
            after="W2cold",
        ),
        Workload(
            "W3", "8 users × 4 turns, 512-token system prompt, +64 asked and +64 answered a turn",
            8, 1024 + 32, 512 + 8 * 528, _talk, _talk_turns(),
        ),
        Workload(
            "W4", "32 requests, 512 random tokens, 32 new, nothing shared",
            32, 512 + 32, 32 * 560, _unshared, (Turn(0, 0, 512, 32, 32),),
        ),
        Workload(
            "W5", "32 requests on a 4,096-token shared prefix + 32 own tokens, 64 new, warm",
            32, 4128 + 64, 4096 + 34 * 112, _long_prefix, (Turn(4096, 4096, 4128, 32, 64),),
        ),
    )
}  # fmt: skip

SMALL = {
    workload.name: workload
    for workload in (
        Workload(
            "decode", "one request, 64 new tokens after 128",
            1, 128 + 64, 192, _decode, (Turn(0, 0, 128, 1, 64),),
        ),
        *(
            Workload(
                f"prefill{length}", f"one request, {length:,} prompt tokens, 1 new",
                1, length + 1, length + 16, _prefill(length), (Turn(0, 0, length, 1, 1),),
            )
            for length in (512, 2048)
        ),
        *(
            Workload(
                f"batch{size}{state}",
                f"{size} requests, 256 shared + 16 own tokens, 32 new, {state}",
                size, 272 + 32, 256 + 2 * size * 64, _batch(size, again=state == "warm"),
                (Turn(256 if state == "warm" else 0, 256, 272, size, 32),),
                after=f"batch{size}cold" if state == "warm" else "",
            )
            for size in (8, 32)
            for state in ("cold", "warm")
        ),
    )
}  # fmt: skip


def task_of(name: str, repetition: int, vocab: int) -> Task:
    """The prompts of one repetition; a warm workload gets the prefix of its cold one."""
    workload = (WORKLOADS | SMALL)[name]
    return workload.make(random.Random(f"{workload.after or name} {repetition}"), vocab)
