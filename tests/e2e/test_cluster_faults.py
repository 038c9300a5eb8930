"""A thousand requests of conversations while replicas are killed and stopped, and the server is started anew."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import openai
import pytest

from tests.e2e.conftest import START_S, is_ready

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="stops processes by signals"),
]

NUM_REPLICAS, NUM_CLIENTS = 4, 16
NUM_CONVERSATIONS, NUM_TURNS = 250, 4
STOP_S = 10.0  # a stopped replica is taken for dead after 5 s
# What happens after how many ended requests.
FAULTS = {100: "kill", 250: "stop", 400: "kill", 550: "restart", 700: "kill"}
WORDS = "bridge river market garden violin letter harbour winter lamp stone".split()


class Process:
    """`ramify ARGS` of one thread; `start` again gives it the same port."""

    def __init__(self, name: str, folder: Path, *args: str) -> None:
        self.args, self.port = args, 0
        self.num_kills, self.is_down = 0, True
        self.log_file = folder / f"{name}.log"
        self.start()

    def start(self) -> None:
        with self.log_file.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ramify", *self.args, "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if self.args[0] == "replica" else subprocess.DEVNULL,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
                text=True,
            )

    def until_ready(self) -> None:
        """Wait until it listens."""
        if self.process.stdout is not None:
            line = self.process.stdout.readline()
            assert line, self.log_file.read_text()
            self.port = int(json.loads(line)["port"])
            self.is_down = False
            return
        begin = len(self.log_file.read_text()) if self.port else 0
        deadline = time.monotonic() + START_S
        while True:
            _, mark, rest = self.log_file.read_text()[begin:].rpartition("\nlistening on http://")
            if self.port and is_ready(self.url):
                self.is_down = False
                return
            if mark and "\n" in rest:
                self.port = int(rest.split()[0].rpartition(":")[2])
            assert self.process.poll() is None, self.log_file.read_text()
            assert time.monotonic() < deadline, self.log_file.read_text()
            time.sleep(0.02)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.is_down = True
        self.num_kills += 1
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def ending(processes: list[Process]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()


class Server(Protocol):
    """What clients know of a server that is killed and started again."""

    num_kills: int
    is_down: bool

    @property
    def url(self) -> str: ...


class Clients:
    """Conversations through a server, each turn with the answers before it."""

    def __init__(self, server: Server, num_conversations: int = NUM_CONVERSATIONS) -> None:
        self.server, self.num_conversations = server, num_conversations
        self.num_ended = self.num_cut = 0
        self._lock = threading.Lock()

    def run(
        self, after: Callable[[int], None] = lambda _: None
    ) -> list[list[tuple[str, int, int]]]:
        """Text, prompt tokens and output tokens of each turn, by conversation."""
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            return list(
                threads.map(lambda number: self._talk(number, after), range(self.num_conversations))
            )

    def _talk(self, number: int, after: Callable[[int], None]) -> list[tuple[str, int, int]]:
        words = random.Random(number)
        system = " ".join(WORDS) + f" {number % 5} " + " ".join(WORDS * 2)
        messages: list[dict[str, str]] = [{"role": "system", "content": system}]
        turns = []
        with openai.OpenAI(
            base_url=f"{self.server.url}/v1", api_key="none", max_retries=0
        ) as client:
            for turn in range(NUM_TURNS):
                messages.append({"role": "user", "content": " ".join(words.choices(WORDS, k=8))})
                sampling = {"temperature": 0} if number % 2 else {"temperature": 1, "seed": turn}
                answer = self._ask(client, messages, **sampling)
                turns.append(answer)
                messages.append({"role": "assistant", "content": answer[0]})
                with self._lock:
                    self.num_ended += 1
                    num_ended = self.num_ended
                after(num_ended)
        return turns

    def _ask(
        self, client: Any, messages: list[dict[str, str]], **sampling: Any
    ) -> tuple[str, int, int]:
        """One answer; sent again only if the server that held it has died, or does not listen yet."""
        while True:
            num_kills = self.server.num_kills
            try:
                return self._stream(client, messages, **sampling)
            # The client passes on the errors of its HTTP library where a stream is cut.
            except Exception:
                if self.server.num_kills == num_kills and not self.server.is_down:
                    raise
                with self._lock:
                    self.num_cut += 1
                time.sleep(0.1)

    @staticmethod
    def _stream(
        client: Any, messages: list[dict[str, str]], **sampling: Any
    ) -> tuple[str, int, int]:
        text, usages = "", []
        stream = client.chat.completions.create(
            model="ramify-tiny",
            messages=messages,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
            **sampling,
        )
        for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
            if chunk.usage is not None:
                usages.append(chunk.usage)
        [usage] = usages
        return text, usage.prompt_tokens, usage.completion_tokens


class Faults:
    """Does what `FAULTS` says, each in a thread of its own."""

    def __init__(self, server: Process, replicas: list[Process]) -> None:
        self.server, self.replicas = server, replicas
        self.done: list[str] = []
        self._threads: list[threading.Thread] = []
        self._turn = iter(range(1000))

    def after(self, num_ended: int) -> None:
        kind = FAULTS.get(num_ended)
        if kind is not None:
            thread = threading.Thread(target=getattr(self, kind))
            self._threads.append(thread)
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _next(self) -> Process:
        return self.replicas[next(self._turn) % NUM_REPLICAS]

    def kill(self) -> None:
        replica = self._next()
        replica.kill()
        replica.start()  # as whoever supervises it would
        replica.until_ready()
        self.done.append("kill")

    def stop(self) -> None:
        replica = self._next()
        replica.signal(signal.SIGSTOP)
        time.sleep(STOP_S)
        replica.signal(signal.SIGCONT)
        self.done.append("stop")

    def restart(self) -> None:
        self.server.kill()
        self.server.start()
        self.server.until_ready()
        self.done.append("restart")


def test_every_request_ends_once_with_the_tokens_of_one_engine(tmp_path: Path) -> None:
    """Three kills, a stop of ten seconds, another server: text and usage are those of one engine.

    Only what the dead server held is sent again by clients. Nothing is left at the replicas.
    """
    alone = Process("alone", tmp_path, "serve", "ramify-tiny")
    with ending([alone]):
        alone.until_ready()
        wanted = Clients(alone).run()

    replicas = [
        Process(f"replica{number}", tmp_path, "replica", "ramify-tiny", "--name", str(number))
        for number in range(NUM_REPLICAS)
    ]
    with ending(replicas):
        for replica in replicas:
            replica.until_ready()
        addresses = ",".join(f"127.0.0.1:{replica.port}" for replica in replicas)
        server = Process("server", tmp_path, "serve", "ramify-tiny", "--replicas", addresses)
        with ending([server]):
            server.until_ready()
            clients, faults = Clients(server), Faults(server, replicas)

            got = clients.run(faults.after)
            faults.join()

            assert got == wanted
            assert sorted(faults.done) == sorted(FAULTS.values())
            assert clients.num_ended == NUM_CONVERSATIONS * NUM_TURNS
            log = server.log_file.read_text()
            assert "Traceback" not in log
            server.signal(signal.SIGTERM)
            assert server.process.wait(60) == 0
        for replica in replicas:
            replica.signal(signal.SIGTERM)
            assert replica.process.wait(60) == 0
            text = replica.log_file.read_text()
            assert "Traceback" not in text
            assert "cut short" not in text
