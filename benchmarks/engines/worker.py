"""The process that holds one engine.

It reads commands from its standard input, a JSON object a line, and answers each with one line:

    {"setup": {...}}                   load the engine
    {"prepare": [requests, tokens]}    before a workload
    {"resources": true}                what loading took
    {"task": {...}}                    carry out one repetition
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from engines.contract import AbsentError, Answer, Engine, MeasuredEngine, Setup
from engines.registry import find
from engines.workloads import Task


def main() -> None:
    entry = find(sys.argv[1])
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what an engine prints is not an answer

    def answer(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    given = json.loads(sys.stdin.readline())["setup"]
    setup = Setup(**given | {"folder": Path(given["folder"]), "options": entry.options})
    try:
        engine: Engine = importlib.import_module(f"engines.{entry.module}").load(setup)
    except (AbsentError, ImportError) as reason:
        missing = "" if isinstance(reason, AbsentError) else "cannot be imported: "
        answer({"absent": f"{missing}{reason}"})
        return
    answer({"version": engine.version, "note": engine.note})
    try:
        for line in sys.stdin:
            command = json.loads(line)
            if "prepare" in command:
                engine.prepare(*command["prepare"])
                answer({})
            elif "resources" in command:
                assert isinstance(engine, MeasuredEngine)
                answer(asdict(engine.resources()))
            else:
                answer(carry_out(engine, Task(**command["task"])))
    finally:
        engine.close()


def carry_out(engine: Engine, task: Task) -> dict[str, Any]:
    """Run a task once; returns seconds over all turns, tokens and the engine's own figures."""
    if task.before:
        engine.generate(task.before, task.before_new)
    talks: list[list[int]] = [[] for _ in task.turns[0]]
    total, cpu, tokens, first, between, decode = 0.0, 0.0, [], [], [], []
    facts: dict[str, float] = {}
    for prompts in task.turns:
        talks = [talk + prompt for talk, prompt in zip(talks, prompts, strict=True)]
        start, cpu_start = time.perf_counter(), time.process_time()
        output = engine.generate(talks, task.num_new)
        total += time.perf_counter() - start
        cpu += time.process_time() - cpu_start
        _check(output, task.num_new)
        tokens += output.tokens
        talks = [talk + new_ids for talk, new_ids in zip(talks, output.tokens, strict=True)]
        first += output.first_s
        if task.num_new > 1:
            pairs = list(zip(output.first_s, output.last_s, strict=True))
            between += [(last - begin) / (task.num_new - 1) for begin, last in pairs]
            begin, last = max(pairs)
            decode.append((last - begin) / (task.num_new - 1))
        for name, value in output.facts.items():
            facts[name] = facts.get(name, 0.0) + value
    return {
        "total_s": total,
        "cpu_s": cpu,  # of all threads of this process
        "ttft_s": median(first) if first else None,
        "between_s": median(between) if between else None,
        # Of the request that starts last: the prompts of the others are computed by then.
        "decode_s": median(decode) if decode else None,
        "tokens": tokens,
        "facts": facts,
    }


def _check(answer: Answer, num_new: int) -> None:
    for token_ids in answer.tokens:
        if len(token_ids) != num_new:
            raise RuntimeError(f"an answer has {len(token_ids)} tokens instead of {num_new}")


if __name__ == "__main__":
    main()
