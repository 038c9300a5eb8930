"""Replicas of other processes: the tokens of one engine, secrets, drains, and the ends of processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import START_S, Running, Start, is_ready, start_server
from tests.e2e.test_cluster import children, replicas_of
from tests.forked_command import run_command

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

PROMPTS = [
    f"Tell me about the {name} in the garden of the old house." for name in ("violin", "well")
]
LONG: dict[str, Any] = {
    "model": "ramify-tiny",
    "messages": [{"role": "user", "content": PROMPTS[0]}],
    "max_tokens": 400,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}
LIMIT_S = 60.0


class Replica:
    """`ramify replica` of one thread, ready."""

    def __init__(self, log: Path, *options: str) -> None:
        self.log_file = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ramify", "replica", "ramify-tiny", *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log
        self.port = int(json.loads(line)["port"])

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def end(self) -> None:
        """Kill it, if it lives."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.kill()
        self.process.wait()


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def answers(running: Running, prompt: str) -> list[tuple[str, int]]:
    """Texts and numbers of output tokens: greedy, seeded, and through the other client."""
    got = [
        running.openai().chat.completions.create(
            model="ramify-tiny",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=40,
            **options,
        )
        for options in ({"temperature": 0}, {"temperature": 0.9, "seed": 11})
    ]
    message = running.anthropic().messages.create(
        model="ramify-tiny",
        max_tokens=20,
        messages=[{"role": "user", "content": prompt}],
        extra_body={"temperature": 0},
    )
    return [
        *((reply.choices[0].message.content, reply.usage.completion_tokens) for reply in got),
        (message.content[0].text, message.usage.output_tokens),
    ]


def last_reason(stream: Any) -> str:
    """The finish reason of a stream, read to its end."""
    reasons = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
    return str(reasons[-1])


@pytest.fixture(scope="module")
def pair(start: Start) -> Running:
    """A server over two local replicas of one thread."""
    return start("--replicas", "2", "--threads-per-replica", "1", "--kv-cache-tokens", "16384")


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text("0123456789abcdef0123456789abcdef\n")
    return path


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory, secret: Path) -> Iterator[Replica]:
    """A replica with a secret, for servers that join and leave."""
    started = Replica(
        tmp_path_factory.mktemp("replica") / "log",
        *("--port", "0", "--cluster-secret", str(secret), "--name", "north"),
    )
    yield started
    started.end()


def test_answers_are_those_of_one_engine(pair: Running, tmp_path: Path) -> None:
    """With as many threads: greedy and seeded, both official clients, texts and usage."""
    command = [sys.executable, "-m", "ramify", "serve", "ramify-tiny", "--port", "0"]
    log = tmp_path / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    with log.open("wb") as file:
        process: Any = subprocess.Popen(command, stderr=file, env=environment)
    try:
        deadline = time.monotonic() + START_S
        while "\nlistening on " not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        alone = Running(log.read_text().rpartition("listening on ")[2].split()[0], process, log)
        until(lambda: is_ready(alone.url), "not ready")
        for prompt in PROMPTS:
            assert answers(pair, prompt) == answers(alone, prompt)
        for client in alone.clients.values():
            client.close()
    finally:
        process.kill()
        process.wait()


def test_the_log_says_whose_line_it_is(pair: Running) -> None:
    """All replicas write to the stderr of the server."""
    for number in range(2):
        assert f" INFO replica {number} ramify.cluster.replica: " in pair.log


def test_a_drain_lets_streams_end(tmp_path: Path) -> None:
    """Ctrl-C in a terminal goes to the server alone, and nothing is left after it."""
    running = start_server(tmp_path / "log", "--replicas", "2", "--kv-cache-tokens", "16384")
    pids = replicas_of(running)
    stream = running.openai().chat.completions.create(**LONG)
    next(stream)

    assert all(os.getsid(pid) == pid for pid in pids)
    running.process.send_signal(signal.SIGTERM)

    assert last_reason(stream) == "length"
    assert running.process.wait(60) == 0
    assert len(pids) == 2
    assert all(map(has_ended, pids))
    assert "Traceback" not in running.log
    assert "does not end" not in running.log
    for client in running.clients.values():
        client.close()


def test_a_stopped_child_ends_with_its_server(tmp_path: Path) -> None:
    """One that is stopped could read no pipe."""
    running = start_server(tmp_path / "log", "--replicas", "2", "--kv-cache-tokens", "16384")
    pids = children(running.process.pid)
    os.kill(pids[0], signal.SIGSTOP)

    running.process.kill()
    running.process.wait()

    assert len(pids) == 2
    until(lambda: all(map(has_ended, pids)), "children live on")


def test_a_model_that_is_not_there_is_one_error() -> None:
    """Before any process is started."""
    run = run_command("serve", "/nowhere/model", "--port", "0", "--replicas", "2")

    assert run.returncode == 2
    assert "there is no directory '/nowhere/model'" in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_options_that_every_replica_refuses_are_one_error() -> None:
    """The line names the first replica that cannot start, and why; the others end."""
    run = run_command(
        "serve", "ramify-tiny", "--port", "0", "--replicas", "2", "--max-model-len", "9999999"
    )

    assert run.returncode == 2
    [line] = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert "cannot start: max_model_len=9999999" in line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--replicas", "127.0.0.1:1", "--page-size", "8"], "give --page-size to `ramify replica`"),
        (["--replicas", "2", "--cluster-secret", "x"], "leave out --cluster-secret"),
        (["--replicas", "127.0.0.1:1", "--threads-per-replica", "2"], "set OMP_NUM_THREADS"),
    ],
)
def test_options_of_the_other_kind_of_replicas_are_refused(args: list[str], words: str) -> None:
    """With a line that says what to do; exit code 2."""
    run = run_command("serve", *args)

    assert run.returncode == 2
    assert words in run.stderr


def test_another_secret_is_refused_at_both_sides(replica: Replica, tmp_path: Path) -> None:
    """The server ends with the reason; the replica logs it under its name, and lives on."""
    wrong = tmp_path / "wrong"
    wrong.write_text("this is another secret of any kind\n")
    address = f"127.0.0.1:{replica.port}"

    run = run_command("serve", "--port", "0", "--replicas", address, "--cluster-secret", wrong)

    assert run.returncode == 2
    assert "the secret of the cluster is missing or wrong" in run.stderr
    assert "WARNING replica north ramify.cluster.replica: refused" in replica.log
    assert "it did not send this cluster's secret" in replica.log
    assert replica.process.poll() is None


def test_other_certificates_are_refused_at_both_sides(tmp_path: Path, secret: Path) -> None:
    """The server ends with the reason; the replica has a line of the handshake, and lives on.

    A replica that the server does not trust is refused by the server alone. Its certificate has a name
    in place of its address, so a server needs that name.
    """
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    from tests.certificates import Authority

    parts = ("certificate", "key", "authority")
    for name in ("ours", "theirs"):
        shown = Authority.make(name).credentials("engine.chat")
        for part in parts:
            (tmp_path / f"{name}.{part}").write_bytes(getattr(shown, part))

    def options(name: str, authority: str) -> list[str]:
        files = [tmp_path / f"{name}.certificate", tmp_path / f"{name}.key"]
        files.append(tmp_path / f"{authority}.authority")
        pairs = zip(parts, files, strict=True)
        return [word for part, file in pairs for word in (f"--cluster-{part}", str(file))]

    replica = Replica(tmp_path / "log", "--port", "0", *options("ours", "ours"))
    try:
        at = ("--replicas", f"127.0.0.1:{replica.port}")
        joining = (*at, "--cluster-certificate-name", "engine.chat")
        foreign = run_command("serve", "--port", "0", *joining, *options("theirs", "theirs"))
        assert "Handshake failed" not in replica.log
        mixed = run_command("info", "--json", *joining, *options("theirs", "ours"))
        assert "CERTIFICATE_VERIFY_FAILED" in replica.log
        plain = run_command("info", "--json", *at, "--cluster-secret", str(secret))
        assert "WRONG_VERSION_NUMBER" in replica.log
        unnamed = run_command("info", "--json", *at, *options("ours", "ours"))
        right = run_command("info", "--json", *joining, *options("ours", "ours"))
        server = start_server(tmp_path / "server", *joining, *options("ours", "ours"))
        assert last_reason(server.openai().chat.completions.create(**LONG)) == "length"
        for client in server.clients.values():
            client.close()
        assert server.stop() == 0
        assert replica.process.poll() is None
    finally:
        replica.end()

    assert foreign.returncode == 2
    assert "both sides need certificates of one authority" in foreign.stderr
    assert (mixed.returncode, plain.returncode, unnamed.returncode) == (1, 1, 1)
    assert "must name the address at which servers reach it" in unnamed.stdout
    assert "a replica with certificates lets no server in without" in plain.stdout
    assert right.returncode == 0, right.stderr
    assert mixed.stdout != right.stdout


def test_info_shows_replicas_that_run(replica: Replica, secret: Path) -> None:
    """What each says of itself; one that does not answer has the reason, and the exit code is 1."""
    address = f"127.0.0.1:{replica.port}"

    run = run_command(
        *("info", "--json", "--replicas", f"{address},127.0.0.1:1", "--cluster-secret", secret)
    )

    assert run.returncode == 1, run.stderr
    facts = json.loads(run.stdout)
    assert facts[address]["threads"] == 1
    assert facts[address]["same bits"] == "yes"
    assert facts[address]["incarnation"] in replica.log
    assert "127.0.0.1:1" in facts["127.0.0.1:1"]["error"]


def test_a_replica_outlives_servers_and_drains_at_a_signal(
    replica: Replica, secret: Path, tmp_path: Path
) -> None:
    """Its cache serves the next server; at its end the live stream ends first, then requests get 503."""
    joining = ("--replicas", f"127.0.0.1:{replica.port}", "--cluster-secret", str(secret))
    first = start_server(tmp_path / "first", *joining)
    assert "computed" in str(first.openai().chat.completions.create(**{**LONG, "stream": False}))
    for client in first.clients.values():
        client.close()
    assert first.stop() == 0
    second = start_server(tmp_path / "second", *joining)
    stream = second.openai().chat.completions.create(stream_options={"include_usage": True}, **LONG)
    next(stream)

    replica.process.send_signal(signal.SIGTERM)

    chunks = list(stream)
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 16
    assert replica.process.wait(60) == 0
    until(lambda: not is_ready(second.url), "still ready")
    with pytest.raises(Exception, match="no engine can take this request"):
        second.openai().chat.completions.create(**LONG)
    again = Replica(
        tmp_path / "again", "--port", str(replica.port), "--cluster-secret", str(secret)
    )
    try:
        until(lambda: is_ready(second.url), "not joined again")
        assert last_reason(second.openai().chat.completions.create(**LONG)) == "length"
        for client in second.clients.values():
            client.close()
        assert second.stop() == 0
        assert "Traceback" not in second.log + replica.log
    finally:
        again.end()
