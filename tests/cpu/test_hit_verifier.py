"""Cache hits recomputed while idle: correct hits agree to the bit, a corrupted page is reported."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ramify import LLM, SamplingParams
from ramify.cache import CacheKey
from ramify.errors import ConfigError
from ramify.testing import write_tiny_checkpoint

STEM = list(range(3, 60))
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("recheck"), "llama")


def served(checkpoint: Path, **options: object) -> LLM:
    return LLM(checkpoint, kv_cache_tokens=2048, page_size=4, verify_sample=1.0, **options)  # type: ignore[arg-type]


def test_sound_hits_agree(checkpoint: Path) -> None:
    """`verify_hits` recomputes every sampled hit, reports no mismatch and changes no output."""
    llm = served(checkpoint)
    llm.generate([[*STEM, 70]], PARAMS)
    outputs = llm.generate([[*STEM, 71], [*STEM, 72, 73]], PARAMS)
    assert all(output.cache.read_tokens for output in outputs)
    assert all(output.completions[0].logprobs is None for output in outputs)

    report = llm.verify_hits()

    assert (report.num_checked, report.num_mismatches) == (2, 0)
    assert not llm.has_unfinished()
    assert llm.verify_hits().num_checked == 2  # nothing is left


def test_sampled_answers_are_compared_too(checkpoint: Path) -> None:
    """The log probability of a token does not depend on how it was chosen."""
    llm = served(checkpoint)
    params = SamplingParams(max_tokens=7, temperature=1.0, seed=3, logprobs=2, ignore_eos=True)
    llm.generate([STEM], params)
    [output] = llm.generate([STEM], params)
    assert output.completions[0].logprobs

    assert (llm.verify_hits().num_checked, llm.hit_verifier.num_mismatches) == (1, 0)


def test_a_spoilt_page_is_found(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """K/V changed in the cache is reported as a mismatch at its position."""
    llm = served(checkpoint)
    llm.generate([STEM], PARAMS)
    executor: Any = llm.core.executor
    plane = executor.runner.pool.planes(0)["k"]
    lease = llm.cache.core.acquire(CacheKey(STEM, llm.core.namespaces.base))
    with torch.inference_mode():
        plane[lease.pages[2]] += 0.5
    llm.cache.core.release(lease)

    llm.generate([[*STEM, 70]], PARAMS)
    report = llm.verify_hits()

    assert report.num_checked == report.num_mismatches == 1
    assert report.mismatches[0].position == len(STEM) + 1
    assert "a cache hit changed an answer" in caplog.text


def test_requests_that_arrive_meanwhile_are_served(checkpoint: Path) -> None:
    """A recheck is a request like any other: it does not stop the engine."""
    llm = served(checkpoint, max_batch_tokens=8)
    llm.generate([STEM], PARAMS)
    llm.generate([STEM], PARAMS)
    assert llm.core.verify_next_hit()
    llm.core.step()

    [output] = llm.generate([[5, 6, 7]], PARAMS)

    assert len(output.token_ids) == 5
    assert llm.hit_verifier.num_checked == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"verify_sample": 1.5}, "verify_sample=1.5"),
        ({"verify_sample": True}, "verify_sample=True"),
        ({"verify_sample": 0.1, "exact": False}, "exact=False"),
    ],
)
def test_a_share_that_makes_no_sense_is_refused(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("ramify-tiny", **options)
