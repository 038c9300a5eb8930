"""A model that ranks share computes what one process does, and its bits depend on nothing but the prompt."""

from __future__ import annotations

from dataclasses import replace
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
from tests.cpu.test_fused_attention import NUM_PAGES, PAGE, plan_of
from tests.cpu.test_loading_memory import PEAK, peak_of_loading, write_large_checkpoint

# In place of `load_model` in the program that measures: rank 1 of 2, which is never run.
LOAD_RANK = """
from functools import partial
from ramify.models.loader import load_model, read_config
from ramify.models.ops.registry import OPS
from ramify.models.ops.sharded.rank_group import RankGroup
from ramify.models.ops.sharded.sharded_ops import ShardedOps

def load_rank(path, dtype, ops):
    group = RankGroup(None, 1, 2, in_order=True)
    config = read_config(path)
    make = partial(ShardedOps, config=config, group=group, inner=OPS[ops])
    return load_model(path, dtype=dtype, ops=make)
"""


def write(case: str, path: Path) -> None:
    """A family of `CASES`, or a model of `CONFIGS` with latent attention."""
    if case in CASES:
        write_checkpoint(case, path)
    else:
        save_oracle(case, path, vocab_size=VOCAB_SIZE)


def threads_of(
    path: Path, size: int, ops: str, dtype: str = "float32", *, quantize: str = "off"
) -> RankThreads:
    return RankThreads(
        path, size, ops=ops, num_pages=NUM_PAGES, page_size=PAGE, dtype=dtype, quantize=quantize
    )


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


def test_a_row_that_is_not_finite_on_a_rank_is_on_all(tmp_path: Path) -> None:
    """Each rank sees its own K/V only; rank 0 decides for all."""
    write_checkpoint("Llama", tmp_path)
    ranks = threads_of(tmp_path, 2, "torch")
    ids = torch.arange(40).numpy()

    @torch.inference_mode()
    def compute(runner: RankRunner) -> list[int]:
        hidden = runner.forward(replace(plan_of([(0, 40)]), token_ids=ids))
        hidden[7 + 20 * runner.rank] = torch.nan  # as `mark_nonfinite_rows` does
        return runner.nonfinite_on_any_rank(hidden)

    assert ranks.on_all(compute) == [[7, 27], [7, 27]]


def test_two_ranks_in_bfloat16_are_as_close_as_a_process(tmp_path: Path) -> None:
    """To float32: the error of logits is at most 1.2 times that of one process; chunks have the same bits."""
    write_checkpoint("Llama", tmp_path)
    exact = logits_by_steps(threads_of(tmp_path, 1, "torch"), [NUM_TOKENS])
    single = logits_by_steps(threads_of(tmp_path, 1, "torch", "bfloat16"), [NUM_TOKENS])
    ranks = threads_of(tmp_path, 2, "torch", "bfloat16")

    whole = logits_by_steps(ranks, [NUM_TOKENS])
    chunks = logits_by_steps(ranks, [1, 8, 41, NUM_TOKENS])

    error, their_error = ((x - exact).square().mean().sqrt() for x in (whole, single))
    assert error <= 1.2 * their_error
    assert torch.equal(whole, chunks)


@pytest.mark.parametrize("ops", ["torch", "cpu"])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_two_ranks_round_weights_as_finely(quantize: str, ops: str, tmp_path: Path) -> None:
    """Groups begin with the part: the error of logits is at most 1.3 times that of one process."""
    write_checkpoint("Llama", tmp_path)
    exact = logits_by_steps(threads_of(tmp_path, 1, ops), [NUM_TOKENS])
    single, ranks = (threads_of(tmp_path, size, ops, quantize=quantize) for size in (1, 2))

    whole = logits_by_steps(ranks, [NUM_TOKENS])
    chunks = logits_by_steps(ranks, [1, 8, 41, NUM_TOKENS])

    theirs = logits_by_steps(single, [NUM_TOKENS])
    error, their_error = ((x - exact).square().mean().sqrt() for x in (whole, theirs))
    assert 0 < error <= 1.3 * their_error
    assert torch.equal(whole, chunks)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's memory counters")
def test_a_rank_of_two_loads_in_little_more_than_its_half(tmp_path: Path) -> None:
    """The peak of loading is at most 1.2 times the bytes of the part."""
    num_bytes = write_large_checkpoint(tmp_path)
    program = PEAK.replace("load_model(model,", "load_rank(model,").replace(
        "from ramify.models.loader import load_model", LOAD_RANK
    )

    assert peak_of_loading(tmp_path, "torch", program) <= 1.2 * num_bytes / 2
