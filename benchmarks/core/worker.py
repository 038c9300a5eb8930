"""The process that holds one core: loads it once, and forks one child for each of its cells.

It reads commands from its standard input, a JSON object a line, and answers each with one line:

    {"open": WORKLOAD, "limit": N, "trace": PATH}   a child with this workload takes over
    {"replay": true}                                the child serves it once from an empty cache
    {"scale": NAME, ...}                            a child measures one scaling row
    {"close": true}                                 the child ends
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from core.contract import AbsentError, Entry, Loaded
from core.registry import ENTRIES, OURS
from core.replay import audit, replay
from core.scaling import ROWS
from core.workloads import WORKLOADS

Answer = Callable[[dict[str, Any]], None]


def main() -> None:
    answer = _answers()
    entry = ENTRIES[sys.argv[1]]
    try:
        loaded = entry.load(Path(sys.argv[2]))
    except (AbsentError, ImportError) as reason:
        missing = "" if isinstance(reason, AbsentError) else "cannot be imported: "
        answer({"absent": f"{missing}{reason}"})
        return
    compared = audit(loaded.make)
    answer({"version": loaded.version, "audited_pages": compared})
    while command := _next_command():
        child = os.fork()
        if not child:
            _run_child(entry, loaded, command, answer)
            return
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"the child for {command} ended with status {status}")


def _run_child(entry: Entry, loaded: Loaded, command: dict[str, Any], answer: Answer) -> None:
    if "scale" in command:
        answer({"rows": ROWS[command.pop("scale")](loaded.make, command, entry.name == OURS)})
        return
    workload = WORKLOADS[command["open"]]
    trace = command.get("trace")
    requests = workload.load(command.get("limit"), Path(trace) if trace else None)
    replay(loaded.make, workload.num_tokens, requests[:3])
    answer(
        {
            "requests": len(requests),
            "prompt_tokens": sum(len(prompt) for prompt, _ in requests),
            "output_tokens": sum(len(output) for _, output in requests),
        }
    )
    while "replay" in _next_command():
        answer(asdict(replay(loaded.make, workload.num_tokens, requests)))


def _next_command() -> dict[str, Any]:
    """The next line of standard input, read byte by byte: the rest is another process's."""
    line = bytearray()
    while (byte := os.read(0, 1)) and byte != b"\n":
        line += byte
    command: dict[str, Any] = json.loads(line) if line else {}
    return command


def _answers() -> Answer:
    """A way to the parent that nothing else writes to: what a peer prints goes to stderr."""
    out: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    return answer


if __name__ == "__main__":
    main()
