"""Fused decoder layers, attention called by layer: same bits as the operations called one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.kernels.cpu import threads
from ramify.models.decoders.decoder import Decoder
from ramify.models.loader import load_model
from ramify.models.ops.cpu.cpu_ops import CpuOps
from ramify.models.ops.cpu.layers import MAX_OP_LISTS, FusedLayers
from ramify.models.ops.protocol import ForwardStep
from ramify.models.ops.registry import OpsFactory
from ramify.models.ops.torch_ops import TorchOps
from ramify.testing import TinyFamily, write_tiny_checkpoint
from tests.cpu.tiny_models import DENSE, ops_of

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fused_layers")


class LoopedOps(CpuOps):
    """The same kernels, called one by one."""

    stack = TorchOps.stack


def decoder(folder: Path, family: str, dtype: str, ops: str | OpsFactory = "cpu") -> Decoder:
    path = folder / family
    if not path.exists():
        named = cast(TinyFamily, family)
        write_tiny_checkpoint(path, named, tokenizer=False, num_hidden_layers=3, **DENSE[family])
    model = load_model(path, dtype=dtype, ops=ops)
    assert isinstance(model.layers, FusedLayers) == (ops == "cpu")
    return model


def fused_layers_of(model: Decoder) -> FusedLayers:
    assert isinstance(model.layers, FusedLayers)
    return model.layers


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A stand-in for attention: depends on every argument; its result is not a view of any."""
    group = q.shape[1] // k.shape[1]
    keys, values = (heads.repeat_interleave(group, 1) for heads in (k, v))
    return q * 0.5 + keys.flip(0) * (layer + 1) + values


def inputs(
    model: Decoder, num_rows: int, attention: Any = attend, rows: list[int] | None = None
) -> tuple[Tensor, ForwardStep]:
    """Random token ids, and a step of random positions that wants these rows, or all."""
    generator = torch.Generator().manual_seed(num_rows)
    tokens = torch.randint(model.config.vocab_size, (num_rows,), generator=generator)
    positions = torch.randint(model.config.max_model_len, (num_rows,), generator=generator)
    output_rows = None if rows is None else torch.tensor(rows, dtype=torch.int64)
    return tokens, ForwardStep(positions, attention, output_rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", DENSE)
def test_the_bits_are_those_of_the_operations_one_by_one(
    folder: Path, family: str, dtype: str
) -> None:
    """Biases, QK norm, odd widths; from 1 row to several row blocks, in any order of row counts."""
    model, looped = (decoder(folder, family, dtype, ops) for ops in ("cpu", LoopedOps))
    for num_rows in (1, 2, 97, 1, 5, 8, 33, 200, 3, 200):
        args = inputs(model, num_rows)

        assert torch.equal(model.forward(*args), looped.forward(*args)), num_rows


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_may_change_between_two_passes(folder: Path, threads: int) -> None:
    """Op lists are cached by number of rows and number of threads."""
    model, before = decoder(folder, "llama", "float32"), torch.get_num_threads()
    args = inputs(model, 40)
    expected = decoder(folder, "llama", "float32", LoopedOps).forward(*args)
    try:
        torch.set_num_threads(threads)
        hidden = model.forward(*args)
    finally:
        torch.set_num_threads(before)

    assert torch.equal(hidden, expected)
    assert torch.equal(model.forward(*args), expected)


@pytest.mark.parametrize("num_rows", [1, 5, 200])
def test_one_thread_can_play_all_workers(
    folder: Path, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The barrier does not deadlock when one thread runs the workers one after another."""
    import numba

    model = decoder(folder, "llama", "float32")
    args = inputs(model, num_rows)
    expected = model.forward(*args)
    before = torch.get_num_threads()
    monkeypatch.setattr(
        "ramify.models.ops.cpu.layers.set_num_threads", lambda _: numba.set_num_threads(1)
    )
    try:
        torch.set_num_threads(3)
        hidden = model.forward(*args)
    finally:
        torch.set_num_threads(before)
        # The patch set Numba's number of threads behind `set_num_threads`.
        vars(threads._current).clear()

    assert torch.equal(hidden, expected)


def test_q_k_v_passed_to_attention_are_not_overwritten(folder: Path) -> None:
    """A caller may keep q, k and v of a layer; later layers and passes write to other buffers."""
    model = decoder(folder, "qwen3", "float32")
    copies: list[tuple[Tensor, Tensor]] = []

    def copy_and_attend(layer: int, *heads: Tensor) -> Tensor:
        copies.extend((tensor, tensor.clone()) for tensor in heads)
        return attend(layer, *heads)

    results = [model.forward(*inputs(model, 4, copy_and_attend)) for _ in range(2)]

    assert torch.equal(*results)
    assert results[0].data_ptr() != results[1].data_ptr()
    assert all(torch.equal(*pair) for pair in copies)


def test_attention_may_return_a_view_of_the_right_shape_and_dtype(folder: Path) -> None:
    """Another shape or dtype raises: the kernel would read out of bounds."""
    model = decoder(folder, "llama", "bfloat16")
    expected = model.forward(*inputs(model, 6))

    def attend_strided(layer: int, *heads: Tensor) -> Tensor:
        return attend(layer, *heads).transpose(0, 1).contiguous().transpose(0, 1)

    assert torch.equal(model.forward(*inputs(model, 6, attend_strided)), expected)
    for damage in (
        lambda attn_out: attn_out[:-1],
        lambda attn_out: attn_out.flatten(1),
        lambda attn_out: attn_out.float(),
    ):
        damaged = inputs(model, 6, lambda *heads, damage=damage: damage(attend(*heads)))
        with pytest.raises(ConfigError, match=r"attention returned .* must return torch.bfloat16"):
            model.forward(*damaged)
    assert torch.equal(model.forward(*inputs(model, 6)), expected)


def test_no_rows_give_no_rows_and_wrong_positions_raise(folder: Path) -> None:
    """Positions of another number, dtype or shape, tokens with a batch axis, positions out of range."""
    model = decoder(folder, "mistral", "float32")
    tokens, step = inputs(model, 3)
    positions = step.positions

    assert model.forward(*inputs(model, 0)).shape == (0, model.config.hidden_size)
    for wrong in (positions[:2], positions.repeat(2), positions.int(), positions[None]):
        with pytest.raises(ConfigError, match=r"positions are torch.int.* must be int64 \[3\]"):
            model.forward(tokens, ForwardStep(wrong, attend))
    with pytest.raises(ConfigError, match=r"x is torch.float32 \(1, 3, 52\)"):
        model.forward(tokens[None], ForwardStep(positions[:1], attend))
    for outside in (-1, model.config.max_model_len):
        positions[1] = outside
        with pytest.raises(IndexError, match="positions must be in"):
            model.forward(tokens, step)


def test_layers_of_different_shapes_are_refused(folder: Path) -> None:
    """All layers share buffers of the first layer's widths: another would write out of bounds."""
    models = [decoder(folder, family, "float32") for family in ("llama", "qwen3")]
    llama, qwen3 = (fused_layers_of(model)._layers[0] for model in models)

    with pytest.raises(ConfigError, match="layers differ"):
        FusedLayers([llama, qwen3])
    with pytest.raises(ConfigError, match="linears have widths"):
        FusedLayers([replace(llama, rope=qwen3.rope)])


def test_op_lists_are_cached_for_the_row_counts_used_last(folder: Path) -> None:
    """Prompts of many lengths neither grow the cache without bound nor evict decoding's op list."""
    model = decoder(folder, "llama", "float32")
    op_list = fused_layers_of(model)._op_list
    decode_ops = op_list(1, torch.get_num_threads())
    for num_rows in range(2, MAX_OP_LISTS + 10):
        model.forward(*inputs(model, num_rows))
        model.forward(*inputs(model, 1))

    assert op_list(1, torch.get_num_threads()) is decode_ops
    assert op_list.cache_info().currsize == MAX_OP_LISTS


def test_loading_leaves_the_number_of_threads_as_it_was(folder: Path) -> None:
    """The first kernel of a process starts Numba's thread pool, which is also torch's."""
    decoder(folder, "llama", "float32")
    program = f"""
import pathlib, torch
torch.set_num_threads(1)
from ramify.models.loader import load_model
load_model(pathlib.Path({str(folder / "llama")!r}), dtype="float32", exact=False, ops="cpu")
print(torch.get_num_threads())
"""
    environment = {**os.environ, "NUMBA_NUM_THREADS": "2"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )

    assert result.stdout.strip() == "1", result.stderr


@pytest.mark.parametrize("strategy", ["torch", "onednn", "padded", "blocks", "row_by_row"])
def test_torch_operations_are_not_fused(folder: Path, strategy: str) -> None:
    """They are called one by one, with results close to those of the fused layers."""
    fused = decoder(folder, "qwen2", "float32")
    other = decoder(folder, "qwen2", "float32", ops_of(strategy))
    args = inputs(fused, 9)

    torch.testing.assert_close(other.forward(*args), fused.forward(*args), rtol=1e-4, atol=1e-4)
