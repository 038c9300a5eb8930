"""Engines over a real shared server: each other's pages, and a server that is dead, stopped, full or foreign."""

import ast
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ramify.engine.llm import LLM
from ramify.outputs import RequestOutput
from ramify.testing import write_tiny_checkpoint
from tests.cpu.test_tier_exactness import PAGE, PARAMS, SLOW, bits, key_file, prompts, settle
from tests.pure.valkey_server import ValkeyServer

pytest.importorskip("valkey", reason="the shared store needs valkey: pip install 'ramify[remote]'")

FIRST, SECOND = prompts()[:2]  # without a common prefix
NUM_TOKENS = 60  # of a prompt, in whole pages
LIMIT_S = 60.0  # until a server that is back is used
SIZES: dict[str, Any] = {
    "page_size": PAGE,
    "kv_cache_tokens": 256,
    "max_model_len": 128,
    "cache_cost": SLOW,
    "policy": "lru",
}
# An engine of a process of its own, which answers two prompts and ends.
ENGINE = """
import sys
from ramify.engine.llm import LLM
from tests.cpu.test_shared_store import FIRST, SECOND, SIZES
from tests.cpu.test_tier_exactness import PARAMS, bits
with LLM(sys.argv[1], cache_store=sys.argv[2], **SIZES) as llm:
    outputs = [llm.generate([prompt], PARAMS)[0] for prompt in (FIRST, SECOND)]
    print(repr([(output.cache.tier_tokens, bits(output)) for output in outputs]))
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("shared") / "model", "llama")


@pytest.fixture(scope="module")
def cold(llama: Path) -> tuple[object, ...]:
    """The answer to FIRST without a tier."""
    with LLM(llama, page_size=PAGE, kv_cache_tokens=256, max_model_len=128) as llm:
        [output] = llm.generate([FIRST], PARAMS)
        return bits(output)


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    server = ValkeyServer("--maxmemory", "200mb", "--maxmemory-policy", "allkeys-lru")
    yield server
    server.close()


def answer(llm: LLM, prompt: list[int] = FIRST) -> RequestOutput:
    """The answer to a prompt; the pool forgets it, and the tiers get its pages before."""
    [output] = llm.generate([prompt], PARAMS)
    llm.generate([prompt], PARAMS)
    settle(llm)
    return output


def evict_all(llm: LLM) -> None:
    """Fill the pool with other prompts."""
    for first in (10, 20, 30, 40):
        llm.generate([[first, *range(3, 90), 3]], PARAMS)
        settle(llm)


def answer_from_the_server(llm: LLM) -> RequestOutput:
    """Ask until pages come from the server, which the engine tries again after a pause."""
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        output = answer(llm)
        if output.cache.tier_tokens.get("remote"):
            return output
        evict_all(llm)
    raise AssertionError(f"the server was not used again within {LIMIT_S:g} s")


def test_engines_of_two_processes_read_each_others_pages(
    llama: Path, server: ValkeyServer, cold: tuple[object, ...]
) -> None:
    """What this process wrote the other one reads, and the other way round; the bits are the same."""
    with LLM(llama, cache_store=server.url, **SIZES) as llm:
        second = answer(llm, SECOND)
    command = [sys.executable, "-c", ENGINE, str(llama), server.url]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    with LLM(llama, cache_store=server.url, **SIZES) as llm:
        first = answer(llm, FIRST)

    assert ast.literal_eval(printed) == [
        ({}, cold),
        ({"remote": NUM_TOKENS}, bits(second)),
    ]
    assert first.cache.tier_tokens == {"remote": NUM_TOKENS}
    assert bits(first) == cold


def test_another_identity_reads_nothing(llama: Path, server: ValkeyServer) -> None:
    """One option of the arithmetic changed: a miss; the first engine's pages are there afterwards."""
    with LLM(llama, cache_store=server.url, **SIZES) as llm:
        answer(llm)
    with LLM(llama, cache_store=server.url, exact=False, **SIZES) as llm:
        other = answer(llm)
    with LLM(llama, cache_store=server.url, **SIZES) as llm:
        same = answer(llm)

    assert other.cache.tier_tokens == {}
    assert same.cache.tier_tokens == {"remote": NUM_TOKENS}


def test_a_cache_key_encrypts_what_goes_to_the_server(
    llama: Path, server: ValkeyServer, cold: tuple[object, ...], tmp_path: Path
) -> None:
    """Its pages are read with the key only, and are the same bits."""
    pytest.importorskip("cryptography")
    key, other = key_file(tmp_path / "key"), key_file(tmp_path / "other", b"o")
    outputs = []
    keys: list[dict[str, Any]] = [{"cache_key": path} for path in (key, other, None, key)]
    for options in keys:
        with LLM(llama, cache_store=server.url, **SIZES, **options) as llm:
            outputs.append(answer(llm))

    counts = [output.cache.tier_tokens.get("remote", 0) for output in outputs]
    assert counts == [0, 0, 0, NUM_TOKENS]
    assert bits(outputs[-1]) == cold


def test_a_server_that_dies_costs_hits_and_is_used_again_when_it_is_back(
    llama: Path, server: ValkeyServer, cold: tuple[object, ...]
) -> None:
    """Every answer is right; pages go to the new server, and come back from there."""
    with LLM(llama, cache_store=server.url, **SIZES) as llm:
        answer(llm)
        server.kill()
        evict_all(llm)
        without = answer(llm)
        evict_all(llm)
        assert llm.stats().tiers["remote"].is_available == 0
        server.restart()
        again = answer_from_the_server(llm)

    assert without.cache.tier_tokens == {}
    assert bits(without) == bits(again) == cold


def test_a_stopped_server_costs_a_bounded_wait(
    llama: Path, server: ValkeyServer, cold: tuple[object, ...]
) -> None:
    """No answer at all: requests compute, the end of the engine takes its limit at most."""
    with LLM(llama, cache_store=server.url, **SIZES) as llm:
        answer(llm)
        evict_all(llm)
        server.pause()
        begin_s = time.monotonic()
        [without] = llm.generate([FIRST], PARAMS)
        waited_s = time.monotonic() - begin_s
        server.resume()
        again = answer_from_the_server(llm)
        miss = llm.stats().tier_totals

    assert without.cache.tier_tokens == {}
    assert waited_s < 5.0
    assert miss["late_look_ups"] >= 1
    assert bits(without) == bits(again) == cold


def test_a_full_server_is_read_and_said_to_be_full(
    llama: Path, cold: tuple[object, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """`noeviction` is named at the start; when it refuses pages the others are used."""
    server = ValkeyServer("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    try:
        with caplog.at_level(logging.INFO), LLM(llama, cache_store=server.url, **SIZES) as llm:
            answer(llm)
            server.call("CONFIG", "SET", "maxmemory", "1mb")
            evict_all(llm)
            read = answer(llm)
            figures = llm.stats().tiers["remote"]
    finally:
        server.close()

    assert "noeviction" in caplog.text
    assert (figures.is_writable, figures.is_available) == (0, 1)
    assert figures.refused_pages > 0
    assert read.cache.tier_tokens == {"remote": NUM_TOKENS}
    assert bits(read) == cold


def test_a_server_with_too_small_values_is_named_at_the_start_and_not_used(
    llama: Path, cold: tuple[object, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The warning has the command that mends it."""
    server = ValkeyServer("--proto-max-bulk-len", str(1 << 20))
    large = {**SIZES, "page_size": 64, "kv_cache_tokens": 1 << 16, "max_model_len": 128}
    try:
        with (
            caplog.at_level(logging.WARNING),
            LLM(_wide(llama), cache_store=server.url, **large) as llm,
        ):
            [output] = llm.generate([FIRST], PARAMS)
            is_available = llm.stats().tiers["remote"].is_available
    finally:
        server.close()

    assert "CONFIG SET proto-max-bulk-len" in caplog.text
    assert (is_available, output.error) == (0, None)


def _wide(llama: Path) -> Path:
    """A model whose page of 64 tokens has more than a megabyte."""
    path = llama.with_name("wide")
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "head_dim": 256,
        "num_key_value_heads": 8,
        "num_attention_heads": 8,
    }
    return path if path.exists() else write_tiny_checkpoint(path, "llama", **sizes)


@pytest.mark.parametrize("url", ["unix:///nowhere/at/all", "http"])
def test_a_server_that_is_none_costs_hits_only(
    llama: Path, cold: tuple[object, ...], caplog: pytest.LogCaptureFixture, url: str
) -> None:
    """Nobody listens, or somebody who speaks HTTP: the start warns, and every answer is right."""
    from tests.pure.test_valkey_store import foreign_server

    with foreign_server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as foreign:
        store = foreign if url == "http" else url
        with caplog.at_level(logging.WARNING), LLM(llama, cache_store=store, **SIZES) as llm:
            output = answer(llm)

    assert "out of reach" in caplog.text
    assert output.cache.tier_tokens == {}
    assert bits(output) == cold
