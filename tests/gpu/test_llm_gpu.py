"""An engine on a CUDA device beside the engine on the CPU."""

from pathlib import Path
from typing import Any

import pytest

from ramify.engine.llm import LLM
from ramify.params import SamplingParams
from ramify.testing import write_tiny_checkpoint

STEM = [60 + i % 7 for i in range(40)]
PROMPTS = [[*STEM, 70 + i, 71] for i in range(4)] + [[5, 6, 7]]


def on_device(path: Path, *, exact: bool = False, dtype: str = "float32", **options: Any) -> LLM:
    return LLM(path, kv_cache_tokens=2048, device="cuda", exact=exact, dtype=dtype, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_answers_have_the_same_bits_from_the_cache(dtype: str, tmp_path: Path) -> None:
    """Triton's operations and attention pass their probes; log probabilities are equal alone, in a batch, and warm."""
    pytest.importorskip("triton", reason="a CUDA build of torch brings triton")
    path = write_tiny_checkpoint(tmp_path / "qwen3", "qwen3")
    params = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=0)
    llm = on_device(path, exact=True, dtype=dtype, ops="triton", attention_backend="triton")

    cold = llm.generate(PROMPTS, params)
    warm = llm.generate(PROMPTS, params)

    assert warm[0].cache.read_tokens
    alone = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
    for outputs in (warm, alone):
        for output, other in zip(outputs, cold, strict=True):
            assert output.token_ids == other.token_ids
            assert output.completions[0].logprobs == other.completions[0].logprobs


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("name", ["v2", "v3", "v32"])
def test_deepseek_answers_are_those_of_the_cpu(name: str, is_exact: bool, tmp_path: Path) -> None:
    """Latent attention, absorbed and expanded, experts and the sparse index, cold and from the cache."""
    pytest.importorskip("transformers", reason="writes the checkpoint; the extra ramify[hf]")
    pytest.importorskip("triton", reason="a CUDA build of torch brings triton")
    from tests.cpu.deepseek_cases import save_oracle

    save_oracle(name, tmp_path)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [[3 + token % 90 for token in prompt] for prompt in PROMPTS]
    expected = LLM(tmp_path, kv_cache_tokens=2048, device="cpu").generate(prompts, params)
    ops = {"ops": "triton", "attention_backend": "triton"} if is_exact else {}
    llm = on_device(tmp_path, exact=is_exact, **ops)

    for is_warm in (False, True):
        outputs = llm.generate(prompts, params)

        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        assert bool(outputs[0].cache.read_tokens) == is_warm


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("ops", "backend"), [("auto", "auto"), ("auto", "sdpa"), ("triton", "auto")]
)
def test_answers_are_those_of_the_cpu(family: str, ops: str, backend: str, tmp_path: Path) -> None:
    """Greedy answers in float32, cold and from the cache, are those of the engine on the CPU."""
    path = write_tiny_checkpoint(tmp_path / family, family)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    expected = LLM(path, kv_cache_tokens=2048, device="cpu").generate(PROMPTS, params)
    llm = on_device(path, ops=ops, attention_backend=backend)

    for is_warm in (False, True):
        outputs = llm.generate(PROMPTS, params)

        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        assert bool(outputs[0].cache.read_tokens) == is_warm
    assert llm.engine.runner.pool.device.type == "cuda"


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_graphs_and_overlap_change_no_token(backend: str, tmp_path: Path) -> None:
    """Greedy and drawn tokens in float32 are those of the CPU, whether steps are captured or begun ahead."""
    path = write_tiny_checkpoint(tmp_path / "llama", "llama")
    params = [
        SamplingParams(max_tokens=8 + 4 * at, ignore_eos=True, temperature=0.8 * (at % 2), seed=at)
        for at in range(len(PROMPTS))
    ]
    expected = LLM(path, kv_cache_tokens=2048, device="cpu").generate(PROMPTS, params)

    for has_graphs in (False, True):
        for overlap in ("off", "on"):
            llm = on_device(
                path, attention_backend=backend, decode_graphs=has_graphs, overlap=overlap
            )

            outputs = [*llm.generate(PROMPTS, params), *llm.generate(PROMPTS, params)]

            for output, other in zip(outputs, [*expected, *expected], strict=True):
                assert output.token_ids == other.token_ids, (has_graphs, overlap)
            assert (llm.engine.core.pipeline.num_ahead > 5) == (overlap == "on")
