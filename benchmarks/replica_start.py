"""Time from the command to a server that is ready, and memory of its processes: one engine, and replicas.

    make bench-replicas ARGS="[--replicas 4] [--model ramify-tiny] [--runs 3] [--cold] [--json]"

A server is ready when `/readyz` says so, which with replicas is when all are. Memory is what is
resident then (RSS), in MB, of the server and of its largest replica. With `--cold` the kernel cache is
empty before each run, so that one process compiles.

The limit beside it: `--replicas` tiny replicas in 2.5 times one engine's start and a second, for two
cores; 450 MB each, 250 for the server.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import commit, cpu_model

START_S = 900.0
LISTENING = re.compile(r"^listening on (http://\S+)", re.MULTILINE)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) * 1024 / 1e6


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii")
    return [int(child) for child in text.split()]


def start_once(model: str, replicas: int, cache: Path | None) -> dict[str, Any]:
    """Start a server, and end it; with 0 replicas its engine is in its own process."""
    command = [sys.executable, "-m", "ramify", "serve", model, "--port", "0"]
    command += ["--kv-cache-tokens", "16384"]
    command += ["--replicas", str(replicas)] if replicas else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    if cache is not None:
        environment["NUMBA_CACHE_DIR"] = str(cache)
    begin_s = time.monotonic()
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while True:
                match = LISTENING.search(Path(log.name).read_text("utf-8"))
                if match is not None and is_ready(match[1]):
                    break
                if process.poll() is not None or time.monotonic() - begin_s > START_S:
                    raise SystemExit(Path(log.name).read_text("utf-8"))
                time.sleep(0.02)
            ready_s = time.monotonic() - begin_s
            engines = [rss_mb(child) for child in children(process.pid)] if replicas else []
            return {"ready_s": ready_s, "server_mb": rss_mb(process.pid), "engines_mb": engines}
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def row(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the runs."""
    times = sorted(run["ready_s"] for run in runs)
    engines = [mb for run in runs for mb in run["engines_mb"]]
    return {
        "what": name,
        "ready_s": round(statistics.median(times), 1),
        "from_to_s": f"{times[0]:.1f} to {times[-1]:.1f}",
        "server_mb": round(max(run["server_mb"] for run in runs)),
        "replica_mb": round(max(engines)) if engines else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="ramify-tiny")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="with an empty kernel cache each time")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    runs: dict[int, list[dict[str, Any]]] = {0: [], args.replicas: []}
    for _ in range(args.runs):  # one after the other: a machine that gets slower slows both
        for replicas, results in runs.items():
            with tempfile.TemporaryDirectory() as folder:
                cache = Path(folder) if args.cold else None
                results.append(start_once(args.model, replicas, cache))
    rows = [row("one engine", runs[0]), row(f"{args.replicas} replicas", runs[args.replicas])]
    limit_s = 2.5 * rows[0]["ready_s"] + 1
    if args.json:
        print(
            json.dumps({"rows": rows, "limit_s": limit_s, "commit": commit(), "cpu": cpu_model()})
        )
        return
    print(f"{commit()}, {cpu_model()}, {os.cpu_count()} cores")
    for result in rows:
        print(" | ".join(f"{name} {value}" for name, value in result.items() if value is not None))
    print(f"limit of the start: {limit_s:.1f} s")


if __name__ == "__main__":
    main()
