"""Time to first token of a server under a steady load of chat requests, this tree beside another.

    python benchmarks/first_token.py                                    this tree alone
    python benchmarks/first_token.py --against DIR --rounds 10          beside another checkout, in turns
    python benchmarks/first_token.py --api anthropic --busy 8 --json out.json

Each tree runs `ramify serve` in a process of its own, on a loopback port. In each round every server
in turn gets the same streamed requests at the same times: `--rate` a second, with exponential gaps.
All share a system prompt and differ in their question. With `--api anthropic` the system prompt has
a cache breakpoint. `--busy` streams decode all the time, so that there is a step to wait for.

Printed for each tree: the median of the rounds' medians of the time from sending a request to its first
event with text, its smallest and largest round, and the same of the 90th percentile; and the ratio of
the medians of each pair of rounds. A request that fails ends the benchmark.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START_S, ANSWER_S = 300.0, 120.0
SYSTEM = "You answer questions about a house. The violin is in the attic. Mara has 4 lamps. " * 12
PATHS = {"openai": "/v1/chat/completions", "anthropic": "/v1/messages"}


@dataclass(slots=True)
class Served:
    """A running server of one tree, and the first-token times of its rounds in seconds."""

    name: str
    port: int
    rounds: list[list[float]] = field(default_factory=list)


@contextmanager
def server(name: str, tree: Path, options: Sequence[str]) -> Iterator[Served]:
    """`ramify serve` from the sources of `tree`; ends with the block."""
    command = [sys.executable, "-m", "ramify", "serve", "--port", "0", *options]
    environment = os.environ | {"PYTHONPATH": str(tree / "src")}
    process = subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, cwd=tree
    )
    assert process.stderr is not None
    try:
        deadline, port = time.monotonic() + START_S, None
        for line in process.stderr:
            if (match := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line)) is not None:
                port = int(match[1])
                break
            if time.monotonic() > deadline:
                break
        if port is None:
            raise SystemExit(f"the server of {tree} did not start")
        # the log must not fill the pipe
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield Served(name, port)
    finally:
        process.terminate()
        process.wait(timeout=60)


def body_of(api: str, question: str, num_tokens: int) -> dict[str, Any]:
    """A streamed request of either API."""
    user = {"role": "user", "content": question}
    common = {"model": "ramify-tiny", "max_tokens": num_tokens, "stream": True}
    if api == "anthropic":
        block = {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}
        return common | {"system": [block], "messages": [user]}
    return common | {"messages": [{"role": "system", "content": SYSTEM}, user], "ignore_eos": True}


def first_token_s(port: int, path: str, body: dict[str, Any]) -> float:
    """Seconds from sending a request to the first event with text; reads the answer to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    raw = json.dumps(body).encode()
    start, first = time.perf_counter(), None
    try:
        connection.request("POST", path, raw, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{path}: {response.status} {response.read()[:300]!r}")
        for line in response:
            is_text = b'"content":"' in line and b'"content":""' not in line
            if first is None and (is_text or b"text_delta" in line):
                first = time.perf_counter() - start
    finally:
        connection.close()
    return time.perf_counter() - start if first is None else first


def send_round(served: Served, arguments: argparse.Namespace, seed: int) -> list[float]:
    """Send one round of requests at their times; returns the first-token time of each."""
    draw = random.Random(seed)
    path, times = PATHS[arguments.api], list[float]()
    is_over = threading.Event()

    def ask(question: str) -> None:
        body = body_of(arguments.api, question, arguments.output)
        times.append(first_token_s(served.port, path, body))

    def keep_busy(number: int) -> None:
        while not is_over.is_set():
            body = body_of(arguments.api, f"Tell me about lamp {number}.", 512)
            first_token_s(served.port, path, body)

    busy = [threading.Thread(target=keep_busy, args=(number,)) for number in range(arguments.busy)]
    for thread in busy:
        thread.start()
    asking = []
    for number in range(arguments.requests):
        time.sleep(draw.expovariate(arguments.rate))
        question = f"{draw.randrange(10**6)}: who has lamp number {number}, and where is it?"
        asking.append(threading.Thread(target=ask, args=(question,)))
        asking[-1].start()
    for thread in asking:
        thread.join()
    is_over.set()
    for thread in busy:
        thread.join()
    if len(times) != arguments.requests:
        raise SystemExit(f"{served.name}: {arguments.requests - len(times)} requests failed")
    return times


def summary(served: Served) -> dict[str, Any]:
    """Milliseconds over the rounds: median, smallest and largest of the medians and of p90."""
    medians = [statistics.median(times) * 1e3 for times in served.rounds]
    tails = [statistics.quantiles(times, n=10)[-1] * 1e3 for times in served.rounds]
    return {
        "tree": served.name,
        **{
            name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
            for name, values in (("ttft_ms", medians), ("ttft_p90_ms", tails))
        },
        "rounds": medians,
    }


def main() -> None:
    """Measure and print; see the top of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", type=Path, help="another checkout, with its own src/")
    parser.add_argument("--api", choices=PATHS, default="openai")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=40, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--busy", type=int, default=0, help="streams that decode all the time")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    trees = {"this": ROOT} | ({"against": arguments.against.resolve()} if arguments.against else {})
    with ExitStack() as stack:
        all_served = [stack.enter_context(server(name, tree, ())) for name, tree in trees.items()]
        for served in all_served:  # kernels of every batch size, and the system prompt
            send_round(served, arguments, seed=-1)
        for number in range(arguments.rounds):
            for served in all_served if number % 2 else all_served[::-1]:
                served.rounds.append(send_round(served, arguments, seed=number))
    report = [summary(served) for served in all_served]
    for row in report:
        for name in ("ttft_ms", "ttft_p90_ms"):
            figures = row[name]
            spread = f"({figures['min']:.1f} to {figures['max']:.1f})"
            print(f"{row['tree']:8} {name:12} {figures['median']:8.1f} {spread}")
    if len(report) == 2:
        this, against = (row["rounds"] for row in report)
        ratios = sorted(mine / theirs for mine, theirs in zip(this, against, strict=True))
        print(f"ratio of pairs: median {statistics.median(ratios):.3f}", end=" ")
        print(f"({ratios[0]:.3f} to {ratios[-1]:.3f})")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
