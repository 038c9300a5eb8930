"""Families whose layers are more than Llama's, fused: same bits as their operations one by one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ramify.attention.backends.cpu import CpuBackend
from ramify.attention.batch import AttentionBatch, Extend
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.step import StepPlan
from ramify.kv.block_table import PagedBlockTable
from ramify.kv.pool import KVPool
from ramify.models.decoders.decoder import Decoder
from ramify.models.kv_cache_spec import attention_spec, kv_layout
from ramify.models.loader import load_model
from ramify.models.ops.cpu.cpu_ops import CpuOps
from ramify.models.ops.cpu.layers import FusedLayers
from ramify.models.ops.registry import OpsFactory
from ramify.models.ops.torch_ops import TorchOps
from tests.cpu.models.family_cases import VOCAB_SIZE, write_checkpoint

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

PAGE, LENGTH = 8, 150
FAMILIES = """
    Gemma2 Gemma3 Glm4 Exaone4 Olmo2 Olmo3 Granite HunYuanDenseV1 Starcoder2 StableLm Cohere Cohere2
    Mixtral Olmoe Qwen2Moe Qwen3Moe GptOss
""".split()


class LoopedOps(CpuOps):
    """The same kernels, called one by one."""

    stack = TorchOps.stack


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fused_families")


def runner_of(path: Path, dtype: str, ops: str | OpsFactory) -> ModelRunner:
    model = load_model(path, dtype=dtype, ops=ops)
    spec = attention_spec(model.config, page_size=PAGE, dtype=model.dtype, exact=True)
    pool = KVPool(kv_layout(model.config), 3 * LENGTH // PAGE, PAGE, dtype=model.dtype)
    return ModelRunner(model, pool, CpuBackend(spec, torch.device("cpu")))


def steps_of(ends: list[list[int]]) -> list[StepPlan]:
    """Steps that extend two requests up to these lengths."""
    pages = [[*range(LENGTH // PAGE + 1)], [*range(LENGTH // PAGE + 1, 3 * LENGTH // PAGE)]]
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, (2, LENGTH))
    plans, done = [], [0, 0]
    for step in ends:
        extends = [Extend(i, i, done[i], end - done[i]) for i, end in enumerate(step)]
        batch = AttentionBatch.build(extends, PagedBlockTable.of(pages, PAGE), [(-1, 0)] * 2)
        token_ids = np.concatenate([tokens[i, done[i] : end] for i, end in enumerate(step)])
        plans.append(StepPlan(batch, token_ids, (), (), (0, 1)))
        done = step
    return plans


def outcome(runner: ModelRunner, ends: list[list[int]]) -> list[Tensor]:
    """K and V of all layers, and logits of the last token of both requests."""
    plans = steps_of(ends)
    hidden = [runner.forward(plan).clone() for plan in plans][-1]
    starts = plans[-1].batch.cu_seqlens_q
    logits = runner.logits(hidden, [int(starts[1]) - 1, int(starts[2]) - 1])
    used = slice(0, 2 * LENGTH // PAGE)
    layers = range(runner.pool.layout.num_layers)
    planes = [runner.pool.planes(layer)[name][used].clone() for layer in layers for name in "kv"]
    return [logits, *planes]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_are_those_of_the_operations_one_by_one(
    folder: Path, family: str, dtype: str
) -> None:
    """Every kind of norm, block, activation, window and expert; in chunks, in decode, in one go."""
    path = folder / family
    if not path.exists():
        write_checkpoint(family, path)
    fused = runner_of(path, dtype, "cpu")
    looped = runner_of(path, dtype, LoopedOps)
    assert isinstance(fused.model, Decoder)
    assert isinstance(fused.model.layers, FusedLayers)
    chunks = [[90, 40], [110, 41], [111, 42], [112, 100]]

    results = [outcome(fused, chunks), outcome(looped, chunks), outcome(fused, [[112, 100]])]

    for other in results[1:]:
        for tensor, expected in zip(other, results[0], strict=True):
            assert torch.equal(tensor, expected)
