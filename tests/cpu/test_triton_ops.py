"""A decoder over Triton's operations in the interpreter, beside the same over torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.attention.backends.eager import EagerBackend
from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.exactness import ProbeStore
from ramify.attention.paged import PagedAttention
from ramify.engine.llm import LLM
from ramify.kv.block_table import PagedBlockTable
from ramify.kv.pool import KVPool
from ramify.models.decoders.decoder import Decoder
from ramify.models.kv_cache_spec import attention_spec, kv_layout
from ramify.models.loader import load_model
from ramify.models.ops import torch_ops
from ramify.models.ops.protocol import ForwardStep
from ramify.models.ops.triton_ops import FusedAdditions, GatedActivation, RmsNorm, TritonOps
from ramify.params import SamplingParams
from ramify.testing import write_tiny_checkpoint

pytest.importorskip("triton", reason="the interpreter of Triton's kernels comes with triton")

PAGE = 4
TOKENS = torch.arange(11) * 7 % 290


def logits_in_steps(model: Decoder, steps: list[int], kv_dtype: torch.dtype) -> Tensor:
    """Logits of all tokens over a paged cache, computed in steps of these lengths."""
    config = model.config
    spec = attention_spec(config, dtype=model.dtype, page_size=PAGE, exact=True, kv_dtype=kv_dtype)
    pool = KVPool(kv_layout(config), 4, PAGE, dtype=kv_dtype)
    backend, table = EagerBackend(spec, torch.device("cpu")), PagedBlockTable.of([[2, 0, 3]], PAGE)
    logits, start = [], 0
    with torch.inference_mode():
        for length in steps:
            batch = AttentionBatch.build([Extend(0, 0, start, length)], table)
            slots = torch.from_numpy(batch.slot_mapping.copy())
            attention = PagedAttention(backend, pool, batch, slots)
            positions = torch.arange(start, start + length)
            hidden = model.forward(
                TOKENS[start : start + length], ForwardStep(positions, attention)
            )
            logits.append(model.logits(hidden))
            start += length
    return torch.cat(logits)


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_an_engine_answers_as_over_torch(family: str, tmp_path: Path) -> None:
    """Attention (MLA too), norms, GEMMs and rope of Triton in one engine: cold and warm, the same tokens."""
    if family == "deepseek":
        pytest.importorskip("transformers", reason="writes the checkpoint; the extra ramify[hf]")
        from tests.cpu.deepseek_cases import save_oracle

        save_oracle("v3", tmp_path)
    else:
        write_tiny_checkpoint(tmp_path, "llama", num_hidden_layers=2)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 12]]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    options: dict[str, Any] = {"kv_cache_tokens": 128, "page_size": PAGE, "dtype": "float32"}
    expected = LLM(tmp_path, ops="torch", **options).generate(prompts, params)
    llm = LLM(tmp_path, ops="triton", attention_backend="triton", **options)

    for is_warm in (False, True):
        outputs = llm.generate(prompts, params)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        assert not is_warm or outputs[0].cache.read_tokens


@pytest.mark.parametrize("case", ["Gemma2", "Cohere qk_norm", "GptOss", "StableLm parallel"])
def test_logits_of_other_families_are_those_of_torch(case: str, tmp_path: Path) -> None:
    """Norms with an offset and behind the MLP, layer norms, experts, sinks, parallel blocks."""
    pytest.importorskip("transformers", reason="writes the checkpoint; the extra ramify[hf]")
    from tests.cpu.models.family_cases import write_checkpoint
    from tests.cpu.models.test_dense_families import logits_of, runner_of

    write_checkpoint(case, tmp_path)

    expected = logits_of(runner_of(tmp_path, "torch", "float32"), [6])
    logits = logits_of(runner_of(tmp_path, "triton", "float32"), [6])

    assert float((logits - expected).abs().max()) < 1e-4 * float(expected.abs().max())


def loaded(path: Path, ops: str, **options: Any) -> Decoder:
    model = load_model(path, ops=ops, store=ProbeStore(None), **options)
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize(
    ("family", "dtype", "kv_dtype"),
    [
        ("llama", torch.float32, torch.float32),
        ("qwen3", torch.float32, torch.int8),
        ("qwen2", torch.bfloat16, torch.bfloat16),
    ],
)
def test_logits_are_those_of_torch_and_the_same_in_any_chunks(
    family: Any, dtype: torch.dtype, kv_dtype: torch.dtype, tmp_path: Path
) -> None:
    """Norms, exact GEMMs, activation, rope with K/V write; whole, in chunks and token by token."""
    name: Any = str(dtype).removeprefix("torch.")
    path = write_tiny_checkpoint(
        tmp_path,
        family,
        tokenizer=False,
        dtype=name,
        num_hidden_layers=2,
    )
    model = loaded(path, "triton")

    whole = logits_in_steps(model, [11], kv_dtype)

    assert isinstance(model.layers, FusedAdditions)
    assert torch.equal(logits_in_steps(model, [6, 4, 1], kv_dtype), whole)
    expected = logits_in_steps(loaded(path, "torch"), [11], kv_dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    assert float((whole - expected).abs().max()) < tolerance * float(expected.abs().max())
    report = {entry.operation: entry.strategy for entry in model.exactness()}
    assert report["linear"] == report["rms_norm"] == report["silu_mul"] == "triton"


@pytest.mark.parametrize(("is_variant", "dtype"), [(False, "bfloat16"), (True, "float32")])
def test_kernels_are_probed_on_a_device(
    is_variant: bool, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel whose rows depend on their number is called row by row, or torch's takes its place."""
    from ramify.kernels.triton.gemm import BatchInvariantGemm

    path = write_tiny_checkpoint(
        tmp_path, "qwen2", tokenizer=False, dtype=dtype, num_hidden_layers=1
    )
    monkeypatch.setattr(TritonOps, "probes_kernels", True)
    monkeypatch.setattr(TritonOps, "probe_counts", (1, 7))
    monkeypatch.setattr(
        torch_ops, "sample_rows", lambda *shape, dtype: torch.randn(16, *shape).to(dtype)
    )
    if is_variant:
        for kernel in (BatchInvariantGemm, RmsNorm, GatedActivation):
            compute = kernel.__call__
            monkeypatch.setattr(
                kernel,
                "__call__",
                lambda self, x, f=compute: f(self, x) * (1 + 2**-20 * len(x)),
            )

    model = loaded(path, "triton")

    report = {entry.operation: (entry.strategy, entry.reason) for entry in model.exactness()}
    passed = "triton", "rows agree at every count tried"
    for operation in ("linear", "linear with bias", "rms_norm", "silu_mul"):
        assert (report[operation] == passed) != is_variant, report
    assert isinstance(model.layers, FusedAdditions) != is_variant
    whole = logits_in_steps(model, [5], model.dtype)
    assert torch.equal(logits_in_steps(model, [2, 3], model.dtype), whole)
