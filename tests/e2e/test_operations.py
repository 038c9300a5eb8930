"""The life of a real server process: its start, its options, its signals, and load on it."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.conftest import Running, start_server

ROOT = Path(__file__).resolve().parents[2]
MESSAGES = [{"role": "user", "content": "Where is the violin that Mara has lost in the garden?"}]
LONG = {"model": "ramify-tiny", "messages": MESSAGES, "max_tokens": 1500}


def test_the_start_tells_what_is_served(server: Running) -> None:
    """Sizes, how to call it, where it listens; and nothing of uvicorn's own."""
    for word in ("model", "K/V cache", "at once", "prefix cache", "keys", "curl "):
        assert f"\n  {word}" in "\n" + server.log
    assert f"listening on {server.url}" in server.log
    assert "Uvicorn" not in server.log


def test_warm_prompts_are_there_before_the_first_request(tmp_path: Path) -> None:
    """And the record has a whole line per request, with hashes in place of text."""
    text = "The old bridge of Rome was built by Marcus and stands near the market by the river."
    warm, record = tmp_path / "warm.jsonl", tmp_path / "record.jsonl"
    warm.write_text(json.dumps({"prompt": text}) + "\n")
    options = ("--warm", str(warm), "--record", str(record), "--log-format", "json")
    running = start_server(tmp_path / "log", *options)

    client = running.openai()
    usage = client.completions.create(model="ramify-tiny", prompt=text, max_tokens=2).usage

    assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 16
    assert running.stop() == 0
    [line] = record.read_text().splitlines()
    assert json.loads(line)["input_length"] == usage.prompt_tokens
    assert "Rome" not in line
    logged = [json.loads(one) for one in running.log.splitlines() if one.startswith("{")]
    assert any(one.get("prompt") == usage.prompt_tokens for one in logged)
    assert "Rome" not in running.log


def test_a_public_prefix_is_read_by_every_key(tmp_path: Path) -> None:
    """From the first request on, through both APIs; what follows is found by its own key only."""
    system = "You answer questions about the harbour of Oslo, and about nothing else at all. " * 2
    public = tmp_path / "public.jsonl"
    public.write_text(json.dumps({"messages": [{"role": "system", "content": system}]}))
    options = ("--public", str(public), "--api-key", "ann", "--api-key", "bob")
    running = start_server(tmp_path / "log", *options)
    question = {"role": "user", "content": "How deep is the water at the eastern pier, and why?"}
    body = {"model": "ramify-tiny", "max_tokens": 2}

    def read(key: str) -> tuple[int, int]:
        asked = [{"role": "system", "content": system}, question]
        chat = running.openai(key).chat.completions.create(messages=asked, **body)
        told = running.anthropic(key).messages.create(system=system, messages=[question], **body)
        details = chat.usage.prompt_tokens_details
        return details.cached_tokens, told.usage.cache_read_input_tokens

    (first, again), (theirs, theirs_again) = read("ann"), read("bob")

    assert first == theirs >= 16
    assert again == theirs_again > first
    assert running.stop() == 0
    assert "Oslo" not in running.log


def test_sigterm_lets_a_stream_end(tmp_path: Path) -> None:
    """New requests are refused meanwhile; the exit code is 0."""
    running = start_server(tmp_path / "log")
    client = running.openai()
    stream = client.chat.completions.create(stream=True, extra_body={"ignore_eos": True}, **LONG)
    next(stream)

    running.process.send_signal(signal.SIGTERM)

    reasons = [one.choices[0].finish_reason for one in stream if one.choices]
    assert reasons[-1] == "length"
    assert running.process.wait(60) == 0
    assert "Traceback" not in running.log


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """With a stream live, and without a traceback."""
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
    """Exit code 2, what is wrong, no traceback."""
    command = [sys.executable, "-m", "ramify", "serve", "ramify-tiny", "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)

    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr


def test_load_leaves_nothing() -> None:
    """A minute's worth of the script's work in seconds: no error, nothing held, exit code 0."""
    command = [sys.executable, str(ROOT / "scripts/load_server.py"), "--report-only"]
    sizes = ["--streams", "40", "--seconds", "6", "--stalled", "16", "--stalled-seconds", "4"]
    done = subprocess.run(
        [*command, *sizes], capture_output=True, text=True, timeout=280, check=False
    )

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["errors"], told["log_errors"], told["exit_code"]) == ([], [], 0)
    assert not any(told["left"].values())
    assert told["done"] > 0
    assert told["left_early"] > 0


def test_metrics_of_a_real_engine(server: Running) -> None:
    """The delay of the event loop is measured, and pages are counted."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert "ramify_event_loop_delay_seconds_count" in text
    assert 'vllm:kv_cache_usage_perc{model_name="ramify-tiny"}' in text
