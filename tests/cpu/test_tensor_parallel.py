"""An engine whose model several processes share: its tokens, its bits, and its end when a process goes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.engine.llm import LLM
from ramify.errors import ConfigError, EngineStoppedError, RankLostError
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams
from ramify.testing import write_tiny_checkpoint
from tests.cpu.deepseek_cases import CONFIGS, save_oracle
from tests.cpu.engine_cases import spoil_free_pages
from tests.cpu.models.family_cases import CASES, write_checkpoint

NUM_NEW = 6
TIE = 1e-3  # between the two largest logits: the order of sums may decide
OPTIONS: dict[str, Any] = {"kv_cache_tokens": 2048, "max_model_len": 256, "page_size": 8}
GONE_S = 20.0


def prompts() -> list[list[int]]:
    """Three that share 37 tokens, which end inside a page, and one alone."""
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 300, (200,), generator=draw).tolist()
    return [tokens[:37] + tokens[40 + 20 * n : 45 + 27 * n] for n in range(3)] + [tokens[150:171]]


def params() -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NUM_NEW, logprobs=5, ignore_eos=True)


def answer(llm: LLM, token_ids: Sequence[list[int]]) -> list[RequestOutput]:
    return llm.generate([*token_ids], params())


def bits(outputs: Sequence[RequestOutput]) -> list[object]:
    """Tokens, and the log probabilities of them and of the five likeliest to the last bit."""
    return [(output.completions[0].token_ids, output.completions[0].logprobs) for output in outputs]


def assert_same_tokens(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """The tokens of one process, up to a tie of its two largest logits."""
    for output, other in zip(outputs, expected, strict=True):
        ours, theirs = output.completions[0], other.completions[0]
        logprobs = theirs.logprobs
        assert logprobs is not None
        for place, (token, its) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
            best, second = sorted(logprobs[place].top.values(), reverse=True)[:2]
            if token != its:
                assert best - second <= TIE
                break


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(processes: Sequence[int]) -> None:
    until_s = time.monotonic() + GONE_S
    while any(map(is_running, processes)):
        assert time.monotonic() < until_s, f"of {processes} some are still there"
        time.sleep(0.02)


@dataclass
class Engines:
    """The same checkpoint in one process and in several."""

    single: LLM
    shared: LLM


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "llama"
    return write_tiny_checkpoint(path, "llama", tokenizer=False, num_key_value_heads=2)


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads: an engine of many ranks lowers it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engines(checkpoint: Path) -> Iterator[Engines]:
    threads = torch.get_num_threads()
    # Compiled kernels are for the full run: two processes would compile them at once.
    options = OPTIONS | {"ops": "torch"}
    with LLM(checkpoint, **options) as single:
        with LLM(checkpoint, tensor_parallel_size=2, **options) as shared:
            yield Engines(single, shared)
            processes = shared.engine.ranks.process_ids if shared.engine.ranks else []
        wait_until_gone(processes)
    torch.set_num_threads(threads)


def test_two_processes_answer_as_one_does(engines: Engines) -> None:
    """Wherever the two largest logits differ by more than 1e-3."""
    expected = answer(engines.single, prompts())

    outputs = answer(engines.shared, prompts())

    assert_same_tokens(outputs, expected)


def assert_exact(llm: LLM) -> None:
    """Cold = warm = chunked = batched, also from a copied part of a page, whatever free pages hold."""
    alone = []
    for prompt in prompts():
        llm.cache.clear()
        alone += bits(answer(llm, [prompt]))

    llm.cache.clear()
    batched = bits(answer(llm, prompts()))
    spoil_free_pages(llm.engine.runner.pool, llm.core.cache)
    outputs = answer(llm, prompts())
    llm.cache.clear()
    llm.core.scheduler.max_batch_tokens = 7
    chunked = bits(answer(llm, prompts()))
    llm.core.scheduler.max_batch_tokens = llm.config.max_batch_tokens

    assert all(output.usage.cached_tokens for output in outputs)
    assert bits(outputs) == alone
    assert batched == alone
    assert chunked == alone


def test_bits_are_those_of_a_prompt_alone_and_cold(engines: Engines) -> None:
    """At a fixed number of ranks."""
    assert_exact(engines.shared)


def test_a_row_that_is_not_finite_takes_no_other_request_with_it(engines: Engines) -> None:
    """Its pages are damaged in one rank only; it is computed again, and the answer is the same."""
    llm, prompt = engines.shared, prompts()[0]
    llm.cache.clear()
    expected = bits(answer(llm, [prompt]))
    page = next(page for page in range(llm.config.num_pages) if not llm.core.cache.is_free(page))
    llm.engine.runner.pool.planes(0)["v"][page] = torch.nan

    outputs = answer(llm, [prompt])

    assert bits(outputs) == expected
    assert llm.stats().failures.failed_requests >= 1


def test_the_number_of_ranks_is_part_of_the_identity(engines: Engines) -> None:
    """K/V of other numbers of ranks have other bits."""
    single, shared = engines.single, engines.shared

    assert "ranks 2" in shared.engine.identity().arithmetic
    assert "ranks" not in single.engine.identity().arithmetic
    assert shared.core.namespaces.base != single.core.namespaces.base


def test_ranks_hold_parts(engines: Engines) -> None:
    """Half of the K/V of a token, and at most 0.6 of the weights on each."""
    single, shared = engines.single, engines.shared
    assert shared.engine.ranks is not None

    weights = [shared.engine.num_weight_bytes, *shared.engine.ranks.weight_bytes()]

    assert shared.config.token_bytes == single.config.token_bytes // 2
    assert max(weights) <= 0.6 * single.engine.num_weight_bytes


def test_weights_are_not_replaced_in_many_processes(engines: Engines, checkpoint: Path) -> None:
    """The error says what to do instead."""
    with pytest.raises(ConfigError, match="tensor_parallel_size=2; start another engine"):
        engines.shared.reload_weights(checkpoint)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 0}, "an integer of 1 to 64"),
        ({"tensor_parallel_size": "2"}, "an integer of 1 to 64"),
        ({"tensor_parallel_size": 3}, "4 attention heads, .* use 1, 2, 4$"),
        ({"tensor_parallel_size": 2, "cache_host": "1MB"}, "cache tiers copy pages of one process"),
        ({"tensor_parallel_size": 2, "rank_timeout_s": 0}, "above 0"),
    ],
)
def test_what_ranks_cannot_share_is_refused(
    options: dict[str, object], words: str, checkpoint: Path
) -> None:
    """Before a process is started, with the value, the limit and the way out."""
    with pytest.raises(ConfigError, match=words):
        LLM(checkpoint, **OPTIONS | options)


def test_an_engine_ends_with_a_process_that_is_killed(engines: Engines) -> None:
    """In the middle of an answer: an error that names the rank, no hang, and no process is left."""
    llm = engines.shared
    assert llm.engine.ranks is not None
    [process] = llm.engine.ranks.process_ids
    llm.add_request(prompts()[0], SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
    for _ in range(3):
        llm.step()

    os.kill(process, signal.SIGKILL)
    with pytest.raises(RankLostError, match=r"rank 1 of 2 .* was ended by SIGKILL"):
        answer(llm, prompts())

    wait_until_gone([process])
    with pytest.raises(EngineStoppedError, match="make another one"):
        answer(llm, prompts()[:1])


# -- in the full run: each starts processes of its own -----------------------------------------


def write(case: str, path: Path) -> Path:
    """A checkpoint: a family of `CASES`, or a model of `CONFIGS` with latent attention."""
    if case in CONFIGS:
        save_oracle(case, path, vocab_size=300)
    elif case in CASES:
        write_checkpoint(case, path, vocab_size=300)
    else:
        write_tiny_checkpoint(path, "llama", tokenizer=False, num_key_value_heads=2)
    return path


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("ops", ["cpu", "torch"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", ["llama", "Qwen3Moe", "Qwen2Moe", "v3", "v32"])
def test_processes_share_every_kind_of_model(
    case: str, size: int, ops: str, tmp_path: Path
) -> None:
    """Dense, experts, a gated shared expert, MLA, MLA with a sparse index: tokens and bits."""
    path = write(case, tmp_path / "model")
    with LLM(path, ops=ops, **OPTIONS) as single:
        expected = answer(single, prompts())

    with LLM(path, ops=ops, tensor_parallel_size=size, **OPTIONS) as llm:
        assert_same_tokens(answer(llm, prompts()), expected)
        assert_exact(llm)


@pytest.mark.usefixtures("threads")
def test_an_engine_ends_when_a_process_hangs(checkpoint: Path) -> None:
    """After `rank_timeout_s`, with the process that did not answer; it is ended."""
    with LLM(checkpoint, tensor_parallel_size=4, rank_timeout_s=4, **OPTIONS) as llm:
        answer(llm, prompts())
        assert llm.engine.ranks is not None
        processes = llm.engine.ranks.process_ids
        os.kill(processes[1], signal.SIGSTOP)
        begin_s = time.monotonic()

        with pytest.raises(RankLostError) as caught:
            answer(llm, prompts())

        assert time.monotonic() - begin_s < 4 + GONE_S
        assert caught.value.reason == (
            f"rank 2 of 4 (process {processes[1]}) did not answer within rank_timeout_s=4"
        )
        wait_until_gone(processes)


@pytest.mark.usefixtures("threads")
def test_no_process_outlives_the_engines(checkpoint: Path) -> None:
    """Also if that is killed: in a program of its own, at once."""
    program = (
        "import os, signal, sys; from ramify import LLM\n"
        "if __name__ == '__main__':\n"
        "    llm = LLM(sys.argv[1], tensor_parallel_size=2, kv_cache_tokens=512, max_model_len=64)\n"
        "    print(*llm.engine.ranks.process_ids, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(checkpoint)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert run.returncode == -signal.SIGKILL, run.stderr
    wait_until_gone([int(run.stdout)])


@pytest.mark.usefixtures("threads")
def test_processes_end_with_an_engine_that_is_dropped(checkpoint: Path) -> None:
    """Without `close`, and without the garbage collector."""
    llm = LLM(checkpoint, tensor_parallel_size=2, ops="torch", **OPTIONS)
    answer(llm, prompts()[:1])
    assert llm.engine.ranks is not None
    processes = llm.engine.ranks.process_ids

    gc.disable()
    try:
        del llm
        wait_until_gone(processes)
    finally:
        gc.enable()
