"""Other weights for the replicas of a running server, and what a child that dies has afterwards."""

import importlib.resources
import json
import os
import shutil
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import Running, is_ready, start_server
from tests.e2e.test_cluster import replicas_of
from tests.e2e.test_replicas import until

pytest.importorskip("grpc", reason="grpcio is not installed (pip install ramify[cluster])")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PROMPTS = [f"Tell me about the {name} in the garden." for name in ("violin", "well", "wall")]


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model with other weights."""
    folder = tmp_path_factory.mktemp("second") / "model"
    built_in = importlib.resources.files("ramify") / "data" / "ramify-tiny"
    shutil.copytree(str(built_in), folder)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        generator = torch.Generator().manual_seed(1)
        for weight in weights.values():
            if weight.is_floating_point() and weight.dim() == 2:
                noise = torch.randn(weight.shape, generator=generator)
                weight += (0.5 * weight.float().std() * noise).to(weight.dtype)
        save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server over two local replicas of one thread; nobody else's, since its weights are replaced."""
    options = ("--replicas", "2", "--threads-per-replica", "1", "--kv-cache-tokens", "16384")
    running = start_server(tmp_path_factory.mktemp("pair") / "log", *options)
    yield running
    for client in running.clients.values():
        client.close()
    assert running.stop() == 0, running.log


def ask(running: Running, prompt: str) -> tuple[str, int, int]:
    """The text of a stream, its number of chunks with text, and of tokens as usage has it."""
    stream: Any = running.openai().chat.completions.create(
        model="ramify-tiny",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=60,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, count, usage = "", 0, 0
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            count += bool(choice.delta.content)
        usage = chunk.usage.completion_tokens if chunk.usage else usage
    return text, count, usage


def local_children() -> set[int]:
    """The local replicas of all servers on this machine."""
    pids = set()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if b"ramify.cluster.local_child" in (entry / "cmdline").read_bytes():
                pids.add(int(entry.name))
    return pids


def replace_weights(running: Running, model: Path) -> tuple[int, Any]:
    """Status and body of the answer."""
    request = urllib.request.Request(
        f"{running.url}/v1/weights",
        json.dumps({"model": str(model)}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_weights_are_replaced_under_load(pair: Running, second: Path) -> None:
    """Every answer is whole, and that of one of the models; the last ones are of the second."""
    before = {prompt: ask(pair, prompt)[0] for prompt in PROMPTS}
    answers: list[tuple[str, str, int]] = []
    errors: list[Exception] = []
    is_over = threading.Event()

    def send(prompt: str) -> None:
        while not is_over.is_set():
            try:
                text, _, usage = ask(pair, prompt)
                answers.append((prompt, text, usage))
            except Exception as error:  # noqa: BLE001 - shown by the test
                errors.append(error)

    threads = [threading.Thread(target=send, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    until(lambda: len(answers) > 3 or errors, "no answer")
    status, body = replace_weights(pair, second)
    num_before = len(answers)
    until(lambda: len(answers) > num_before + 6 or errors, "no answer after it")
    is_over.set()
    for thread in threads:
        thread.join()

    assert not errors
    assert (status, body["model"]) == (200, str(second)), body
    after = {prompt: ask(pair, prompt)[0] for prompt in PROMPTS}
    assert all(before[prompt] != after[prompt] for prompt in PROMPTS)
    assert all(text in (before[prompt], after[prompt]) for prompt, text, _ in answers)
    assert all(text == after[prompt] for prompt, text, _ in answers[-3:])
    assert {usage for *_, usage in answers} == {60}
    assert "Traceback" not in pair.log

    # A child that is started again has the weights that it had.
    pid = replicas_of(pair)[0]
    os.kill(pid, signal.SIGKILL)
    until(lambda: "is ready again" in pair.log, "not started again")
    for _ in range(4):
        assert [ask(pair, prompt)[0] for prompt in PROMPTS] == [*after.values()]


def test_weights_that_do_not_fit_change_nothing(pair: Running, tmp_path: Path) -> None:
    """400 with the reason; the replicas go on."""
    before = ask(pair, PROMPTS[0])[0]

    status, body = replace_weights(pair, tmp_path / "nothing")

    assert status == 400
    assert "there is no directory" in body["error"]["message"]
    assert ask(pair, PROMPTS[0])[0] == before


def test_a_replica_that_dies_before_the_others_are_ready_is_started_again(tmp_path: Path) -> None:
    """The server starts all the same."""
    log, others = tmp_path / "log", local_children()

    def kill_first() -> None:
        until(log.exists, "no log")
        until(lambda: " replica 0 ramify.cluster.replica: " in log.read_text(), "not ready")
        os.kill(min(local_children() - others), signal.SIGKILL)

    killer = threading.Thread(target=kill_first)
    killer.start()
    running = start_server(log, "--replicas", "2", "--kv-cache-tokens", "16384")
    killer.join()
    until(lambda: is_ready(running.url), "not ready")
    assert "replica 0 has ended (killed by signal 9)" in running.log
    assert running.stop() == 0
