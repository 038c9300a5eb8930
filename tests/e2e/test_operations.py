"""A real server process: start, options, signals, and load."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.conftest import Running, start_server
from tests.forked_command import run_command

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = [{"role": "user", "content": "Where is the violin that Mara has lost in the garden?"}]
LONG = {"model": "ramify-tiny", "messages": MESSAGES, "max_tokens": 1500}


def test_the_start_tells_what_is_served(server: Running) -> None:
    """The banner has sizes, a curl command and the URL; uvicorn prints nothing."""
    for word in ("model", "K/V cache", "requests", "prefix cache", "sampling", "keys", "curl "):
        assert f"\n  {word}" in "\n" + server.log
    assert re.search(r"K/V cache .* tokens, at most [\d,]+ MiB\n", server.log)
    assert re.search(
        r"memory +[1-9][\d,]* MiB resident; K/V adds to it as it is written", server.log
    )
    assert f"listening on {server.url}" in server.log
    assert "Uvicorn" not in server.log


def test_warm_prompts_are_there_before_the_first_request(tmp_path: Path) -> None:
    """With --warm; --record writes a line per request, without text, and --log-file the log."""
    text = "The old bridge of Rome was built by Marcus and stands near the market by the river."
    warm, record, log = (tmp_path / name for name in ("warm.jsonl", "record.jsonl", "ramify.log"))
    warm.write_text(json.dumps({"prompt": text}) + "\n")
    files = ("--warm", str(warm), "--record", str(record), "--log-file", str(log))
    running = start_server(tmp_path / "stderr", *files, "--log-format", "json")

    client = running.openai()
    usage = client.completions.create(model="ramify-tiny", prompt=text, max_tokens=2).usage

    assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 16
    assert running.stop() == 0
    [line] = record.read_text().splitlines()
    assert json.loads(line)["input_length"] == usage.prompt_tokens
    assert "Rome" not in line
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(entry.get("prompt") == usage.prompt_tokens for entry in entries)
    assert "Rome" not in log.read_text() + running.log
    assert not [line for line in running.log.splitlines() if line.startswith("{")]


def test_a_public_prefix_is_read_by_every_key(tmp_path: Path) -> None:
    """From the first request on, in both APIs; the prompt after it is cached for its own key only."""
    system = "You answer questions about the harbour of Oslo, and about nothing else at all. " * 2
    public = tmp_path / "public.jsonl"
    public.write_text(json.dumps({"messages": [{"role": "system", "content": system}]}))
    options = ("--public", str(public), "--api-key", "ann", "--api-key", "bob")
    running = start_server(tmp_path / "log", *options)
    question = {"role": "user", "content": "How deep is the water at the eastern pier, and why?"}
    body = {"model": "ramify-tiny", "max_tokens": 2}

    def read(key: str) -> tuple[int, int]:
        messages = [{"role": "system", "content": system}, question]
        chat = running.openai(key).chat.completions.create(messages=messages, **body)
        message = running.anthropic(key).messages.create(system=system, messages=[question], **body)
        details = chat.usage.prompt_tokens_details
        return details.cached_tokens, message.usage.cache_read_input_tokens

    (first, first_messages), (second, second_messages) = read("ann"), read("bob")

    assert first == second >= 16
    assert first_messages == second_messages > first
    assert running.stop() == 0
    assert "Oslo" not in running.log


def test_sigterm_lets_a_stream_end(tmp_path: Path) -> None:
    """The stream ends with its own reason; the exit code is 0."""
    running = start_server(tmp_path / "log")
    client = running.openai()
    stream = client.chat.completions.create(stream=True, extra_body={"ignore_eos": True}, **LONG)
    next(stream)

    running.process.send_signal(signal.SIGTERM)

    reasons = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
    assert reasons[-1] == "length"
    assert running.process.wait(60) == 0
    assert "Traceback" not in running.log


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """With exit code 130 and without a traceback, although a stream is live."""
    running = start_server(tmp_path / "log")
    stream = running.openai().chat.completions.create(
        stream=True, extra_body={"ignore_eos": True, "n": 8}, **LONG
    )
    next(stream)

    running.process.send_signal(signal.SIGINT)
    until_logged(running, "live requests have")
    running.process.send_signal(signal.SIGINT)

    assert running.process.wait(60) == 130
    assert "Traceback" not in running.log


def until_logged(running: Running, words: str) -> None:
    while words not in running.log:
        assert running.process.poll() is None, running.log


@pytest.mark.parametrize(
    "options",
    [
        ("--host", "0.0.0.0"),
        ("--api-key-file", "/nowhere/keys"),
        ("--warm", "/nowhere/prompts"),
        ("--public", "/nowhere/prompts"),
        ("--record", "/nowhere/record"),
        ("--page-size", "0"),
    ],
)
def test_a_wrong_option_is_one_line(options: tuple[str, ...]) -> None:
    """Exit code 2 and a line `error: …`, no traceback."""
    completed = run_command("serve", "ramify-tiny", "--port", "0", *options)

    assert completed.returncode == 2, completed.stderr
    assert completed.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in completed.stderr


def test_load_leaves_nothing() -> None:
    """A short run of the load script: no error, nothing left, exit code 0."""
    command = [sys.executable, str(ROOT / "scripts/load_server.py"), "--report-only"]
    sizes = ["--streams", "40", "--seconds", "6", "--stalled", "16", "--stalled-seconds", "4"]
    completed = subprocess.run(
        [*command, *sizes], capture_output=True, text=True, timeout=280, check=False
    )

    assert completed.returncode == 0, completed.stderr
    report = json.loads(completed.stdout)
    assert (report["errors"], report["log_errors"], report["exit_code"]) == ([], [], 0)
    assert not any(report["left"].values())
    assert report["done"] > 0
    assert report["left_early"] > 0


def test_metrics_of_a_real_engine(server: Running) -> None:
    """The delay of the event loop and the use of the KV cache are exported."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        text = response.read().decode()
    assert "ramify_event_loop_delay_seconds_count" in text
    assert 'vllm:kv_cache_usage_perc{model_name="ramify-tiny"}' in text
