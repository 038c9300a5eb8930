"""`ramify serve --replicas`: real processes under unmodified clients, killed in mid-answer."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Running, start_server

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
NUM_REPLICAS = 2
NUM_STREAMS = 8


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`, and that have not ended."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                pids.append(int(entry.name))
    return pids


def replicas_of(server: Running) -> list[int]:
    """The replicas of a server, by their command line."""
    own = []
    for pid in children(server.process.pid):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"ramify.cluster.local_child" in command:
            own.append(pid)
    return own


def ask(server: Running, number: int, **options: Any) -> tuple[str, int]:
    """Text and number of output tokens of a streamed chat."""
    text, num_tokens = "", 0
    chunks = server.openai().chat.completions.create(
        model="ramify-tiny",
        messages=[{"role": "user", "content": f"Question {number}: what comes next?"}],
        max_tokens=80,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
        **options,
    )
    for chunk in chunks:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
    return text, num_tokens


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    log = tmp_path_factory.mktemp("cluster") / "log"
    running = start_server(log, "--replicas", str(NUM_REPLICAS), "--kv-cache-tokens", "16384")
    yield running
    pids = replicas_of(running)
    for client in running.clients.values():
        client.close()
    assert running.stop() == 0, running.log
    assert len(pids) == NUM_REPLICAS
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_clients_need_not_know(server: Running) -> None:
    """Both official clients get answers; models, statistics and metrics are there."""
    answer = server.openai().chat.completions.create(
        model="ramify-tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=8
    )
    assert answer.usage.completion_tokens > 0
    message = server.anthropic().messages.create(
        model="ramify-tiny", max_tokens=8, messages=[{"role": "user", "content": "Hello"}]
    )
    assert message.usage.output_tokens > 0
    assert server.openai().models.list().data[0].id == "ramify-tiny"


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 7}], ids=str)
def test_a_killed_replica_costs_no_answer(server: Running, options: dict[str, Any]) -> None:
    """Streams through a `kill -9` have the texts and the usage of those that nobody disturbed."""
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        wanted = list(
            threads.map(lambda number: ask(server, number, **options), range(NUM_STREAMS))
        )
        before = replicas_of(server)
        assert len(before) == NUM_REPLICAS

        answers = [threads.submit(ask, server, number, **options) for number in range(NUM_STREAMS)]
        time.sleep(0.15)
        os.kill(before[0], signal.SIGKILL)
        got = [answer.result() for answer in answers]

    assert got == wanted
    assert {num_tokens for _, num_tokens in got} == {80}
    deadline = time.monotonic() + 120
    while len(replicas_of(server)) < NUM_REPLICAS:  # it is started again
        assert time.monotonic() < deadline, server.log
        time.sleep(0.1)
    while server.log.count(": connected,") < NUM_REPLICAS + 1:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.1)


def test_replicas_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    """Nobody is left behind by a `kill -9` of the server."""
    running = start_server(
        tmp_path / "log", "--replicas", "1", "--kv-cache-tokens", "4096", "--port", "0"
    )
    pids = replicas_of(running)
    assert len(pids) == 1

    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait()

    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("serve", "--replicas", "0"), "--replicas 0 but it must be in 1..64"),
        (("serve", "--replicas", "a:b"), "is no HOST:PORT"),
        (("serve", "--replicas", "a:1,a:1"), "names an address twice"),
        (("replica", "--host", "0.0.0.0"), "would compute for everybody"),
        (("replica", "--cluster-key", "/nowhere"), "cluster's credentials"),
    ],
    ids=str,
)
def test_wrong_options_are_a_line(options: tuple[str, ...], message: str) -> None:
    """Each is an error on stderr before a model loads."""
    result = subprocess.run(
        [sys.executable, "-m", "ramify", *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "NO_COLOR": "1"},
    )

    assert result.returncode == 2
    assert message in result.stderr.replace("\n", " ")
