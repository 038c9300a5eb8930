"""Speculative decoding on and off: one request, text that repeats itself and text that does not."""

from __future__ import annotations

import argparse
import random
from dataclasses import asdict, dataclass
from typing import Any

from engines.contract import Setup
from engines.json_process import ProcessGoneError, TooSlowError
from engines.models import MODELS, TITLES, VALUE_BYTES, shape_of, write_model
from engines.registry import SPECULATION
from engines.run import LOAD_LIMIT_S, Worker
from engines.stats import median_interval
from engines.workloads import Task

PROMPT, NEW = 512, 128
EDIT_EVERY = 12  # one token in 12 of the code is changed
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
    """Measure every text; each mode has its own process per checkpoint, and modes alternate."""
    print(
        f"\n### Speculation, {TITLES[model]}, {dtype}: one request, {PROMPT} prompt tokens, {NEW} new\n"
    )
    print("| text | mode | decode tokens/s | × off: median (interval) | same tokens |")
    print("|---|---|---:|---:|---|", flush=True)
    results: dict[str, Any] = {"model": model, "dtype": dtype, "texts": {}}
    for text in TEXTS:
        folder = write_model(args.scratch, model, dtype, follows=text.follows)
        setup = Setup(
            folder, dtype, args.threads, MAX_LEN, 16 * MAX_LEN,
            shape_of(model).kv_values * VALUE_BYTES[dtype],
        )  # fmt: skip
        results["texts"][text.name] = _measure(args, text, setup, MODELS[model]["vocab_size"])
    return results


def _measure(args: argparse.Namespace, text: Text, setup: Setup, vocab: int) -> dict[str, Any]:
    workers: dict[str, Worker] = {}
    samples: dict[str, list[dict[str, Any]]] = {}
    setup_fields = asdict(setup) | {"folder": str(setup.folder)}
    try:
        for mode, entry in SPECULATION.items():
            worker = Worker(entry, args.peers, setup.threads)
            workers[mode] = worker
            answer = worker.ask(LOAD_LIMIT_S, setup=setup_fields)
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
    except (ProcessGoneError, TooSlowError) as gone:
        print(f"| {text.title} | failed: {gone} | | | |", flush=True)
        return {"failed": str(gone)}
    finally:
        for worker in workers.values():
            worker.end()
    off = samples["off"]
    for mode, mine in ((mode, samples[mode]) for mode in SPECULATION):
        ratios = [b["between_s"] / a["between_s"] for a, b in zip(mine, off, strict=True)]
        interval = median_interval(ratios)
        rate = 1 / median_interval([timing["between_s"] for timing in mine]).mid
        same = sum(a["tokens"] == b["tokens"] for a, b in zip(mine, off, strict=True))
        print(
            f"| {text.title} | {mode} | {rate:,.1f} | {interval.mid:.2f} ({interval.low:.2f}–"
            f"{interval.high:.2f}, {interval.level:.0%}) | {same}/{len(off)} |",
            flush=True,
        )
    return {mode: [timing["between_s"] for timing in mine] for mode, mine in samples.items()}


def _code(worker: Worker, limit_s: float, vocab: int) -> list[int]:
    """The longest greedy answer without a repeated token, over 16 random first tokens.

    Each token occurs once, so a drafter has only one position to copy from.
    """
    rng = random.Random("code")
    starts = [rng.randrange(3, vocab) for _ in range(16)]
    task = Task([], [[[start] for start in starts]], PROMPT)
    answers: list[list[int]] = worker.ask(limit_s, task=asdict(task))["tokens"]
    talks = [[start, *answer] for start, answer in zip(starts, answers, strict=True)]
    return max(map(until_repeated, talks), key=len)[: PROMPT - 1]


def until_repeated(tokens: list[int]) -> list[int]:
    """The longest prefix in which no token occurs twice."""
    seen: set[int] = set()
    for position, token in enumerate(tokens):
        if token in seen:
            return tokens[:position]
        seen.add(token)
    return tokens


def edited(code: list[int], rng: random.Random, vocab: int) -> list[int]:
    """A prompt of random tokens, then `code` with one token in EDIT_EVERY replaced.

    The prompt ends with the code's first token, so that the model continues the unedited code.
    """
    before = [rng.randrange(3, vocab) for _ in range(PROMPT - 1 - len(code))]
    changed = [
        rng.randrange(3, vocab) if position % EDIT_EVERY == EDIT_EVERY - 1 else token
        for position, token in enumerate(code)
    ]
    return [*before, *changed, code[0]]


def _task(text: Text, rng: random.Random, vocab: int, code: list[int]) -> Task:
    """The task that every mode runs in one repetition."""
    if text.name == "edit":
        return Task([], [[edited(code, rng, vocab)]], NEW)
    prompt = [rng.randrange(3, vocab) for _ in range(PROMPT)]
    return Task([], [[prompt]], NEW) if text.name == "random" else _again(prompt)


def _again(prompt: list[int]) -> Task:
    """A task whose prompt and whole answer are cached before the clock starts."""
    return Task([prompt], [[prompt]], NEW, before_new=NEW)
