"""A decoder's layers in one chain of compiled code: the bits of its operations one by one."""

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
    return tmp_path_factory.mktemp("chains")


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
    """Not attention, but it depends on all of its arguments, and its result is no view of them."""
    group = q.shape[1] // k.shape[1]
    wide = [one.repeat_interleave(group, 1) for one in (k, v)]
    return q * 0.5 + wide[0].flip(0) * (layer + 1) + wide[1]


def ids(model: DenseDecoder, num_rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    tokens = torch.randint(model.config.vocab_size, (num_rows,), generator=generator)
    return tokens, torch.randint(model.config.max_model_len, (num_rows,), generator=generator)


def one_by_one(model: DenseDecoder, *args: Any) -> Tensor:
    chain, model._fused_layers = model._fused_layers, None
    try:
        return model.forward(*args)
    finally:
        model._fused_layers = chain


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", DENSE)
def test_the_bits_are_those_of_the_operations_one_by_one(
    folder: Path, family: str, dtype: str
) -> None:
    """Biases, norms of heads, odd widths; one row to several blocks of them, in any order."""
    model = decoder(folder, family, dtype)
    for num_rows in (1, 2, 97, 1, 5, 8, 33, 200, 3, 200):
        args = (*ids(model, num_rows), attend)

        assert torch.equal(model.forward(*args), one_by_one(model, *args)), num_rows


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_may_change_between_two_passes(folder: Path, threads: int) -> None:
    """What is kept for a number of rows belongs to a number of threads, too."""
    model, before = decoder(folder, "llama", "float32"), torch.get_num_threads()
    args = (*ids(model, 40), attend)
    expected = one_by_one(model, *args)
    try:
        torch.set_num_threads(threads)
        found = model.forward(*args)
    finally:
        torch.set_num_threads(before)

    assert torch.equal(found, expected)
    assert torch.equal(model.forward(*args), expected)


@pytest.mark.parametrize("num_rows", [1, 5, 200])
def test_one_thread_can_play_all_workers(
    folder: Path, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One behind the other: nobody may wait for what only somebody later would do."""
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
        found = model.forward(*args)
    finally:
        torch.set_num_threads(before)
        vars(threads._current).clear()  # Numba is asked again

    assert torch.equal(found, expected)


def test_what_attention_was_given_stays_as_it_was(folder: Path) -> None:
    """A caller may keep the heads of a layer; the next layer and the next pass write elsewhere."""
    model = decoder(folder, "qwen3", "float32")
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(layer: int, *heads: Tensor) -> Tensor:
        kept.extend((one, one.clone()) for one in heads)
        return attend(layer, *heads)

    results = [model.forward(*ids(model, 4), keep) for _ in range(2)]

    assert torch.equal(*results)
    assert results[0].data_ptr() != results[1].data_ptr()
    assert all(torch.equal(*pair) for pair in kept)


def test_what_attention_returns_may_be_a_view_and_must_fit(folder: Path) -> None:
    """A kernel would read beyond what is too small."""
    model = decoder(folder, "llama", "bfloat16")
    args = ids(model, 6)
    expected = model.forward(*args, attend)

    def spread(layer: int, *heads: Tensor) -> Tensor:
        return attend(layer, *heads).transpose(0, 1).contiguous().transpose(0, 1)

    assert torch.equal(model.forward(*args, spread), expected)
    for spoil in (
        lambda mixed: mixed[:-1],
        lambda mixed: mixed.flatten(1),
        lambda mixed: mixed.float(),
    ):
        with pytest.raises(ConfigError, match=r"attend returned .* it must return torch.bfloat16"):
            model.forward(*args, lambda *heads, spoil=spoil: spoil(attend(*heads)))
    assert torch.equal(model.forward(*args, attend), expected)


def test_no_rows_and_positions_that_do_not_fit(folder: Path) -> None:
    """Nothing comes of nothing; no row is left unturned, and none beyond the last is written."""
    model = decoder(folder, "mistral", "float32")
    nothing = torch.zeros(0, dtype=torch.int64)
    tokens, positions = ids(model, 3)

    assert model.forward(nothing, nothing, attend).shape == (0, model.config.hidden_size)
    for wrong in (positions[:2], positions.repeat(2), positions.int(), positions[None]):
        with pytest.raises(ConfigError, match=r"positions are torch.int.* must be int64 \[3\]"):
            model.forward(tokens, wrong, attend)
    with pytest.raises(ConfigError, match=r"x is torch.float32 \(1, 3, 52\)"):
        model.forward(tokens[None], positions[:1], attend)
    for outside in (-1, model.config.max_model_len):
        positions[1] = outside
        with pytest.raises(IndexError, match="positions must be in"):
            model.forward(tokens, positions, attend)


def test_layers_that_differ_are_not_chained(folder: Path) -> None:
    """Buffers are those of the first: another would write beyond them."""
    chains = [decoder(folder, family, "float32")._fused_layers for family in ("llama", "qwen3")]
    layers = [chain._layers[0] for chain in chains if chain is not None]

    with pytest.raises(ConfigError, match="layers differ"):
        FusedLayers(layers, num_heads=(6, 2, 2), head_dim=20)
    with pytest.raises(ConfigError, match="products have widths"):
        FusedLayers(layers[:1], num_heads=(6, 2, 1), head_dim=20)


def test_programs_are_kept_for_the_numbers_of_rows_used_last(folder: Path) -> None:
    """A stream of prompts of all lengths neither piles them up nor drives out that of decoding."""
    model = decoder(folder, "llama", "float32")
    assert model._fused_layers is not None
    kept = model._fused_layers._op_list(1, torch.get_num_threads())
    for num_rows in range(2, MAX_OP_LISTS + 10):
        model.forward(*ids(model, num_rows), attend)
        model.forward(*ids(model, 1), attend)

    assert model._fused_layers._op_list(1, torch.get_num_threads()) is kept
    assert model._fused_layers._op_list.cache_info().currsize == MAX_OP_LISTS


def test_loading_leaves_the_number_of_threads_as_it_was(folder: Path) -> None:
    """The first kernel of a process starts Numba's pool, which is torch's too."""
    decoder(folder, "llama", "float32")
    program = f"""
import pathlib, torch
torch.set_num_threads(1)
from ramify.models.loader import load_model
load_model(pathlib.Path({str(folder / "llama")!r}), dtype="float32", exact=False, linear_strategy="packed_gemm")
print(torch.get_num_threads())
"""
    environment = {**os.environ, "NUMBA_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )

    assert done.stdout.strip() == "1", done.stderr


@pytest.mark.parametrize("strategy", ["onednn", "padded", "row_by_row"])
def test_other_ways_to_multiply_are_not_chained(folder: Path, strategy: str) -> None:
    """They are called one by one, and mean the same."""
    chained = decoder(folder, "qwen2", "float32")
    other = load_model(folder / "qwen2", dtype="float32", linear_strategy=strategy)
    assert isinstance(other, DenseDecoder)
    assert other._fused_layers is None
    args = (*ids(chained, 9), attend)

    torch.testing.assert_close(other.forward(*args), chained.forward(*args), rtol=1e-4, atol=1e-4)
