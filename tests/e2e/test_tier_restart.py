"""Servers over one cache directory: the first request after a restart is answered from disk."""

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ramify.kv.stores import segment_tools
from tests.e2e.conftest import Running, start_server
from tests.pure.valkey_server import ValkeyServer

PROMPT = "Mara has 14 lamps. The violin is in the attic. " * 12 + "Where?"
BODY = {"model": "ramify-tiny", "max_tokens": 8, "temperature": 0, "logprobs": 2}

# By this file computing is so slow that every load pays, whatever a busy machine measures.
SLOW = str(Path(__file__).parents[1] / "slow_steps.json")
OPTIONS = ("--cache-disk", "600MB", "--cache-cost", SLOW)


def answer(server: Running, prompt: str = PROMPT) -> tuple[Any, dict[str, Any]]:
    """The choice of one answer, and where the tokens of its prompt came from."""
    headers = {"content-type": "application/json"}
    body = json.dumps({**BODY, "prompt": prompt}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        payload = json.load(response)
    return payload["choices"][0], payload["usage"]["ramify_cache"]


def until_on_disk(server: Running, num_pages: int) -> None:
    """Wait until the disk tier has written this many pages."""
    deadline = time.monotonic() + 60
    row = f'ramify_tier_written_pages_total{{tier="disk"}} {num_pages:.1f}\n'
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
            if row in response.read().decode():
                return
        time.sleep(0.05)
    raise AssertionError(f"{num_pages} pages were not written in 60 s")


def test_a_server_after_a_restart_answers_its_first_request_from_disk(tmp_path: Path) -> None:
    """After SIGTERM even a prompt that was asked once; the answer has the same bits."""
    options = (*OPTIONS, "--cache-dir", str(tmp_path / "pages"))
    first = start_server(tmp_path / "first", *options)
    cold, computed = answer(first)
    assert first.stop() == 0

    second = start_server(tmp_path / "second", *options)
    warm, read = answer(second)
    assert second.stop() == 0

    assert computed["read"] == 0
    assert read["read_by_tier"] == {"pool": 0, "disk": computed["written"]}
    assert warm == cold


def test_a_server_after_a_kill_has_the_pages_that_were_used_twice(tmp_path: Path) -> None:
    """SIGKILL loses nothing that was acknowledged as written."""
    options = (*OPTIONS, "--cache-dir", str(tmp_path / "pages"))
    first = start_server(tmp_path / "first", *options)
    cold, computed = answer(first)
    answer(first)
    until_on_disk(first, computed["written"] // 16)
    first.process.kill()
    first.process.wait()

    second = start_server(tmp_path / "second", *options)
    warm, read = answer(second)
    assert second.stop() == 0

    assert read["read_by_tier"] == {"pool": 0, "disk": computed["written"]}
    assert warm == cold


def test_a_server_reads_from_a_shared_store_what_another_one_wrote(tmp_path: Path) -> None:
    """Usage, and the metrics by tier, say so; both servers go on when the store has gone."""
    pytest.importorskip("valkey", reason="needs valkey: pip install 'ramify[remote]'")
    store = ValkeyServer("--maxmemory", "200mb", "--maxmemory-policy", "allkeys-lru")
    try:
        options = ("--cache-store", store.url, "--cache-cost", SLOW)
        first = start_server(tmp_path / "first", *options)
        cold, computed = answer(first)
        assert first.stop() == 0
        second = start_server(tmp_path / "second", *options)
        warm, read = answer(second)
        with urllib.request.urlopen(f"{second.url}/metrics", timeout=10) as response:
            metrics = response.read().decode()
    finally:
        store.close()
    again, _ = answer(second)
    assert second.stop() == 0

    assert read["read_by_tier"] == {"pool": 0, "remote": computed["written"]}
    assert warm == again == cold
    num_pages = computed["written"] // 16
    assert f'ramify_tier_loaded_pages_total{{tier="remote"}} {num_pages:.1f}' in metrics
    assert 'ramify_tier_available{tier="remote"} 1.0' in metrics


def test_replicas_of_one_directory_write_below_it(tmp_path: Path) -> None:
    """Two replicas start with the same options; one of them computed the prompt and has written it."""
    pages = tmp_path / "pages"
    options = ("--replicas", "2", "--cache-dir", str(pages), "--cache-disk", "1200MB")
    server = start_server(tmp_path / "log", *options)
    _, computed = answer(server)
    assert server.stop() == 0

    assert sorted(path.name for path in pages.iterdir()) == ["replica-0", "replica-1"]
    num_pages = 0
    for path in pages.iterdir():
        directory = segment_tools.choose(path, None)
        with segment_tools.opened(directory, cache_key=None, read_only=True) as store:
            num_pages += segment_tools.verify(store).num_pages
    assert num_pages == computed["written"] // 16
