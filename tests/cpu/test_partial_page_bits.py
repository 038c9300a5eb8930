"""Answers are the same bits whether a prompt's tokens were computed, or copied from part of a cached page."""

from pathlib import Path
from typing import Any

import pytest

from ramify.cache.partial_page import least_copied
from ramify.engine.llm import LLM
from ramify.params import SamplingParams
from tests.cpu.test_tier_exactness import bits, model

__all__ = ["model"]

PARAMS = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=3)
BASE = [(7 * at) % 90 + 3 for at in range(61)]
LENGTHS = (1, 2, 5, 15, 17, 31, 40, 47, 55, 60)


@pytest.mark.parametrize("max_batch_tokens", [7, 64])
@pytest.mark.parametrize("page_size", [16, 5])
def test_copied_tokens_change_no_bit(
    page_size: int, max_batch_tokens: int, model: tuple[Path, dict[str, Any]]
) -> None:
    """Prompts that leave one of 61 tokens anywhere read up to there, and answer as if alone and cold.

    Chunks of 7 tokens begin and end inside pages.
    """
    path, options = model
    sizes: dict[str, Any] = {"page_size": page_size, "kv_cache_tokens": 2000, "max_model_len": 160}
    cold = LLM(path, prefix_cache=False, **sizes, **options)
    warm = LLM(path, max_batch_tokens=max_batch_tokens, **sizes, **options)
    prompts = [[*BASE[:length], 93 + length % 4, 94] for length in LENGTHS]
    alone = [bits(cold.generate([prompt], PARAMS)[0]) for prompt in (BASE, *prompts)]

    outputs = [warm.generate([prompt], PARAMS)[0] for prompt in (BASE, *prompts)]

    assert [bits(output) for output in outputs] == alone
    parts = [length % page_size for length in LENGTHS]
    copied = [part if part >= least_copied(page_size) else 0 for part in parts]
    whole = [length - part for length, part in zip(LENGTHS, parts, strict=True)]
    read = [begin + part for begin, part in zip(whole, copied, strict=True)]
    assert [output.usage.cached_tokens for output in outputs] == [0, *read]
    assert warm.cache.stats().copied_tokens == sum(copied)
    warm.cache.check()
    for llm in (cold, warm):
        llm.close()


def test_one_step_copies_for_several_prompts(model: tuple[Path, dict[str, Any]]) -> None:
    """Prompts that leave one page at different tokens, all in one batch: the bits of each alone."""
    path, options = model
    sizes: dict[str, Any] = {"page_size": 16, "kv_cache_tokens": 2000, "max_model_len": 160}
    cold = LLM(path, prefix_cache=False, **sizes, **options)
    warm = LLM(path, **sizes, **options)
    prompts = [[*BASE[:length], 93 + length % 4] for length in (33, 35, 41, 47)]
    alone = [bits(cold.generate([prompt], PARAMS)[0]) for prompt in prompts]
    warm.generate([BASE], PARAMS)

    outputs = warm.generate(prompts, PARAMS)

    assert [bits(output) for output in outputs] == alone
    assert [output.usage.cached_tokens for output in outputs] == [32, 32, 41, 47]
    for llm in (cold, warm):
        llm.close()
