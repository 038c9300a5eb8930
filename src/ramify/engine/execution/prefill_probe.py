"""What steps of an engine take: as `ramify calibrate` measured, or by a few prefills at the start."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from ramify.attention.batch import AttentionBatch, Extend
from ramify.config import ResolvedConfig
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.step import StepPlan
from ramify.kv.block_table import PagedBlockTable
from ramify.models.configs.model_config import ModelConfig
from ramify.step_cost import CostModel

LENGTHS = (16, 64, 256)
LIMIT_S = 0.2  # no longer prefill is begun that would end later


def step_model(config: ResolvedConfig, runner: ModelRunner, model: ModelConfig) -> CostModel:
    """The cost file of the options, or an estimate. For an engine whose pool is empty.

    Raises:
        ConfigError: the cost file cannot be read.
    """
    path = config.requested.tiers.cache_cost
    if path is not None:
        return CostModel.load(Path(path).expanduser())
    return estimate(measure_prefills(config, runner), model)


def measure_prefills(config: ResolvedConfig, runner: ModelRunner) -> list[tuple[int, float]]:
    """Tokens and seconds of prefills of growing length; at least one. Leaves the pages erased."""
    page_size = config.page_size
    most = min(config.max_batch_tokens, config.max_model_len, config.num_pages * page_size)
    lengths = sorted({min(length, most) for length in LENGTHS})
    measured: list[tuple[int, float]] = []
    begin_s = time.perf_counter()
    _prefill(runner, lengths[0], page_size)  # the first one touches what the others find warm
    for length in lengths:
        if measured:
            expected_s = measured[-1][1] * length / measured[-1][0]
            if time.perf_counter() - begin_s + expected_s > LIMIT_S:
                break
        step_begin_s = time.perf_counter()
        _prefill(runner, length, page_size)
        measured.append((length, time.perf_counter() - step_begin_s))
    runner.pool.zero_pages(range(-(-measured[-1][0] // page_size)))
    return measured


def _prefill(runner: ModelRunner, num_tokens: int, page_size: int) -> None:
    """One step of a prompt in the first pages of the pool."""
    pages = range(-(-num_tokens // page_size))
    table = PagedBlockTable.of([[*pages]], page_size)
    batch = AttentionBatch.build([Extend(0, row=0, num_cached=0, num_new=num_tokens)], table)
    token_ids = np.arange(num_tokens, dtype=np.int64) % runner.model.config.vocab_size
    runner.forward(StepPlan(batch, token_ids, (), (), (0,)))


def estimate(measured: list[tuple[int, float]], model: ModelConfig) -> CostModel:
    """The constants of a step from prefills; attention's from its share of the operations.

    Args:
        measured: tokens and seconds, by tokens. Of a single one, half is taken as what a step of any
            length takes: that of a large model mostly reads its weights.
    """
    num_tokens, seconds = measured[-1]
    token_s = seconds / num_tokens / 2
    if len(measured) > 1:
        num_before, seconds_before = measured[-2]
        slope = (seconds - seconds_before) / (num_tokens - num_before)
        token_s = min(max(slope, 0.0), seconds / num_tokens)
    read_s = token_s * _attention_operations(model) / _matmul_operations(model)
    return CostModel(seconds - token_s * num_tokens, token_s, read_s)


def _attention_operations(model: ModelConfig) -> int:
    """Of a query row and one token that it reads: scores and values, in all layers."""
    return 4 * model.num_layers * model.num_heads * model.head_dim


def _matmul_operations(model: ModelConfig) -> int:
    """Of one token in the linear layers, without the LM head."""
    width, moe = model.hidden_size, model.moe
    heads = 2 * model.num_heads + 2 * model.num_kv_heads
    inner = model.intermediate_size
    if moe is not None:
        inner = moe.top_k * moe.expert_intermediate_size + moe.shared_intermediate_size
    return 2 * model.num_layers * width * (heads * model.head_dim + 3 * inner)
