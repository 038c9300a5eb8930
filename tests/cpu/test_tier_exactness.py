"""Answers are the same bits whether K/V was computed, or came from memory, from disk, or after a restart."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.engine.llm import LLM
from ramify.errors import ConfigError
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams
from ramify.testing import TinyFamily, write_tiny_checkpoint
from tests.pure.valkey_server import ValkeyServer

PAGE = 4
POOL_PAGES = 24  # a prompt and its answer, and a few pages more
PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=3)
# By this file computing is so slow that every load pays, whatever a busy machine measures.
SLOW = str(Path(__file__).parents[1] / "slow_steps.json")
WINDOW = {"sliding_window": 20}
MIXED = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "float32": ("llama", {}, {}),
    "bfloat16": ("qwen3", {}, {"dtype": "bfloat16"}),
    "int8": ("qwen2", {}, {"kv_dtype": "int8"}),
    "window": ("mistral", WINDOW, {}),
    "window of some layers": ("qwen2", MIXED, {}),
    "torch": ("llama", {}, {"ops": "torch"}),
}


def prompts() -> list[list[int]]:
    """Two prefixes with three suffixes each; the two do not fit in the pool together."""
    prefixes = [[(7 * at + start) % 90 + 3 for at in range(61)] for start in (1, 50)]
    return [[*prefix, *range(10, 10 + length)] for length in (1, 6, 11) for prefix in prefixes]


@pytest.fixture(scope="module", params=[*CASES, "mla", "mla with an index"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A tiny checkpoint, and the options of its engines."""
    path = tmp_path_factory.mktemp("tiers") / "model"
    name = request.param
    if name in CASES:
        family, overrides, options = CASES[name]
        return write_tiny_checkpoint(path, family, **overrides), options  # type: ignore[arg-type]
    from tests.cpu.deepseek_cases import save_oracle

    return save_oracle("v3" if name == "mla" else "v32", path).path, {}


@pytest.fixture
def open_llm(model: tuple[Path, dict[str, Any]]) -> Iterator[Callable[..., LLM]]:
    """Makes engines of the model with a pool of a few pages, and closes them."""
    path, options = model
    engines: list[LLM] = []

    def make(**others: Any) -> LLM:
        sizes = {"page_size": PAGE, "kv_cache_tokens": POOL_PAGES * PAGE, "max_batch_tokens": 16}
        llm = LLM(path, max_model_len=POOL_PAGES * PAGE, **{**sizes, **options, **others})
        engines.append(llm)
        return llm

    yield make
    for llm in engines:
        llm.close()


def bits(output: RequestOutput) -> tuple[object, ...]:
    """Tokens, and the bits of their log probabilities."""
    assert output.error is None
    logprobs = output.completions[0].logprobs
    assert logprobs is not None
    values = [
        (entry.logprob.hex(), {t: p.hex() for t, p in entry.top.items()}) for entry in logprobs
    ]
    return output.token_ids, values


def run(llm: LLM) -> tuple[list[tuple[object, ...]], dict[str, int]]:
    """The answers to all prompts, one after another, and the prompt tokens loaded by tier."""
    answers, loaded = [], dict[str, int]()
    for prompt in prompts():
        [output] = llm.generate([prompt], PARAMS)
        answers.append(bits(output))
        for tier, count in output.cache.tier_tokens.items():
            loaded[tier] = loaded.get(tier, 0) + count
        settle(llm)
    return answers, loaded


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    """A shared store; the test is skipped where there is no server or no client."""
    pytest.importorskip(
        "valkey", reason="the shared store needs valkey: pip install 'ramify[remote]'"
    )
    server = ValkeyServer("--maxmemory", "200mb", "--maxmemory-policy", "allkeys-lru")
    yield server
    server.close()


def settle(llm: LLM) -> None:
    """Wait until the writer has written what it has."""
    tiering = llm.core.tiering
    while tiering is not None and (tiering.num_buffers_in_use or tiering.has_copies_left):
        tiering.wait_for_buffers()
        tiering.tend()


def test_cold_host_disk_and_restarted_answers_are_the_same_bits(
    open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """With a pool that holds one prompt, each second prompt comes from a tier."""
    cold, _ = run(open_llm(prefix_cache=False))
    disk = {"cache_dir": str(tmp_path / "pages"), "cache_disk": "600MB", "cache_cost": SLOW}

    from_host, host_tokens = run(open_llm(cache_host="4MB", cache_cost=SLOW))
    with open_llm(**disk) as llm:
        from_disk, disk_tokens = run(llm)
    with open_llm(**disk) as llm:
        restarted, restarted_tokens = run(llm)
    both, both_tokens = run(open_llm(**disk, cache_host="20kB"))

    assert from_host == from_disk == restarted == both == cold
    assert host_tokens["host"] > 100
    assert disk_tokens["disk"] > 100
    # The first prompt too.
    assert restarted_tokens["disk"] > disk_tokens["disk"]
    assert both_tokens["disk"] > 100


def test_answers_from_a_shared_store_are_the_same_bits(
    open_llm: Callable[..., LLM], server: ValkeyServer, tmp_path: Path
) -> None:
    """By the engine that wrote the pages, by another one, and beside a disk too small for all."""
    cold, _ = run(open_llm(prefix_cache=False))
    store = {"cache_store": server.url, "cache_cost": SLOW}
    disk = {"cache_dir": str(tmp_path / "pages"), "cache_disk": "600MB"}

    with open_llm(**store) as llm:
        first, first_tokens = run(llm)
    with open_llm(**store) as llm:
        other, other_tokens = run(llm)
    both, both_tokens = run(open_llm(**disk, **store, cache_host="20kB"))

    assert first == other == both == cold
    assert first_tokens["remote"] > 100
    # The first prompt too.
    assert other_tokens["remote"] > first_tokens["remote"]
    assert both_tokens["remote"] > 0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("identity") / "model", "llama")


def disk_tokens(path: Path, directory: Path, **options: Any) -> int:
    """Tokens of a prompt that an engine with this directory loads; it leaves its pages there."""
    sizes: dict[str, Any] = {"page_size": PAGE, "kv_cache_tokens": 256, "max_model_len": 128}
    tier = {"cache_dir": directory, "cache_disk": "600MB", "cache_cost": SLOW}
    with LLM(path, **{**sizes, **tier, **options}) as llm:
        [output] = llm.generate([prompts()[0]], PARAMS)
        return output.cache.tier_tokens.get("disk", 0)


@pytest.mark.parametrize(
    "changed",
    [
        {"page_size": 8},
        {"kv_dtype": "int8"},
        {"exact": False},
        {"ops": "torch"},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_an_engine_of_another_identity_reads_nothing(
    llama: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    """And the first one still reads its own pages afterwards."""
    assert disk_tokens(llama, tmp_path) == 0

    assert disk_tokens(llama, tmp_path, **changed) == 0

    assert disk_tokens(llama, tmp_path) == 60


def test_another_number_of_threads_reads_nothing_under_exact(llama: Path, tmp_path: Path) -> None:
    """The bits of K/V may depend on it; without `exact` the pages are as good."""
    num_threads = torch.get_num_threads()
    counts = [disk_tokens(llama, tmp_path / str(exact), exact=exact) for exact in (True, False)]
    try:
        torch.set_num_threads(num_threads + 1)
        counts += [disk_tokens(llama, tmp_path / str(e), exact=e) for e in (True, False)]
    finally:
        torch.set_num_threads(num_threads)

    assert counts == [0, 0, 0, 60]


@pytest.mark.parametrize("variable", ["ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"])
def test_another_instruction_set_reads_nothing_under_exact(
    llama: Path, tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What selects a library's instructions is part of the identity; without it the pages are back."""
    assert disk_tokens(llama, tmp_path) == 0

    with monkeypatch.context() as patch:
        patch.setenv(variable, "avx2")
        assert disk_tokens(llama, tmp_path) == 0

    assert disk_tokens(llama, tmp_path) == 60


@pytest.mark.parametrize(
    ("family", "changed"),
    [("llama", {"rope_theta": 20_000.0}), ("mistral", {"sliding_window": 24})],
)
def test_equal_weights_of_another_configuration_read_nothing(
    tmp_path: Path, family: TinyFamily, changed: dict[str, Any]
) -> None:
    """K/V depends on rope and windows, which no weight shows; the first one still reads its own."""
    paths = [
        write_tiny_checkpoint(tmp_path / name, family, **overrides)
        for name, overrides in (("one", WINDOW), ("other", {**WINDOW, **changed}))
    ]
    weights = [(path / "model.safetensors").read_bytes() for path in paths]
    directory = tmp_path / "pages"
    assert weights[0] == weights[1] and disk_tokens(paths[0], directory) == 0

    assert disk_tokens(paths[1], directory) == 0

    assert disk_tokens(paths[0], directory) == 60


def test_a_copy_of_the_checkpoint_reads_the_same_pages(llama: Path, tmp_path: Path) -> None:
    """Pages are named by the content of the weights, not by their path."""
    copy = write_tiny_checkpoint(tmp_path / "copy", "llama")
    other = write_tiny_checkpoint(tmp_path / "other", "llama", seed=1)
    assert disk_tokens(llama, tmp_path / "pages") == 0

    assert disk_tokens(other, tmp_path / "pages") == 0
    assert disk_tokens(copy, tmp_path / "pages") == 60


def test_a_second_engine_reads_the_pages_of_the_first_and_writes_none(
    llama: Path, tmp_path: Path
) -> None:
    """A directory has one writer; another engine shares its pages by an option."""
    sizes: dict[str, Any] = {"page_size": PAGE, "kv_cache_tokens": 256, "max_model_len": 128}
    tier: dict[str, Any] = {"cache_dir": tmp_path, "cache_disk": "600MB", "cache_cost": SLOW}
    with LLM(llama, **sizes, **tier) as writer:
        [cold] = writer.generate([prompts()[0]], PARAMS)
        writer.generate([prompts()[0]], PARAMS)
        settle(writer)
        with pytest.raises(ConfigError, match="in use by process"):
            LLM(llama, **sizes, **tier)
        with LLM(llama, **sizes, **tier, cache_dir_readonly=True) as reader:
            [shared] = reader.generate([prompts()[0]], PARAMS)
            reader.generate([prompts()[1]], PARAMS)
            reader.generate([prompts()[1]], PARAMS)
            settle(reader)
            assert reader.stats().tier_totals["unwritten_pages"] == 0

    assert shared.cache.tier_tokens == {"disk": 60}
    assert bits(shared) == bits(cold)
    assert disk_tokens(llama, tmp_path) == 60


def test_reloaded_weights_use_their_own_pages(llama: Path, tmp_path: Path) -> None:
    """A page of the old weights is not read with the new ones, and is good when they return."""
    other = write_tiny_checkpoint(tmp_path / "other", "llama", seed=1)
    [prompt] = prompts()[:1]
    tier: dict[str, Any] = {
        "cache_dir": tmp_path / "pages",
        "cache_disk": "600MB",
        "cache_cost": SLOW,
    }
    with LLM(llama, page_size=PAGE, kv_cache_tokens=256, max_model_len=128, **tier) as llm:
        [old] = llm.generate([prompt], PARAMS)
        llm.generate([prompt], PARAMS)
        settle(llm)
        llm.reload_weights(other)
        [new] = llm.generate([prompt], PARAMS)
        llm.reload_weights(llama)
        [back] = llm.generate([prompt], PARAMS)

    assert new.cache.read_tokens == 0
    # All but the last token, which is always computed: the common tokens of the last page too.
    assert back.cache.read_tokens == len(prompt) - 1
    assert bits(back) == bits(old) != bits(new)


def test_the_host_tier_serves_reloaded_weights(llama: Path) -> None:
    """It begins anew: what it held was of the old weights."""
    sizes: dict[str, Any] = {
        "page_size": PAGE,
        "kv_cache_tokens": POOL_PAGES * PAGE,
        "max_model_len": POOL_PAGES * PAGE,
    }
    with LLM(llama, cache_host="4MB", cache_cost=SLOW, **sizes) as llm:
        before, _ = run(llm)
        llm.reload_weights(llama)
        after, tokens = run(llm)
        assert llm.core.tiering is not None
        assert llm.core.tiering.reading_off == ""

    assert after == before
    assert tokens["host"] > 0


def key_file(path: Path, byte: bytes = b"k") -> Path:
    """A key that only its owner may read."""
    path.write_bytes(byte * 32)
    path.chmod(0o600)
    return path


def test_encrypted_pages_are_the_same_bits_after_a_restart(llama: Path, tmp_path: Path) -> None:
    """The tag of AES-GCM verifies them in place of the checksum."""
    pytest.importorskip("cryptography")
    tier: dict[str, Any] = {
        "cache_dir": tmp_path / "pages",
        "cache_disk": "600MB",
        "cache_cost": SLOW,
        "cache_key": key_file(tmp_path / "key"),
    }
    sizes: dict[str, Any] = {"page_size": PAGE, "kv_cache_tokens": 256, "max_model_len": 128}
    with LLM(llama, **sizes) as llm:
        [cold] = llm.generate([prompts()[0]], PARAMS)
    with LLM(llama, **sizes, **tier) as llm:
        llm.generate([prompts()[0]], PARAMS)
    with LLM(llama, **sizes, **tier) as llm:
        [restarted] = llm.generate([prompts()[0]], PARAMS)

    assert restarted.cache.tier_tokens == {"disk": 60}
    assert bits(restarted) == bits(cold)


def test_pages_of_another_cache_key_are_not_read(llama: Path, tmp_path: Path) -> None:
    """Neither with another key nor without; the first key still reads its own afterwards."""
    pytest.importorskip("cryptography")
    pages, key = tmp_path / "pages", key_file(tmp_path / "key")
    other = key_file(tmp_path / "other", b"o")

    counts = [disk_tokens(llama, pages, cache_key=path) for path in (key, other, None, key)]

    assert counts == [0, 0, 0, 60]


def test_a_cache_key_that_others_may_read_is_refused(llama: Path, tmp_path: Path) -> None:
    """At start, with the way out."""
    key = key_file(tmp_path / "key")
    key.chmod(0o644)

    with pytest.raises(ConfigError, match="run: chmod 600"):
        disk_tokens(llama, tmp_path / "pages", cache_key=key)
