"""Rotary tables: computed in blocks when positions reach them, with the bits of a whole table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ramify.models.configs.rope import RopeConfig
from ramify.models.loader import load_model
from ramify.models.ops import rotary_table as rope_module
from ramify.models.ops.rotary_table import BLOCK_POSITIONS, RotaryTable, inverse_frequencies
from ramify.models.ops.torch_ops import TorchOps
from ramify.testing import write_tiny_checkpoint
from tests.cpu.models.test_dense_families import logits_of, runner_of

ROPES = {
    "default": RopeConfig(10_000.0),
    "linear": RopeConfig(10_000.0, "linear", factor=4.0),
    "llama3": RopeConfig(
        5e5,
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_len=8192,
    ),
    "yarn": RopeConfig(5e5, "yarn", factor=4.0, original_max_len=4096, attention_factor=1.1),
    "longrope": RopeConfig(
        1e4,
        "longrope",
        attention_factor=1.19,
        original_max_len=4096,
        pair_factors=tuple(1 + pair / 7 for pair in range(32)),
    ),
    "partial": RopeConfig(1e4, rotary_dim=16),
}
LONG = 1 << 20


def whole_table(rope: RopeConfig, head_dim: int, max_len: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse_frequencies(
        rope, head_dim
    )
    num_pairs = (rope.rotary_dim or head_dim) // 2
    scale = torch.ones(head_dim // 2)
    scale[:num_pairs] = rope.attention_factor
    return angles.cos() * scale, angles.sin() * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROPES)
def test_blocks_have_the_bits_of_a_whole_table(name: str, dtype: torch.dtype) -> None:
    """However the positions grow, and at positions beside the limits of blocks."""
    max_len = 2 * BLOCK_POSITIONS + 5
    cos, sin = whole_table(ROPES[name], 64, max_len)
    table = RotaryTable(ROPES[name], head_dim=64, max_len=max_len, dtype=dtype)
    address = table.cos.data_ptr(), table.sin.data_ptr()

    for end in (1, 7, BLOCK_POSITIONS + 1, 3, 10 * max_len):
        table.extend(end)
        num = table.num_computed
        assert num >= min(end, max_len)
        assert torch.equal(table.cos[:num], cos[:num].to(dtype))
        assert torch.equal(table.sin[:num], sin[:num].to(dtype))

    assert table.num_computed == max_len
    assert (table.cos.data_ptr(), table.sin.data_ptr()) == address


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_positions_that_no_request_reaches_take_no_memory() -> None:
    """A table of a million positions takes 1 GB once they are all computed."""
    before = resident_bytes()

    table = RotaryTable(ROPES["default"], head_dim=256, max_len=LONG, dtype=torch.float32)

    assert resident_bytes() - before < 64 << 20
    assert table.num_computed == BLOCK_POSITIONS


def test_a_model_computes_the_positions_of_its_steps_only(tmp_path: Path) -> None:
    """Loading a model of a million positions computes the first block."""
    write_tiny_checkpoint(tmp_path, "llama")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": LONG}))

    ops = load_model(tmp_path, dtype="float32", ops="torch").ops

    assert isinstance(ops, TorchOps)
    tables = ops._tables.values()
    assert [(table.num_computed, len(table.cos)) for table in tables] == [(BLOCK_POSITIONS, LONG)]


@pytest.mark.parametrize("ops", ["torch", "cpu"])
def test_steps_that_pass_a_block_have_the_bits_of_one_table(
    ops: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill, chunks and single tokens over positions that were not computed before."""
    pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")
    write_tiny_checkpoint(tmp_path, "llama")
    with torch.inference_mode():
        expected = logits_of(runner_of(tmp_path, ops, "float32"), [90])
        monkeypatch.setattr(rope_module, "BLOCK_POSITIONS", 16)
        monkeypatch.setattr("ramify.models.ops.torch_ops.BLOCK_POSITIONS", 16)

        for ends in ([90], [15, 16, 17, 18, 60, 90]):
            assert torch.equal(logits_of(runner_of(tmp_path, ops, "float32"), ends), expected)
