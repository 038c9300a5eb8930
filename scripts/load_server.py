"""Load test of a real server: many streams, some of which disconnect, then stalled readers.

    python scripts/load_server.py --streams 500 --seconds 300 --stalled 256

Starts `ramify serve ramify-tiny`, and fails unless: no stream had an error; nothing is left when
all have ended; memory is flat; the p99 of the event loop's delay is at most 50 ms; and stalled
readers do not raise the others' p99 time between tokens by more than 20 %, compared with as many
requests that are read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression, quantiles
from typing import Any

START_S = 300
LEAVES = 0.2  # share of the streams that leave before their end
MAX_DELAY_S = 0.05
MAX_SLOPE = 64 << 10  # bytes per second; 300 s of it are 19 MiB
SLOPE_S = 120.0  # in less time the pool's first pages are still being touched
MAX_RAISE = 1.2
FOREGROUND = 16  # streams whose gaps are compared
SYSTEMS = [f"You answer questions about the town of {name}. " * 4 for name in ("Rome", "Paris")]


@dataclass
class ClientCounts:
    """Counts, errors and token gaps that the clients measured."""

    num_done: int = 0
    num_left: int = 0
    num_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


class Server:
    """A `ramify serve` process on a free port."""

    def __init__(self, *options: str, model: str = "ramify-tiny") -> None:
        self._log = Path(tempfile.mkdtemp()) / "log"
        command = [sys.executable, "-m", "ramify", "serve", model, "--port", "0"]
        with self._log.open("wb") as out:
            self.process = subprocess.Popen([*command, *options], stdout=out, stderr=out)  # noqa: S603
        deadline = time.monotonic() + START_S
        while not (match := re.search(r"listening on http://(\S+):(\d+)", self._log.read_text())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the server did not start:\n{self._log.read_text()}")
            time.sleep(0.1)
        self.host, self.port = match[1], int(match[2])

    def get(self, path: str) -> bytes:
        """GET `path`; returns the response body."""
        url = f"http://{self.host}:{self.port}{path}"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return bytes(answer.read())

    def rss_bytes(self) -> int:
        """Resident memory of the server process."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def delays(self) -> dict[float, float]:
        """Cumulative counts of event loop delays by bucket bound in seconds."""
        text = self.get("/metrics").decode()
        buckets = re.findall(r'ramify_event_loop_delay_seconds_bucket\{le="([^"]+)"\} (\S+)', text)
        return {float(bound): float(count) for bound, count in buckets}

    def left(self) -> dict[str, int]:
        """Leases, private pages and requests by name; all 0 when the server is idle."""
        stats = json.loads(self.get("/v1/cache"))
        metrics = self.get("/metrics").decode()
        live = re.findall(r"^ramify_requests_(running|waiting) (\S+)", metrics, re.MULTILINE)
        held = {name: int(stats[name]) for name in ("num_leases", "private_pages")}
        return held | {name: int(float(value)) for name, value in live}

    def stop(self) -> int:
        """Send SIGTERM and wait; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def errors_in_log(self) -> list[str]:
        """The first five ERROR lines of the log."""
        return [line for line in self._log.read_text().splitlines() if " ERROR " in line][:5]


def body_of(rng: random.Random, max_tokens: int) -> bytes:
    question = f"Who lives in house {rng.randrange(50)}, and why?"
    payload = {
        "messages": [
            {"role": "system", "content": rng.choice(SYSTEMS)},
            {"role": "user", "content": question},
        ],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    return json.dumps(payload).encode()


def request_of(body: bytes) -> bytes:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    )
    return f"{head}Connection: close\r\n\r\n".encode() + body


async def one_stream(
    server: Server, counts: ClientCounts, rng: random.Random, max_tokens: int
) -> None:
    """Stream one request; with probability LEAVES, disconnect after 0 to 3 seconds."""
    leave_s = rng.uniform(0, 3) if rng.random() < LEAVES else None
    reader, writer = await asyncio.open_connection(server.host, server.port)
    is_whole = False
    try:
        async with asyncio.timeout(leave_s):
            writer.write(request_of(body_of(rng, max_tokens)))
            is_whole = await read_stream(reader, counts)
    except TimeoutError:
        counts.num_left += 1
        return
    finally:
        writer.transport.abort()
    if is_whole:
        counts.num_done += 1


async def read_stream(reader: asyncio.StreamReader, counts: ClientCounts) -> bool:
    last = None
    is_done = False
    status = await reader.readline()
    if b" 200 " not in status:
        counts.errors.append(f"{status!r}: {(await reader.read())[-300:]!r}")
        return False
    while line := await reader.readline():
        if line.startswith(b'data: {"error"'):
            counts.errors.append(line.decode())
            return False
        if b'"content":"' in line:
            now = time.monotonic()
            if last is not None:
                counts.gaps_s.append(now - last)
            last = now
            counts.num_tokens += 1
        is_done = is_done or line.startswith(b"data: [DONE]")
    if not is_done:
        counts.errors.append("a stream broke off")
    return is_done


async def streams(server: Server, count: int, seconds: float, seed: int) -> ClientCounts:
    """Run `count` clients that send requests one after another for `seconds`."""
    counts, until = ClientCounts(), time.monotonic() + seconds

    async def client(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while time.monotonic() < until:
            try:
                await one_stream(server, counts, rng, rng.randrange(2, 60))
            except OSError as error:
                counts.errors.append(repr(error))

    await asyncio.gather(*(client(number) for number in range(count)))
    return counts


async def watch_memory(server: Server, points: list[tuple[float, int]]) -> None:
    while True:
        points.append((time.monotonic(), server.rss_bytes()))
        await asyncio.sleep(1.0)


async def load(server: Server, count: int, seconds: float) -> dict[str, Any]:
    points: list[tuple[float, int]] = []
    await streams(server, count, min(10.0, seconds / 4), seed=1)  # buffers, arenas, the cache
    before = server.delays()
    watch = asyncio.create_task(watch_memory(server, points))
    counts = await streams(server, count, seconds, seed=2)
    watch.cancel()
    after = server.delays()
    grown = {bound: after[bound] - before[bound] for bound in after}
    total = grown[float("inf")]
    later = points[len(points) // 3 :]
    slope = linear_regression(*zip(*later, strict=True)).slope if len(later) > 2 else 0.0
    return {
        "streams": count,
        "seconds": seconds,
        "done": counts.num_done,
        "left_early": counts.num_left,
        "tokens": counts.num_tokens,
        "errors": counts.errors[:5],
        "gap_p50_ms": round(1000 * percentile(counts.gaps_s, 50), 1),
        "gap_p99_ms": round(1000 * percentile(counts.gaps_s, 99), 1),
        "loop_delay_p99_s": next(
            (bound for bound, number in sorted(grown.items()) if number >= 0.99 * total), None
        ),
        "loop_delay_within_50_ms": round(grown[MAX_DELAY_S] / total, 4) if total else None,
        "rss_mib": [round(points[0][1] / 2**20), round(points[-1][1] / 2**20)] if points else [],
        "rss_slope_bytes_per_s": round(slope),
    }


def percentile(values: list[float], number: int) -> float:
    return quantiles(values, n=100)[number - 1] if len(values) > 1 else 0.0


async def gaps_beside(server: Server, count: int, seconds: float, *, stalled: bool) -> list[float]:
    """Seconds between tokens of FOREGROUND streams, beside requests whose clients read or stall."""
    rng = random.Random(3)
    payload = json.loads(body_of(rng, 1500)) | {"logprobs": True, "top_logprobs": 20}
    request = request_of(json.dumps(payload).encode())

    async def background() -> None:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, (server.host, server.port))
        await loop.sock_sendall(connection, request)
        try:
            while not stalled and await loop.sock_recv(connection, 1 << 16):
                pass
            await asyncio.sleep(3600)
        finally:
            connection.close()

    others = [asyncio.create_task(background()) for _ in range(count)]
    counts, until = ClientCounts(), time.monotonic() + seconds

    async def client(number: int) -> None:
        own = random.Random(number)
        while time.monotonic() < until:
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(request_of(body_of(own, 50)))
            await read_stream(reader, counts)
            writer.close()

    await asyncio.gather(*(client(number) for number in range(FOREGROUND)))
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await until_idle(server)
    if counts.errors:
        sys.exit(f"beside stalled={stalled}: {counts.errors[:3]}")
    return counts.gaps_s


async def until_idle(server: Server) -> dict[str, int]:
    """Wait up to 30 s until no request holds anything; returns the remaining counts."""
    deadline = time.monotonic() + 30
    while True:
        left = await asyncio.to_thread(server.left)
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        await asyncio.sleep(0.1)


async def measure(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    server = Server()
    try:
        report = await load(server, args.streams, args.seconds) if args.streams else {}
        report["left"] = await until_idle(server)
        if args.stalled:
            seats = args.stalled + FOREGROUND
            beside = Server("--max-num-seqs", str(seats), "--kv-cache-tokens", str(seats * 2048))
            try:
                for name, stalled in (("read", False), ("stalled", True)):
                    gaps = await gaps_beside(
                        beside, args.stalled, args.stalled_seconds, stalled=stalled
                    )
                    report[f"gap_p99_ms_beside_{name}"] = round(1000 * percentile(gaps, 99), 1)
            finally:
                report["exit_code_beside"] = beside.stop()
        report["log_errors"] = server.errors_in_log()
    finally:
        code = server.stop()
    report |= {"exit_code": code, "load_average": os.getloadavg()}
    return report, faults(report)


def faults(report: dict[str, Any]) -> list[str]:
    """Messages for every measurement that is outside its limit."""
    problems = []
    if report.get("errors") or report["log_errors"]:
        problems.append(f"errors: {report.get('errors')} {report['log_errors']}")
    if any(report["left"].values()):
        problems.append(f"left behind: {report['left']}")
    if (report.get("loop_delay_within_50_ms") or 1.0) < 0.99:
        problems.append("the event loop was more than 50 ms late in over 1 % of the cases")
    is_long = report.get("seconds", 0) >= SLOPE_S
    if is_long and report["rss_slope_bytes_per_s"] > MAX_SLOPE:
        problems.append("memory grows")
    if "gap_p99_ms_beside_stalled" in report:
        most = MAX_RAISE * report["gap_p99_ms_beside_read"]
        if report["gap_p99_ms_beside_stalled"] > most:
            problems.append("stalled readers slow the others down")
    if report["exit_code"] != 0:
        problems.append(f"the exit code is {report['exit_code']}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--stalled", type=int, default=256, help="0 leaves that part out")
    parser.add_argument("--stalled-seconds", type=float, default=30.0)
    parser.add_argument("--report-only", action="store_true", help="exit code 0 all the same")
    args = parser.parse_args()
    report, wrong = asyncio.run(measure(args))
    report["faults"] = wrong
    print(json.dumps(report, indent=2))
    sys.exit(1 if wrong and not args.report_only else 0)


if __name__ == "__main__":
    main()
