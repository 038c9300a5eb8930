"""`ramify deploy`: a server and two engines on a Ray cluster of this machine."""

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

pytest.importorskip(
    "cryptography", reason="cryptography is not installed (pip install ramify[dev])"
)

from ramify.cluster.credentials import Credentials
from ramify.cluster.inspection import replica_facts
from tests.certificates import Authority, write
from tests.e2e.conftest import START_S, is_ready
from tests.e2e.test_cluster_faults import STOP_S, Clients
from tests.e2e.test_replicas import has_ended, until

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed (pip install 'ramify[ray]')",
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

ENGINE, SERVER = "ramify.cluster.local_child", "ServeReplica:test:server"
NUM_CONVERSATIONS = 20  # of four requests each
ENVIRONMENT = {**os.environ, "NO_COLOR": "1"}


def descendants(root: int) -> dict[int, str]:
    """The command lines of the processes below a process."""
    parents, commands = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat = (path / "stat").read_text(errors="replace")
            command = (path / "cmdline").read_text(errors="replace")
        except OSError:
            continue
        pid = int(path.name)
        parents[pid] = int(stat.rpartition(")")[2].split()[1])
        commands[pid] = command.replace("\0", " ")
    below = {root}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return {pid: commands[pid] for pid in below - {root}}


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Deployment:
    """`ramify deploy`, ready; its engines and servers show certificates."""

    def __init__(self, folder: Path, num_engines: int = 2) -> None:
        self.folder, self.port, self.num_engines = folder, free_port(), num_engines
        authority = Authority.make("ours").credentials("engine.test")
        self.tls = write(authority, folder / "tls", name="engine.test")
        self.url, self.log_file = f"http://127.0.0.1:{self.port}", folder / "log"
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ramify", "deploy", str(self.config(16384))],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=ENVIRONMENT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while not ("\nlistening on " in self.log and is_ready(self.url)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.1)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def config(self, kv_cache_tokens: int) -> Path:
        path = self.folder / "deployment.json"
        document = {
            "name": "test",
            "model": "ramify-tiny",
            "engine": {"kv_cache_tokens": kv_cache_tokens},
            "replicas": self.num_engines,
            "tls": msgspec.to_builtins(self.tls),
            "resources": {"cpus": 1, "threads": 1},
            "ingress": {"port": self.port},
            "drain_s": 20,
        }
        path.write_text(json.dumps(document))
        return path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def engines(self) -> set[int]:
        return {pid for pid, line in descendants(self.process.pid).items() if ENGINE in line}

    def text(self, **options: Any) -> str:
        """A streamed answer."""
        return "".join(self.parts(**options))

    def parts(self, **options: Any) -> Iterator[str]:
        body: dict[str, Any] = {
            "model": "ramify-tiny",
            "messages": [{"role": "user", "content": "Tell me about the violin in the garden."}],
            "stream": True,
            "max_tokens": 40,
        }
        for chunk in self.client.chat.completions.create(**body | options):
            if chunk.choices:
                yield chunk.choices[0].delta.content or ""

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(90)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with ended(Deployment(tmp_path_factory.mktemp("ray"))) as deployment:
        yield deployment


@contextmanager
def ended(deployment: Deployment) -> Iterator[Deployment]:
    """End it with the block, whatever has happened."""
    below = descendants(deployment.process.pid)
    yield deployment
    deployment.client.close()
    if deployment.process.poll() is None:
        deployment.process.kill()
    deployment.process.wait()
    for pid in below:
        if not has_ended(pid):
            os.kill(pid, signal.SIGKILL)


def test_answers_are_those_of_one_engine(deployment: Deployment, tmp_path: Path) -> None:
    """With as many threads: greedy and seeded, streamed to the official client."""
    port = free_port()
    command = [sys.executable, "-m", "ramify", "serve", "ramify-tiny", "--port", str(port)]
    with (tmp_path / "log").open("wb") as log:
        alone = subprocess.Popen(command, stderr=log, env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"})
    try:
        until(lambda: is_ready(f"http://127.0.0.1:{port}"), "not ready")
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            for options in ({"temperature": 0}, {"temperature": 0.9, "seed": 11}):
                expected = client.chat.completions.create(
                    model="ramify-tiny",
                    messages=[
                        {"role": "user", "content": "Tell me about the violin in the garden."}
                    ],
                    max_tokens=40,
                    **options,
                )
                assert deployment.text(**options) == expected.choices[0].message.content
    finally:
        alone.kill()
        alone.wait()


def test_strangers_are_refused_by_engines(deployment: Deployment) -> None:
    """Without a certificate, and with one but not the secret that the engine has drawn."""
    address = deployment.log.partition(" has come, at ")[2].split()[0]

    for credentials, words in (
        (Credentials(), "with certificates"),
        (deployment.tls.credentials("s" * 32), "secret of the cluster"),
    ):
        facts = asyncio.run(replica_facts([address], credentials))
        assert words in facts[address]["error"]


def test_an_answer_survives_its_engine(deployment: Deployment) -> None:
    """SIGKILL in mid-stream: the answer ends with the right tokens, and Serve starts another engine."""
    options: dict[str, Any] = {
        "max_tokens": 400, "temperature": 0.8, "seed": 3, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    undisturbed = deployment.text(**options)
    before = deployment.engines()
    assert len(before) == 2
    ticks = {pid: cpu_ticks(pid) for pid in before}

    parts = deployment.parts(**options)
    text = "".join(next(parts) for _ in range(60))
    busy = max(before, key=lambda pid: cpu_ticks(pid) - ticks[pid])
    os.kill(busy, signal.SIGKILL)
    text += "".join(parts)

    assert text == undisturbed
    until(lambda: len(deployment.engines() - {busy}) == 2, "no engine in its place")
    until(lambda: deployment.log.count(" has come, at ") == 3, "it does not join")
    assert deployment.text(**options) == undisturbed


class Faults:
    """Kills an engine, stops another one, and kills the server; `Server` of `Clients`."""

    def __init__(self, deployment: Deployment) -> None:
        self.url, self._deployment = deployment.url, deployment
        self.num_kills, self.is_down = 0, False
        self.num_done = 0

    def run(self) -> None:
        """All of them, one after the other."""
        for do in (self._kill, self._stop, self._restart):
            do()
            self.num_done += 1

    def _kill(self) -> None:
        num_come = self._num_come
        os.kill(min(self._deployment.engines()), signal.SIGKILL)
        until(lambda: self._num_come > num_come, "no engine in its place")

    @property
    def _num_come(self) -> int:
        return self._deployment.log.count(" has come, at ")

    def _stop(self) -> None:
        pid = max(self._deployment.engines())
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOP_S)
        os.kill(pid, signal.SIGCONT)

    def _restart(self) -> None:
        below = descendants(self._deployment.process.pid)
        [server] = [pid for pid, line in below.items() if SERVER in line]
        self.is_down, self.num_kills = True, self.num_kills + 1
        os.kill(server, signal.SIGKILL)
        until(lambda: not is_ready(self.url), "the server lives on")
        until(lambda: is_ready(self.url), "no server in its place")
        self.is_down = False


def test_every_request_ends_once_whatever_dies(deployment: Deployment) -> None:
    """An engine is killed, one is stopped for ten seconds, the server is killed: texts and usage are equal.

    Only what the dead server held is sent again by clients.
    """
    faults = Faults(deployment)
    wanted = Clients(faults, NUM_CONVERSATIONS).run()
    before = deployment.engines()

    thread = threading.Thread(target=faults.run)
    thread.start()
    while thread.is_alive():
        assert Clients(faults, NUM_CONVERSATIONS).run() == wanted
    thread.join()

    assert faults.num_done == 3
    assert Clients(faults, NUM_CONVERSATIONS).run() == wanted
    assert len(deployment.engines()) == len(before) == 2
    assert len(deployment.engines() - before) == 1


def test_another_file_replaces_engines_one_at_a_time(deployment: Deployment) -> None:
    """Under load: no request fails, and no answer changes."""
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 30}
    expected, before = deployment.text(**options), deployment.engines()
    texts: list[str] = []
    errors: list[Exception] = []
    is_over = threading.Event()

    def load() -> None:
        while not is_over.is_set():
            try:
                texts.append(deployment.text(**options))
            except openai.OpenAIError as error:
                errors.append(error)

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    path = deployment.config(8192)
    address = deployment.log.partition("--address ")[2].split()[0]
    update = subprocess.run(
        [sys.executable, "-m", "ramify", "deploy", str(path), "--address", address],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=START_S,
        check=False,
    )
    until(lambda: not deployment.engines() & before, "engines of before are there")
    is_over.set()
    for thread in threads:
        thread.join()

    assert update.returncode == 0, update.stderr
    assert errors == []
    assert set(texts) == {expected}
    assert len(deployment.engines()) == 2


def test_nothing_is_left(deployment: Deployment) -> None:
    """A signal drains: a stream ends, then every process, and the port is free."""
    below = descendants(deployment.process.pid)
    parts = deployment.parts(max_tokens=300, extra_body={"ignore_eos": True})
    next(parts)

    ends: list[int] = []
    ending = threading.Thread(target=lambda: ends.append(deployment.end()))
    ending.start()
    num_parts = sum(1 for _ in parts)
    ending.join()

    assert ends == [0], deployment.log
    assert num_parts > 100
    until(lambda: all(map(has_ended, below)), "processes are left")
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", deployment.port)) != 0
    assert "Traceback" not in deployment.log


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """It does not wait for streams; no process is left."""
    with ended(Deployment(tmp_path, num_engines=1)) as deployment:
        below = descendants(deployment.process.pid)
        deployment.process.send_signal(signal.SIGTERM)
        until(lambda: "live requests have 20 s" in deployment.log, "it does not drain")
        deployment.process.send_signal(signal.SIGTERM)

        assert deployment.process.wait(60) == 130, deployment.log
        assert "ended at once" in deployment.log
        until(lambda: all(map(has_ended, below)), "processes are left")
