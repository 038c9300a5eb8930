"""All servers and the engine without a server, loaded side by side, measured one at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from engines.contract import AbsentError, Setup
from engines.json_process import ProcessGoneError, TooSlowError
from engines.registry import find
from engines.run import LOAD_LIMIT_S, Worker
from engines.workloads import Task
from openai import OpenAIError

from servers.bench_client import BenchClient
from servers.cells import WARM_UP, WARM_UP_SEED, Cell, warm_up_chats
from servers.chat_client import send_chats
from servers.chats import CountTokens
from servers.contract import ClientFigures, Launch, ModelFiles, Offline, Sample, ServerEntry
from servers.launches import launch, program_of
from servers.own_figures import own_figures
from servers.running import RunningServer, free_port

# What a cell can end with; the next cells are measured all the same.
FAILURES = (RuntimeError, TimeoutError, TooSlowError, ProcessGoneError, OpenAIError, OSError)
EncodeChat = Callable[[Sequence[Mapping[str, str]]], Sequence[int]]
Bound = Callable[[Sequence[Sequence[int]], int], float]  # prompts, new tokens → seconds at least
PROMPTS_S = 60.0
SETTLE_S = 0.3  # until a server has counted the response that it has sent


@dataclass(frozen=True, slots=True)
class Client:
    """Whatever sends requests, and what it needs to draw them."""

    bench: BenchClient
    tokenizer: str  # the checkpoint's folder
    count_tokens: CountTokens
    encode_chat: EncodeChat
    limit_s: float  # of one cell on one server

    def send(self, cell: Cell, seed: int, url: str) -> ClientFigures:
        """Run a cell against a server.

        Raises:
            RuntimeError: requests failed, or answers have another length than they should.
        """
        if not cell.options:
            chats = cell.chats(seed, self.count_tokens)
            figures = send_chats(url, chats, self.limit_s)
        else:
            arguments = cell.arguments(seed, url, self.tokenizer)
            result = self.bench.run(arguments, self.limit_s)
            if result["failed"]:
                raise RuntimeError(
                    f"{len(result['failed'])} requests failed: {result['failed'][0]}"
                )
            figures = ClientFigures.of_vllm_bench(result, cell.num_new)
        expected = cell.num_requests * cell.num_new
        if (figures.completed, figures.output_tokens) != (cell.num_requests, expected):
            raise RuntimeError(
                f"{figures.completed} of {cell.num_requests} requests, "
                f"{figures.output_tokens} of {expected} tokens"
            )
        return figures

    def warm_up(self, url: str) -> None:
        """Both clients' first requests, off the clock: imports, kernels, threads, templates."""
        self.send(WARM_UP, WARM_UP_SEED, url)
        send_chats(url, warm_up_chats(self.count_tokens), self.limit_s)

    def prompts(self, cell: Cell, seed: int) -> list[list[int]]:
        """The requests of a cell as token ids."""
        if cell.options:
            arguments = cell.arguments(seed, "http://127.0.0.1", self.tokenizer)
            return self.bench.prompts(arguments, PROMPTS_S)
        openings = cell.chats(seed, self.count_tokens).openings()
        return [list(self.encode_chat(messages)) for messages in openings]


class Rounds:
    """Servers that are up, engines that are loaded, and the samples of both.

    `absent` and `failed` say why there are none: by server, and by server and cell. `bound` is of
    requests that are sent at once, in bfloat16.
    """

    def __init__(
        self, client: Client, files: ModelFiles, peers: Path, threads: int, bound: Bound
    ) -> None:
        self._client, self._files, self._peers, self._threads = client, files, peers, threads
        self._bound = bound
        self._servers: dict[str, RunningServer] = {}
        self._engines: dict[str, Worker] = {}
        self.launches: dict[str, Launch] = {}
        self.start_s: dict[str, float] = {}
        self.absent: dict[str, str] = {}
        self.failed: dict[tuple[str, str], str] = {}
        self.samples: dict[tuple[str, str], dict[int, Sample]] = {}  # server, cell → round → sample

    def start(self, entry: ServerEntry, python_path: str, limit_s: float) -> None:
        """Start a server and warm it up; one that does not start is absent."""
        needed = program_of(entry, self._peers)
        if needed is not None and not needed[0].exists():
            note = needed[1].read_text("utf-8").strip() if needed[1].is_file() else ""
            self.absent[entry.name] = note or f"{needed[0]} is missing: make bench-server"
            return
        port = free_port()
        command = launch(entry, self._files, self._peers, port=port, threads=self._threads)
        self.launches[entry.name] = command
        try:
            server = RunningServer(entry, command, port, python_path, limit_s)
            self._servers[entry.name] = server
            self._client.warm_up(server.url)
        except (AbsentError, *FAILURES) as reason:
            self.absent[entry.name] = str(reason)
            return
        self.start_s[entry.name] = server.start_s
        _note(f"{entry.name}: up after {server.start_s:.1f} s")

    def load(self, entry: ServerEntry, setup: Setup) -> None:
        """Load the engine of a server of ours in a process of its own, and warm it up."""
        worker = Worker(find(entry.engine), self._peers, self._threads)
        given = asdict(replace(setup, options={})) | {"folder": str(setup.folder)}
        try:
            answer = worker.ask(LOAD_LIMIT_S, setup=given)
        except (ProcessGoneError, TooSlowError) as reason:
            answer = {"absent": str(reason)}
        if "absent" in answer:
            self.absent[entry.engine] = answer["absent"]
            return
        self._engines[entry.name] = worker
        self._offline(entry, WARM_UP, WARM_UP_SEED)

    def measure(self, cell: Cell, repetition: int, name: str) -> None:
        """Sample a cell on a server, then on its engine alone; a failure is noted and not tried again."""
        server, key = self._servers.get(name), (name, cell.name)
        if server is None or name in self.absent or key in self.failed:
            return
        seed = cell.seed(repetition)
        others = [other for other in self._servers.values() if other is not server]
        start = time.monotonic()
        try:
            before, cpu_s = server.metrics(), server.cpu_s()
            idle_s = sum(other.cpu_s() for other in others)
            client = self._client.send(cell, seed, server.url)
            time.sleep(SETTLE_S)
            sample = Sample(
                client=client,
                own=own_figures(server.entry.kind, before, server.metrics()),
                server_cpu_s=server.cpu_s() - cpu_s,
                idle_cpu_s=sum(other.cpu_s() for other in others) - idle_s,
            )
            if cell.has_offline:
                sample = replace(sample, offline=self._offline(server.entry, cell, seed))
            if cell.has_bound and server.entry.engine and server.entry.weights == "bf16":
                bound_s = self._bound(self._client.prompts(cell, seed), cell.num_new)
                sample = replace(sample, bound_s=bound_s)
        except FAILURES as error:
            cause = "" if error.__cause__ is None else f" ({error.__cause__!r})"
            reason = f"{type(error).__name__}: {error}{cause}{server.end_reason()}"
            self.failed[key] = reason[:500]
            _note(f"{cell.name} {name}: {self.failed[key]}")
            return
        self.samples.setdefault(key, {})[repetition] = sample
        alone = sample.offline
        offline = "" if alone is None else f", engine alone {alone.total_s:.2f} s"
        _note(
            f"{cell.name} {name}: {client.duration_s:.2f} s{offline}; "
            f"{time.monotonic() - start:.1f} s in all"
        )

    def _offline(self, entry: ServerEntry, cell: Cell, seed: int) -> Offline | None:
        """A cell by the engine of a server alone; None where it has none."""
        engine = self._engines.get(entry.name)
        if engine is None:
            return None
        task = Task([], [self._client.prompts(cell, seed)], cell.num_new)
        try:
            answer = engine.ask(self._client.limit_s, task=asdict(task))
        except (ProcessGoneError, TooSlowError) as gone:
            self.absent[entry.engine] = f"{cell.name}: {gone}"
            del self._engines[entry.name]
            return None
        return Offline(answer["total_s"], answer["cpu_s"])

    def end(self) -> None:
        """End all processes but the client's."""
        for server in self._servers.values():
            server.close()
        for engine in self._engines.values():
            engine.end()


def _note(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def settings_of(rounds: Rounds, hidden: Mapping[str, str]) -> dict[str, str]:
    """Every server's command, without what is of this machine only."""
    return {name: command.shown(hidden) for name, command in rounds.launches.items()}
