"""Fused decoder layers, attention called by layer: same bits as the operations called one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.kernels.cpu import threads
from ramify.models.dense import DenseDecoder
from ramify.models.loader import load_model
from ramify.models.ops.cpu_layers import MAX_OP_LISTS, FusedLayers
from ramify.testing import TinyFamily, write_tiny_checkpoint
from tests.cpu.tiny_models import DENSE

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fused_layers")


def decoder(folder: Path, family: str, dtype: str) -> DenseDecoder:
    path = folder / family
    if not path.exists():
        named = cast(TinyFamily, family)
        write_tiny_checkpoint(path, named, tokenizer=False, num_hidden_layers=3, **DENSE[family])
    model = load_model(path, dtype=dtype, linear_strategy="packed_gemm")
    assert isinstance(model, DenseDecoder)
    assert model._fused_layers is not None
    return model


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A stand-in for attention: depends on every argument; its result is not a view of any."""
    group = q.shape[1] // k.shape[1]
    keys, values = (heads.repeat_interleave(group, 1) for heads in (k, v))
    return q * 0.5 + keys.flip(0) * (layer + 1) + values


def ids(model: DenseDecoder, num_rows: int) -> tuple[Tensor, Tensor]:
    """Random token ids and positions [num_rows]."""
    generator = torch.Generator().manual_seed(num_rows)
    tokens = torch.randint(model.config.vocab_size, (num_rows,), generator=generator)
    return tokens, torch.randint(model.config.max_model_len, (num_rows,), generator=generator)


def forward_unfused(model: DenseDecoder, *args: Any) -> Tensor:
    """`model.forward` without the fused layers."""
    fused_layers, model._fused_layers = model._fused_layers, None
    try:
        return model.forward(*args)
    finally:
        model._fused_layers = fused_layers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", DENSE)
def test_the_bits_are_those_of_the_operations_one_by_one(
    folder: Path, family: str, dtype: str
) -> None:
    """Biases, QK norm, odd widths; from 1 row to several row blocks, in any order of row counts."""
    model = decoder(folder, family, dtype)
    for num_rows in (1, 2, 97, 1, 5, 8, 33, 200, 3, 200):
        args = (*ids(model, num_rows), attend)

        assert torch.equal(model.forward(*args), forward_unfused(model, *args)), num_rows


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_may_change_between_two_passes(folder: Path, threads: int) -> None:
    """Op lists are cached by number of rows and number of threads."""
    model, before = decoder(folder, "llama", "float32"), torch.get_num_threads()
    args = (*ids(model, 40), attend)
    expected = forward_unfused(model, *args)
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
    args = (*ids(model, num_rows), attend)
    expected = model.forward(*args)
    before = torch.get_num_threads()
    monkeypatch.setattr(
        "ramify.models.ops.cpu_layers.set_num_threads", lambda _: numba.set_num_threads(1)
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

    results = [model.forward(*ids(model, 4), copy_and_attend) for _ in range(2)]

    assert torch.equal(*results)
    assert results[0].data_ptr() != results[1].data_ptr()
    assert all(torch.equal(*pair) for pair in copies)


def test_attention_may_return_a_view_of_the_right_shape_and_dtype(folder: Path) -> None:
    """Another shape or dtype raises: the kernel would read out of bounds."""
    model = decoder(folder, "llama", "bfloat16")
    args = ids(model, 6)
    expected = model.forward(*args, attend)

    def attend_strided(layer: int, *heads: Tensor) -> Tensor:
        return attend(layer, *heads).transpose(0, 1).contiguous().transpose(0, 1)

    assert torch.equal(model.forward(*args, attend_strided), expected)
    for damage in (
        lambda attn_out: attn_out[:-1],
        lambda attn_out: attn_out.flatten(1),
        lambda attn_out: attn_out.float(),
    ):
        with pytest.raises(ConfigError, match=r"attend returned .* it must return torch.bfloat16"):
            model.forward(*args, lambda *heads, damage=damage: damage(attend(*heads)))
    assert torch.equal(model.forward(*args, attend), expected)


def test_no_rows_give_no_rows_and_wrong_positions_raise(folder: Path) -> None:
    """Positions of another number, dtype or shape, tokens with a batch axis, positions out of range."""
    model = decoder(folder, "mistral", "float32")
    empty = torch.zeros(0, dtype=torch.int64)
    tokens, positions = ids(model, 3)

    assert model.forward(empty, empty, attend).shape == (0, model.config.hidden_size)
    for wrong in (positions[:2], positions.repeat(2), positions.int(), positions[None]):
        with pytest.raises(ConfigError, match=r"positions are torch.int.* must be int64 \[3\]"):
            model.forward(tokens, wrong, attend)
    with pytest.raises(ConfigError, match=r"x is torch.float32 \(1, 3, 52\)"):
        model.forward(tokens[None], positions[:1], attend)
    for outside in (-1, model.config.max_model_len):
        positions[1] = outside
        with pytest.raises(IndexError, match="positions must be in"):
            model.forward(tokens, positions, attend)


def test_layers_of_different_shapes_are_refused(folder: Path) -> None:
    """All layers share buffers of the first layer's widths: another would write out of bounds."""
    models = [decoder(folder, family, "float32")._fused_layers for family in ("llama", "qwen3")]
    layers = [fused_layers._layers[0] for fused_layers in models if fused_layers is not None]

    with pytest.raises(ConfigError, match="layers differ"):
        FusedLayers(layers, num_heads=(6, 2, 2), head_dim=20)
    with pytest.raises(ConfigError, match="products have widths"):
        FusedLayers(layers[:1], num_heads=(6, 2, 1), head_dim=20)


def test_op_lists_are_cached_for_the_row_counts_used_last(folder: Path) -> None:
    """Prompts of many lengths neither grow the cache without bound nor evict decoding's op list."""
    model = decoder(folder, "llama", "float32")
    assert model._fused_layers is not None
    decode_ops = model._fused_layers._op_list(1, torch.get_num_threads())
    for num_rows in range(2, MAX_OP_LISTS + 10):
        model.forward(*ids(model, num_rows), attend)
        model.forward(*ids(model, 1), attend)

    assert model._fused_layers._op_list(1, torch.get_num_threads()) is decode_ops
    assert model._fused_layers._op_list.cache_info().currsize == MAX_OP_LISTS


def test_loading_leaves_the_number_of_threads_as_it_was(folder: Path) -> None:
    """The first kernel of a process starts Numba's thread pool, which is also torch's."""
    decoder(folder, "llama", "float32")
    program = f"""
import pathlib, torch
torch.set_num_threads(1)
from ramify.models.loader import load_model
load_model(pathlib.Path({str(folder / "llama")!r}), dtype="float32", exact=False, linear_strategy="packed_gemm")
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


@pytest.mark.parametrize("strategy", ["onednn", "padded", "row_by_row"])
def test_other_linear_strategies_are_not_fused(folder: Path, strategy: str) -> None:
    """Their operations are called one by one, with results close to those of the fused layers."""
    fused = decoder(folder, "qwen2", "float32")
    other = load_model(folder / "qwen2", dtype="float32", linear_strategy=strategy)
    assert isinstance(other, DenseDecoder)
    assert other._fused_layers is None
    args = (*ids(fused, 9), attend)

    torch.testing.assert_close(other.forward(*args), fused.forward(*args), rtol=1e-4, atol=1e-4)
