"""Whether a running server gives the same answers with its prefix cache as without.

    python scripts/accuracy.py                      # ramify-tiny and held-out documents
    python scripts/accuracy.py --model DIR --gsm8k test.jsonl

Asks questions with known answers behind shared few-shot prefixes, from 8 threads, three rounds
with the cache off and three with it on. Exit code 1 if an answer depends on the round, or if
nothing was read from the cache.

ramify-tiny answers questions about documents of up to 1,000 tokens, so each prefix is a document
with two answered questions about it; documents are held out by their seeds. GSM8K comes from a
file, `{"question": ..., "answer": "... #### 18"}` per line, and is asked and judged by lm-eval:
`--lm-eval` names an interpreter that has it, as this one need not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gsm8k import Harness
from load_server import Server
from tiny_documents import make_document

ROUNDS, THREADS = 3, 8
SHOTS, NUM_FACTS = 2, 66  # of 1,000 tokens or less
Message = dict[str, str]


@dataclass(frozen=True)
class Question:
    """A prompt and its right answer."""

    messages: list[Message]
    answer: str


@dataclass(frozen=True)
class Round:
    """Answers, seconds and token counts of all questions asked once."""

    answers: list[str]
    seconds: float
    num_prompt: int
    num_cached: int
    num_right: int


def message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def tiny_questions(count: int) -> list[Question]:
    """Return `count` questions about held-out documents; questions of a document share a prefix."""
    questions: list[Question] = []
    number = 0
    while len(questions) < count:
        rng = random.Random(f"held-out-accuracy-{number}")
        document = make_document(rng, num_facts=NUM_FACTS)
        examples, remaining = document.facts[:SHOTS], document.facts[SHOTS:]
        prefix = [message("system", document.text)]
        for fact in examples:
            prefix += [message("user", fact.question), message("assistant", fact.answer)]
        questions += [
            Question([*prefix, message("user", fact.question)], fact.answer) for fact in remaining
        ]
        number += 1
    return questions[:count]


def ask_all(server: Server, questions: list[Question], max_tokens: int) -> Round:
    """Ask all questions from `THREADS` threads; returns answers, seconds and token counts."""
    url = f"http://{server.host}:{server.port}/v1/chat/completions"

    def ask(question: Question) -> dict[str, Any]:
        body = {"messages": question.messages, "temperature": 0, "max_tokens": max_tokens}
        request = urllib.request.Request(url, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
            payload: dict[str, Any] = json.load(answer)
            return payload

    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        payloads = list(pool.map(ask, questions))
    seconds = time.perf_counter() - start
    usages = [payload["usage"] for payload in payloads]
    texts = [str(payload["choices"][0]["message"]["content"]) for payload in payloads]
    return Round(
        texts,
        seconds,
        sum(usage["prompt_tokens"] for usage in usages),
        sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages),
        sum(
            text.strip() == question.answer for text, question in zip(texts, questions, strict=True)
        ),
    )


def ask_harness(harness: Harness, server: Server) -> Round:
    """Run lm-eval's questions against the server; returns the round as `ask_all` does."""
    result = harness.ask_all(f"http://{server.host}:{server.port}")
    return Round(
        result.answers, result.seconds, result.num_prompt, result.num_cached, result.num_right
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds against both servers, one server after the other; returns the report."""
    rounds: dict[str, list[Round]] = {}
    if args.gsm8k is None:
        ask = partial(ask_all, questions=tiny_questions(args.questions), max_tokens=args.max_tokens)
    else:
        harness = Harness(args.lm_eval, args.gsm8k, args.questions, args.max_tokens, THREADS)
        ask = partial(ask_harness, harness)
    for name, options in (("off", ["--no-prefix-cache"]), ("on", [])):
        server = Server(*options, model=args.model)
        try:
            rounds[name] = [ask(server) for _ in range(ROUNDS)]
        finally:
            server.stop()
    every = [result for both in rounds.values() for result in both]
    texts = list(zip(*(result.answers for result in every), strict=True))
    best = {name: min(result.seconds for result in both) for name, both in rounds.items()}
    return {
        "model": args.model,
        "questions": len(texts),
        "different": sum(len(set(answers)) > 1 for answers in texts),
        "right": [result.num_right for result in every],
        "hit_rate": {
            name: [round(result.num_cached / result.num_prompt, 4) for result in both]
            for name, both in rounds.items()
        },
        "seconds": {
            name: [round(result.seconds, 2) for result in both] for name, both in rounds.items()
        },
        "speed_up": round(best["off"] / best["on"], 2),
        "prompt_tokens": every[0].num_prompt,
        "threads": THREADS,
        "load_average": os.getloadavg(),
    }


def main() -> None:
    """Run the rounds, print the report; exits with 1 if answers differ or hit rates are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="ramify-tiny")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=None)
    parser.add_argument("--gsm8k", type=Path, default=None, help="the test set, JSON lines")
    parser.add_argument("--lm-eval", default=sys.executable, help="a Python that has lm-eval")
    args = parser.parse_args()
    args.max_tokens = args.max_tokens or (16 if args.gsm8k is None else 400)
    report = run(args)
    print(json.dumps(report, indent=2))
    was_read = min(report["hit_rate"]["on"]) > 0 and max(report["hit_rate"]["off"]) == 0
    sys.exit(0 if report["different"] == 0 and was_read else 1)


if __name__ == "__main__":
    main()
