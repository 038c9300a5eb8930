"""A child of `LocalProcesses` that loads no model; told by `engine` in its spec what to do.

`folder`: where it writes `NAME.starts` and `NAME.order`. `compiles`: names of those that say at their
first start that they have compiled kernels. `pool`: tokens of K/V that they say they have. `fails`: names of those that say that they cannot start.
`dies`: of those that end without a word. `prints`: of those that print something else first.
`lingers`: of those that say that they cannot start, and stay. `shouts`: of those that print a line without an end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn


def report(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def leave(*_: object) -> NoReturn:
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, leave)
    spec = json.loads(sys.stdin.readline())
    name, engine = spec["name"], spec["engine"]
    folder = Path(engine["folder"])
    starts = folder / f"{name}.starts"
    with starts.open("a") as lines:
        lines.write(f"{os.getpid()} {os.environ['OMP_NUM_THREADS']}\n")
    with (folder / f"{name}.model").open("a") as lines:
        lines.write(f"{spec['model']} {engine.get('revision')}\n")
    with (folder / f"{name}.memory").open("a") as lines:
        lines.write(f"{spec['memory_parts']} {engine.get('kv_cache_tokens')}\n")
    is_first_start = len(starts.read_text().splitlines()) == 1
    if name in engine.get("prints", ""):
        sys.stdout.write("a package greets you\n")
    if name in engine.get("dies", ""):
        os._exit(7)
    if name in engine.get("fails", ""):
        report(state="failed", error="the model is nowhere")
        os._exit(2)
    if name in engine.get("lingers", ""):
        report(state="failed", error="the model is nowhere")
        time.sleep(600)
    if name in engine.get("shouts", ""):
        sys.stdout.write("x" * 200_000)
        sys.stdout.flush()
        time.sleep(600)
    report(state="loaded")
    sys.stdin.readline()
    with (folder / "order").open("a") as lines:
        lines.write(f"{name}\n")
    has_compiled = is_first_start and name in engine.get("compiles", "")
    report(
        state="ready",
        port=os.getpid(),
        has_compiled=has_compiled,
        kv_cache_tokens=engine.get("pool", 0),
    )
    sys.stdin.read()


if __name__ == "__main__":
    main()
