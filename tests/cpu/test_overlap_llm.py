"""A real model whose steps run in a thread while the next ones are planned: the same bits."""

from pathlib import Path
from typing import Any

import pytest

from ramify import LLM, SamplingParams
from ramify.outputs import RequestOutput
from ramify.testing import write_tiny_checkpoint
from tests.cpu.engine_cases import assert_idle

STEM = list(range(3, 40))
PARAMS = [
    SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=9, temperature=0.9, seed=1, top_p=0.9),
    SamplingParams(max_tokens=15, temperature=1.2, seed=2, stop=["a", "e"]),
    SamplingParams(max_tokens=7, repetition_penalty=1.3),
    SamplingParams(max_tokens=8, n=2, temperature=1.0, seed=3),
    SamplingParams(max_tokens=6, min_tokens=4, logit_bias={9: 4.0}),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("overlap"), "llama", num_hidden_layers=2)


def answers(checkpoint: Path, overlap: str, **options: Any) -> tuple[list[RequestOutput], int]:
    """The outputs of several prompts, cold and warm, and how many steps were begun ahead."""
    llm = LLM(checkpoint, kv_cache_tokens=1024, page_size=4, overlap=overlap, **options)
    prompts = [STEM[: 20 + 3 * index] for index in range(len(PARAMS))]
    outputs = [*llm.generate(prompts, PARAMS), *llm.generate(prompts, PARAMS)]
    session = llm.session(STEM)
    outputs += [session.generate(SamplingParams(max_tokens=5)) for _ in range(2)]
    num_ahead = llm.engine.core.pipeline.num_ahead
    llm.reload_weights(checkpoint)
    outputs += llm.generate(prompts[:2], PARAMS[:2])
    assert_idle(llm)
    return outputs, num_ahead


def test_answers_have_the_same_bits(checkpoint: Path) -> None:
    """Tokens, texts, log probabilities and cache counts equal those of an engine without overlap."""
    wanted, num_none = answers(checkpoint, "auto", ops="torch")

    got, num_ahead = answers(checkpoint, "on", ops="torch")

    assert num_none == 0
    assert num_ahead > 10
    for output, reference in zip(got, wanted, strict=True):
        assert output.completions == reference.completions
        assert output.cache == reference.cache
