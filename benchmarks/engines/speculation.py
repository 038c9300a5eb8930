"""Speculative decoding on and off: one request, text that repeats itself and text that does not."""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict, dataclass
from typing import Any

from engines.contract import Setup
from engines.models import MODELS, TITLES, VALUE_BYTES, shape_of, write_model
from engines.registry import SPECULATION
from engines.run import LOAD_LIMIT_S, TooSlowError, Worker, WorkerGoneError
from engines.stats import median_interval
from engines.workloads import Task

PROMPT, NEW = 512, 128
EDIT_EVERY = 12  # of the code is changed: one token in so many
MAX_LEN = 2 * (PROMPT + NEW)


@dataclass(frozen=True, slots=True)
class Text:
    """A kind of text: which checkpoint continues it so, and its prompts."""

    name: str
    title: str
    follows: bool  # the checkpoint whose next token depends on the last one alone


TEXTS = (
    Text("edit", f"code edit: the answer is the prompt but for one token in {EDIT_EVERY}", True),
    Text("again", "a question asked again", False),
    Text("random", "random text, nothing repeats", False),
)


def speculation(args: argparse.Namespace, model: str, dtype: str) -> dict[str, Any]:
    """All texts; every mode has a process per checkpoint and takes turns with the others."""
    print(
        f"\n### Speculation, {TITLES[model]}, {dtype}: one request, {PROMPT} prompt tokens, {NEW} new\n"
    )
    print("| text | mode | decode tokens/s | × off: median (interval) | same tokens |")
    print("|---|---|---:|---:|---|", flush=True)
    found: dict[str, Any] = {"model": model, "dtype": dtype, "texts": {}}
    for text in TEXTS:
        folder = write_model(args.scratch, model, dtype, follows=text.follows)
        setup = Setup(
            folder, dtype, args.threads, MAX_LEN, 16 * MAX_LEN,
            shape_of(model).kv_values * VALUE_BYTES[dtype],
        )  # fmt: skip
        found["texts"][text.name] = _measure(args, text, setup, MODELS[model]["vocab_size"])
    return found


def _measure(args: argparse.Namespace, text: Text, setup: Setup, vocab: int) -> dict[str, Any]:
    workers: dict[str, Worker] = {}
    samples: dict[str, list[dict[str, Any]]] = {}
    given = asdict(setup) | {"folder": str(setup.folder)}
    try:
        for mode, entry in SPECULATION.items():
            worker = Worker(entry, args.peers, setup.threads)
            workers[mode] = worker
            answer = worker.ask(LOAD_LIMIT_S, setup=given)
            if "absent" in answer:
                print(f"| {text.title} | {mode} | {answer['absent']} | | |", flush=True)
                return {"absent": answer["absent"]}
        code = _code(workers["off"], LOAD_LIMIT_S, vocab) if text.follows else []
        for pair in range(args.pairs + 1):  # the first one warms up
            rng = random.Random(f"{text.name} {pair}")
            task = _task(text, rng, vocab, code)
            for mode in list(workers) if pair % 2 == 0 else list(workers)[::-1]:
                sample = workers[mode].ask(args.limit, task=asdict(task))
                if pair:
                    samples.setdefault(mode, []).append(sample)
    except (WorkerGoneError, TooSlowError) as gone:
        print(f"| {text.title} | failed: {gone} | | | |", flush=True)
        return {"failed": str(gone)}
    finally:
        for worker in workers.values():
            worker.end()
    off = samples["off"]
    for mode, mine in ((mode, samples[mode]) for mode in SPECULATION):
        ratios = [b["between_s"] / a["between_s"] for a, b in zip(mine, off, strict=True)]
        interval = median_interval(ratios)
        rate = 1 / median_interval([one["between_s"] for one in mine]).mid
        same = sum(a["tokens"] == b["tokens"] for a, b in zip(mine, off, strict=True))
        print(
            f"| {text.title} | {mode} | {rate:,.1f} | {interval.mid:.2f} ({interval.low:.2f}–"
            f"{interval.high:.2f}, {interval.level:.0%}) | {same}/{len(off)} |",
            flush=True,
        )
    return {mode: [one["between_s"] for one in mine] for mode, mine in samples.items()}


def _code(worker: Worker, limit_s: float, vocab: int) -> list[int]:
    """What the model of `follows` says after one token, until it would repeat itself.

    Of several beginnings the one that goes on longest: each of its tokens is there once, so that an
    edit leaves nothing else to copy from.
    """
    rng = random.Random("code")
    starts = [rng.randrange(3, vocab) for _ in range(16)]
    task = Task([], [[[one] for one in starts]], PROMPT)
    answers: list[list[int]] = worker.ask(limit_s, task=asdict(task))["tokens"]
    talks = [[start, *answer] for start, answer in zip(starts, answers, strict=True)]
    return max(map(until_repeated, talks), key=len)[: PROMPT - 1]


def until_repeated(tokens: list[int]) -> list[int]:
    """The beginning in which no token occurs twice."""
    seen: set[int] = set()
    for place, token in enumerate(tokens):
        if token in seen:
            return tokens[:place]
        seen.add(token)
    return tokens


def edited(code: list[int], rng: random.Random, vocab: int) -> list[int]:
    """A prompt that asks for the code again: before it random tokens, in it one change in so many.

    It ends with the code's first token; what follows is the code as it was before the changes.
    """
    before = [rng.randrange(3, vocab) for _ in range(PROMPT - 1 - len(code))]
    changed = [
        rng.randrange(3, vocab) if place % EDIT_EVERY == EDIT_EVERY - 1 else token
        for place, token in enumerate(code)
    ]
    return [*before, *changed, code[0]]


def _task(text: Text, rng: random.Random, vocab: int, code: list[int]) -> Task:
    """Prompts of one pair."""
    if text.name == "edit":
        return Task([], [[edited(code, rng, vocab)]], NEW)
    prompt = [rng.randrange(3, vocab) for _ in range(PROMPT)]
    return Task([], [[prompt]], NEW) if text.name == "random" else _again(prompt)


def _again(prompt: list[int]) -> Task:
    """The question and its whole answer were there before the clock started."""
    return Task([prompt], [[prompt]], NEW, before_new=NEW)
