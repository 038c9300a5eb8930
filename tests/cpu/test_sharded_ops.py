"""A model that ranks share computes what one process does, and its bits depend on nothing but the prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ramify.engine.execution.ranks.rank_runner import RankRunner
from ramify.errors import ConfigError
from ramify.models.configs.sharding import check_divisible
from ramify.models.loader import read_config
from tests.cpu.deepseek_cases import CONFIGS, save_oracle
from tests.cpu.models.family_cases import CASES, VOCAB_SIZE, write_checkpoint
from tests.cpu.models.test_dense_families import NUM_TOKENS, logits_of
from tests.cpu.rank_threads import RankThreads
from tests.cpu.test_fused_attention import NUM_PAGES, PAGE


def write(case: str, path: Path) -> None:
    """A family of `CASES`, or a model of `CONFIGS` with latent attention."""
    if case in CASES:
        write_checkpoint(case, path)
    else:
        save_oracle(case, path, vocab_size=VOCAB_SIZE)


def threads_of(path: Path, size: int, ops: str, dtype: str = "float32") -> RankThreads:
    return RankThreads(path, size, ops=ops, num_pages=NUM_PAGES, page_size=PAGE, dtype=dtype)


def logits_by_steps(ranks: RankThreads, ends: list[int]) -> Tensor:
    """Logits of the same tokens in steps that end there; those of all ranks have the same bits."""

    @torch.inference_mode()
    def compute(runner: RankRunner) -> Tensor:
        return logits_of(runner, ends)

    first, *others = ranks.on_all(compute)
    assert all(torch.equal(first, other) for other in others)
    return first


@pytest.mark.parametrize("ops", ["torch", "cpu"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", [*CASES, *CONFIGS])
def test_ranks_compute_what_one_process_does(
    case: str, size: int, ops: str, tmp_path: Path
) -> None:
    """Logits within 1e-4 of the largest, 4 ranks over two K/V heads too; chunks have the same bits."""
    if ops == "cpu":
        pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")
    write(case, tmp_path)
    config = read_config(tmp_path)
    if config.variant.qk_norm == "width":
        with pytest.raises(ConfigError, match="a norm over all heads of q together"):
            check_divisible(config, size)
        return
    expected = logits_by_steps(threads_of(tmp_path, 1, ops), [NUM_TOKENS])

    ranks = threads_of(tmp_path, size, ops)
    whole = logits_by_steps(ranks, [NUM_TOKENS])
    chunks = logits_by_steps(ranks, [1, 8, 41, NUM_TOKENS])

    assert (whole - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert torch.equal(whole, chunks)
