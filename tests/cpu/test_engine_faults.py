"""A real model with NaN in weights or K/V, and with failed allocations."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ramify import LLM, SamplingParams
from ramify.cache import CacheKey
from ramify.engine.execution.local_executor import is_out_of_memory
from ramify.errors import StepFailedError, StepMemoryError
from ramify.kv.pool import KVPool
from ramify.outputs import RequestOutput
from ramify.testing import write_tiny_checkpoint
from tests.cpu.engine_cases import assert_idle
from tests.cpu.engine_life import CELLS, Life, SmallModel
from tests.cpu.tiny_models import WEIGHTS
from tests.device_runner import chosen_runner

STEM = list(range(3, 40))
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
KINDS = [  # dtype, kv_dtype, ops or how weights are quantised
    ("float32", "auto", "auto"),
    ("float32", "auto", "weights8"),
    ("bfloat16", "auto", "weights4"),
    ("bfloat16", "auto", "auto"),
    ("float32", "int8", "auto"),
    ("float32", "auto", "torch"),
    ("bfloat16", "int8", "torch"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    return write_tiny_checkpoint(folder, "llama", num_hidden_layers=2)


def started(checkpoint: Path, dtype: str, kv_dtype: str, ops: str = "auto") -> LLM:
    options: dict[str, Any] = {"kv_cache_tokens": 1024, "page_size": 4, "ops": ops}
    if ops in WEIGHTS:
        options |= {"ops": "auto", "quantize": WEIGHTS[ops]}
    return LLM(checkpoint, dtype=dtype, kv_dtype=kv_dtype, **options)


def answers(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def spoil(pool: KVPool, pages: list[int], plane: str) -> None:
    """Write NaN into layer 1 of these pages: into the plane itself, or into its scales."""
    planes = pool.planes(1)
    name = plane if planes[plane].is_floating_point() else f"{plane}_scale"
    planes[name][pages] = float("nan")


def cached_pages(llm: LLM, tokens: list[int]) -> list[int]:
    lease = llm.core.cache.acquire(CacheKey(tokens, llm.core.namespaces.base))
    llm.core.cache.release(lease)
    return list(lease.pages)


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("plane", ["k", "v"])
@pytest.mark.parametrize(("dtype", "kv_dtype", "ops"), KINDS)
def test_a_damaged_page_in_the_cache_fails_nobody_for_ever(
    checkpoint: Path, dtype: str, kv_dtype: str, ops: str, plane: str, is_pinned: bool
) -> None:
    """Requests that hit a damaged page are recomputed, and the page is evicted."""
    llm = started(checkpoint, dtype, kv_dtype, ops)
    prompts = [[*STEM, 70], [*STEM, 71, 72], [80, 81, 82, 83, 84]]
    expected = answers(llm.generate(prompts, PARAMS))
    if is_pinned:
        llm.core.cache.pin(CacheKey(STEM[:8], llm.core.namespaces.base), "somebody")
    spoil(llm.engine.runner.pool, cached_pages(llm, STEM)[3:4], plane)

    outputs = llm.generate(prompts, PARAMS)

    assert answers(outputs) == expected
    assert all(output.error is None for output in outputs)
    counts = llm.core.recovery.counts
    assert counts.failed_requests == 2
    assert counts.evicted_suspect_pages >= 9
    assert not llm.core.cache.pins()
    llm.generate(prompts, PARAMS)  # fills the cache again
    last = llm.generate(prompts, PARAMS)
    assert answers(last) == expected
    assert last[0].cache.read_tokens == len(STEM)
    assert (counts.failed_requests, counts.errors, counts.rebuilds) == (2, 0, 0)
    assert_idle(llm)


@pytest.mark.parametrize(("dtype", "kv_dtype", "ops"), KINDS)
def test_a_page_that_is_damaged_while_it_is_used_is_computed_again(
    checkpoint: Path, dtype: str, kv_dtype: str, ops: str
) -> None:
    """A damaged page of a running request is recomputed, private or shared."""
    llm = started(checkpoint, dtype, kv_dtype, ops)
    prompts = [[*STEM, 70], [*STEM, 71], [80, 81, 82]]
    expected = answers(llm.generate(prompts, PARAMS))
    llm.cache.clear()
    names = [llm.add_request(prompt, PARAMS) for prompt in prompts]
    llm.step()
    llm.step()
    request = max(llm.core.scheduler.running, key=lambda running: len(running.prompt_ids))
    assert request.sequence.row is not None
    spoil(llm.engine.runner.pool, llm.core.table.pages(request.sequence.row)[2:3], "v")

    while llm.has_unfinished():
        llm.step()

    outputs = [llm.take_output(name) for name in names]
    assert answers(outputs) == expected
    assert all(output.error is None for output in outputs)
    assert llm.core.recovery.counts.failed_requests == 2
    assert_idle(llm)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "ops"), [kind for kind in KINDS if kind[2] not in WEIGHTS]
)
def test_a_weight_that_is_nan_fails_those_who_need_it(
    checkpoint: Path, tmp_path: Path, dtype: str, kv_dtype: str, ops: str
) -> None:
    """A NaN embedding row fails the request that uses it; its batch mates are answered."""
    prompts = [[*STEM, 70], [*STEM, 290, 71], [80, 81, 82]]
    expected = answers(started(checkpoint, dtype, kv_dtype, ops).generate(prompts, PARAMS))
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    weights = load_file(damaged / "model.safetensors")
    weights["model.embed_tokens.weight"][290] = float("nan")
    save_file(weights, damaged / "model.safetensors")
    llm = started(damaged, dtype, kv_dtype, ops)
    llm.generate([STEM], PARAMS)

    outputs = llm.generate(prompts, PARAMS)

    assert isinstance(outputs[1].error, StepFailedError)
    assert "not finite" in str(outputs[1].error)
    assert answers(outputs)[::2] == expected[::2]
    assert llm.core.recovery.counts.evicted_suspect_pages == 0  # the cache was not at fault
    assert cached_pages(llm, STEM)
    assert_idle(llm)


# -- memory --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 10 bytes"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_every_library_that_mean_memory_are_known(
    error: Exception, is_memory: bool
) -> None:
    """`is_out_of_memory` recognises memory errors by type, and by torch's message on CPU."""
    assert is_out_of_memory(error) is is_memory


def test_a_forward_pass_without_memory_is_tried_in_halves(checkpoint: Path) -> None:
    """A forward pass that fails to allocate is retried in halves, with the same answers."""
    llm = started(checkpoint, "float32", "auto")
    expected = answers(llm.generate([STEM, [80, 81]], PARAMS))
    llm.cache.clear()
    forward, sizes = llm.engine.decoder.forward, list[int]()

    def greedy(token_ids: torch.Tensor, *others: object) -> torch.Tensor:
        sizes.append(len(token_ids))
        if len(token_ids) > 16:
            torch.empty(2**60)  # more than any machine has
        return forward(token_ids, *others)  # type: ignore[arg-type]

    llm.engine.runner.model = _Stand(llm.engine.decoder, greedy)  # type: ignore[assignment]
    outputs = llm.generate([STEM, [80, 81]], PARAMS)

    assert answers(outputs) == expected
    assert llm.core.recovery.counts.out_of_memory >= 1
    assert max(sizes[-6:]) <= 16 < max(sizes)
    assert_idle(llm)


class _Stand:
    """A stand-in model with another forward pass."""

    def __init__(self, model: object, forward: object) -> None:
        self._model, self.forward = model, forward

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)


def test_memory_errors_name_the_way_out() -> None:
    """StepMemoryError is a MemoryError and names the options to lower."""
    error = StepMemoryError(512, "can't allocate memory")

    assert isinstance(error, MemoryError)
    assert "a step of 512 tokens ran out of memory (can't allocate memory)" in str(error)
    assert "smaller kv_cache_tokens" in str(error)


# -- everything at once --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ops"),
    [("tight-page1", "auto"), ("tight-drafts", "auto"), ("int8", "auto"), ("tight-page1", "torch")],
)
def test_eb16_a_life_with_faults_changes_no_answer_and_leaves_nothing(
    name: str, ops: str, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """Twelve requests of `make soak-engine` survive random faults in each of three cells."""
    caplog.set_level(logging.CRITICAL)
    cell = CELLS[name]
    folder = tmp_path_factory.getbasetemp() / "engine-life"
    if (cell.kv_dtype, ops) not in MODELS:
        MODELS[cell.kv_dtype, ops] = SmallModel(folder, cell.kv_dtype, ops=ops)

    counts = Life(MODELS[cell.kv_dtype, ops], cell, seed=1000).run(12)

    assert counts["requests"] == 12
    if chosen_runner() == "device-ahead" and not cell.share_right:
        assert counts["ahead"] > 0


MODELS: dict[tuple[str, str], SmallModel] = {}
