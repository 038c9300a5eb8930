"""Every family with full heads against transformers: logits, chunks, greedy tokens, settings that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ramify import LLM, SamplingParams
from ramify.attention.backend import backend_class
from ramify.attention.exactness import ProbeStore
from ramify.engine.execution.runner import ModelRunner
from ramify.kv.pool import KVPool
from ramify.models.kv_cache_spec import attention_spec, kv_layout
from ramify.models.loader import load_model
from ramify.models.ops.cpu.layers import FusedLayers
from tests.cpu.models.family_cases import CASES, VOCAB_SIZE, write_checkpoint
from tests.cpu.test_fused_attention import NUM_PAGES, PAGE, plan_of

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

NUM_TOKENS = 90  # beyond windows and the context of pre-training
# A sigmoid router; layer norms of heads.
UNFUSED = {"Glm4Moe", "Cohere qk_norm", "StableLm parallel"}


def runner_of(path: Path, ops: str, dtype: str) -> ModelRunner:
    decoder = load_model(path, dtype=dtype, ops=ops, store=ProbeStore(None))
    config = decoder.config
    spec = attention_spec(config, page_size=PAGE, dtype=decoder.dtype, exact=True)
    backend = backend_class("cpu" if ops == "cpu" else "blocked")(spec, torch.device("cpu"))
    pool = KVPool(kv_layout(config), NUM_PAGES, PAGE, dtype=decoder.dtype)
    return ModelRunner(decoder, pool, backend)


def token_ids_of(num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


def logits_of(runner: ModelRunner, ends: list[int]) -> Tensor:
    """Logits of the same tokens, computed in steps that end there."""
    token_ids = torch.tensor(token_ids_of(ends[-1])).numpy()
    rows = []
    for start, end in zip([0, *ends], ends, strict=False):
        plan = replace(plan_of([(start, end - start)]), token_ids=token_ids[start:end])
        rows.append(runner.logits(runner.forward(plan), range(end - start)))
    return torch.cat(rows)


@pytest.mark.parametrize("ops", ["cpu", "torch"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, ops: str, tmp_path: Path) -> None:
    """float32 within 1e-4 of the largest logit; bfloat16 at most 1.5 times transformers' own error."""
    model = write_checkpoint(case, tmp_path)
    token_ids = torch.tensor([token_ids_of(NUM_TOKENS)])
    with torch.inference_mode():
        expected = model(token_ids).logits[0]
        theirs = model.to(torch.bfloat16)(token_ids).logits[0].float()
        logits = logits_of(runner_of(tmp_path, ops, "float32"), [NUM_TOKENS])
        narrow = logits_of(runner_of(tmp_path, ops, "bfloat16"), [NUM_TOKENS])

    largest = expected.abs().max()
    assert (logits - expected).abs().max() <= 1e-4 * largest
    # The median token: near a tie, another rounding sends a token to another expert.
    error, their_error = (
        (x - expected).square().mean(-1).sqrt().median() for x in (narrow, theirs)
    )
    assert error <= 1.5 * their_error


@pytest.mark.parametrize("case", CASES)
def test_layers_are_fused(case: str, tmp_path: Path) -> None:
    """On CPU all layers of a step are one compiled call, but for the cases that `docs/models.md` names."""
    write_checkpoint(case, tmp_path)

    decoder = load_model(tmp_path, dtype="float32", ops="cpu")

    assert isinstance(decoder.layers, FusedLayers) == (case not in UNFUSED)


@pytest.mark.parametrize("case", CASES)
def test_chunks_give_the_same_bits(case: str, tmp_path: Path) -> None:
    """However a prompt is cut into steps, its logits are the same bits."""
    write_checkpoint(case, tmp_path)
    for dtype in ("float32", "bfloat16"):
        runner = runner_of(tmp_path, "cpu", dtype)

        with torch.inference_mode():
            whole = logits_of(runner, [NUM_TOKENS])
            chunks = logits_of(runner, [1, 8, 41, NUM_TOKENS])

        assert torch.equal(whole, chunks)


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_cold_and_warm(case: str, tmp_path: Path) -> None:
    """Two turns of a conversation, cold and from the cache, are transformers' greedy tokens."""
    model = write_checkpoint(case, tmp_path)
    prompt = token_ids_of(70)
    with torch.inference_mode():
        expected = list(prompt)
        for _ in range(24):
            logits = model(torch.tensor([expected])).logits[0, -1]
            expected.append(int(logits.argmax()))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = LLM(str(tmp_path), dtype="float32", kv_cache_tokens=1024)
    for least_hit in (0, 64):
        first = llm.generate([prompt], params)[0]
        assert list(first.token_ids) == expected[70:82]
        assert first.cache.read_tokens >= least_hit

    second = llm.generate([expected[:82]], params)[0]

    assert list(second.token_ids) == expected[82:94]
    assert second.cache.read_tokens > 64
