"""Plans and results of steps are values: pickled and read back they are equal, whatever is in them."""

import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ramify.cache.key import CacheKey
from ramify.engine.llm import LLM
from ramify.engine.step import Executor, StepPlan, StepResult
from ramify.params import SamplingParams, StructuredOutput
from ramify.testing import write_tiny_checkpoint

STEM = [60 + i % 7 for i in range(24)]
REQUESTS = {
    "greedy": SamplingParams(max_tokens=12, ignore_eos=True),
    "drawn": SamplingParams(
        max_tokens=12, temperature=0.9, seed=4, top_p=0.9, top_k=40, min_p=0.01
    ),
    "log probabilities": SamplingParams(max_tokens=6, logprobs=3, prompt_logprobs=2),
    "branches": SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=9, ignore_eos=True),
    "penalties": SamplingParams(
        max_tokens=9, repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={70: 2.0}
    ),
    "allowed": SamplingParams(max_tokens=9, allowed_token_ids=[*range(60, 99)], min_tokens=4),
    "banned": SamplingParams(max_tokens=9, banned_sequences=[[70, 71], [66]], stop=["zzz"]),
    "grammar": SamplingParams(
        max_tokens=40, temperature=1.0, seed=1, structured=StructuredOutput(regex="[a-c]{5,9}")
    ),
    "schema": SamplingParams(
        max_tokens=40,
        structured=StructuredOutput(
            json_schema={"type": "object", "properties": {"a": {"type": "integer"}}}
        ),
    ),
    "embedding": SamplingParams(max_tokens=0, prompt_embedding=True, pooling="mean"),
}


def assert_same(ours: object, other: object, path: str = "value") -> None:
    """Two values have the same types, fields and bits."""
    assert type(ours) is type(other), path
    if isinstance(ours, np.ndarray):
        assert isinstance(other, np.ndarray)
        assert (ours.dtype, ours.shape, ours.tobytes()) == (
            other.dtype,
            other.shape,
            other.tobytes(),
        ), path
    elif is_dataclass(ours):
        for name in (part.name for part in fields(ours)):
            assert_same(getattr(ours, name), getattr(other, name), f"{path}.{name}")
    elif isinstance(ours, tuple):
        assert isinstance(other, tuple)
        assert len(ours) == len(other), path
        for index, pair in enumerate(zip(ours, other, strict=True)):
            assert_same(*pair, f"{path}[{index}]")
    elif isinstance(ours, dict):
        assert isinstance(other, dict)
        assert list(ours) == list(other), path
        for key, value in ours.items():
            assert_same(value, other[key], f"{path}[{key}]")
    else:
        assert ours == other, path


@dataclass
class Distant:
    """An executor that another one gets plans from, and gives results to, as bytes alone."""

    inner: Executor
    kinds: Counter[str] = field(default_factory=Counter)  # what the plans and results had
    failures: list[str] = field(default_factory=list)

    def begin(self, plan: StepPlan) -> None:
        copy = pickle.loads(pickle.dumps(plan))
        assert_same(plan, copy, "plan")
        for spec in plan.samples:
            self.kinds["draft"] += bool(spec.draft)
            if spec.logits is not None:
                masks = spec.logits.token_bitmasks or ()
                self.kinds["mask"] += any(mask is not None for mask in masks)
                self.kinds["counts"] += spec.logits.token_counts is not None
        self.kinds["prompt logprobs"] += len(plan.prompt_logprobs)
        self.inner.begin(copy)

    def finish(self) -> StepResult:
        result = self.inner.finish()
        copy = pickle.loads(pickle.dumps(result))
        assert_same(result, copy, "result")
        assert isinstance(copy, StepResult)
        self.kinds["logprobs"] += sum(bool(tokens.logprobs) for tokens in result.sampled.values())
        self.kinds["scored"] += len(result.prompt_logprobs)
        self.kinds["embedding"] += len(result.embeddings)
        self.failures += result.failed.values()
        return copy

    def zero_pages(self, pages: Sequence[int]) -> None:
        self.inner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.inner.copy_pages(pairs)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("pickles"), "llama")


def opened(checkpoint: Path, **options: Any) -> LLM:
    return LLM(checkpoint, kv_cache_tokens=2048, page_size=4, ops="torch", **options)


def test_answers_are_the_same_if_all_that_crosses_is_pickled(checkpoint: Path) -> None:
    """Every kind of plan and result survives pickling, and so does every answer."""
    prompts = [[*STEM, 61 + i] for i in range(len(REQUESTS))]
    params = list(REQUESTS.values())
    options: dict[str, Any] = {"speculative": "auto", "max_batch_tokens": 40}
    expected = opened(checkpoint, **options).generate(prompts, params)
    llm = opened(checkpoint, **options)
    llm.core.executor = distant = Distant(llm.core.executor)

    outputs = llm.generate(prompts, params)

    for output, other in zip(outputs, expected, strict=True):
        assert output.error is None
        assert output.completions == other.completions
        assert output.prompt_logprobs == other.prompt_logprobs
        assert_same(output.prompt_embedding, other.prompt_embedding)
    kinds = {"draft", "mask", "counts", "prompt logprobs", "logprobs", "scored", "embedding"}
    assert {kind for kind, count in distant.kinds.items() if count} == kinds


def test_a_failure_crosses_as_a_value(checkpoint: Path) -> None:
    """A request that reads damaged K/V fails in a result that is pickled, then answers."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    llm = opened(checkpoint)
    [expected] = llm.generate([[*STEM, 70]], params)
    llm.core.executor = distant = Distant(llm.core.executor)
    lease = llm.cache.core.acquire(CacheKey(STEM, llm.core.namespaces.base))
    plane = llm.engine.runner.pool.planes(0)["k"]
    with torch.inference_mode():
        plane[lease.pages[2]] = torch.nan
    llm.cache.core.release(lease)

    [output] = llm.generate([[*STEM, 70]], params)

    [failure] = distant.failures
    assert failure.endswith("is not finite; the weights or the K/V are damaged")
    assert output.completions == expected.completions
    assert llm.stats().failures.failed_requests == 1
