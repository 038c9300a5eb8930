"""`huge_pages.zeros`: tensors of zeros that share slabs without sharing bytes; slabs are freed with them."""

from __future__ import annotations

import gc
import itertools
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.execution.host_memory import resident_memory
from ramify.kv import huge_pages
from ramify.kv.huge_pages import MIN_BYTES, SLAB_BYTES, small_page_zeros, zeros
from ramify.kv.pool import KVLayout, KVPool
from tests.budget import examples

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "num_bytes", [0, 4, MIN_BYTES, MIN_BYTES + 4, SLAB_BYTES // 2, SLAB_BYTES // 2 + 4]
)
def test_zeros_of_any_size(num_bytes: int, dtype: torch.dtype) -> None:
    """Sizes around the limits of shared slabs; contiguous and aligned to a cache line."""
    tensor = zeros((num_bytes // dtype.itemsize // 4, 4), dtype)

    assert tensor.shape == (num_bytes // dtype.itemsize // 4, 4)
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0
    assert not tensor.view(torch.uint8).any()


@settings(max_examples=examples(30))
@given(sizes=st.lists(st.integers(MIN_BYTES, SLAB_BYTES), min_size=1, max_size=8))
def test_no_two_tensors_share_a_byte(sizes: list[int]) -> None:
    """The address ranges of live tensors are disjoint."""
    tensors = [zeros((size,), torch.int8) for size in sizes]
    ranges = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)

    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))


def test_threads_get_disjoint_tensors() -> None:
    """100 tensors allocated by 8 threads keep the values written to them."""

    def allocate(value: int) -> torch.Tensor:
        return zeros((MIN_BYTES,), torch.int8).fill_(value)

    with ThreadPoolExecutor(8) as pool:
        tensors = list(pool.map(allocate, range(100)))

    assert all(bool((tensor == value).all()) for value, tensor in enumerate(tensors))


def test_a_mapping_lives_as_long_as_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab is freed with its last tensor, also while it is being filled."""
    mappings = list[weakref.ref[mmap.mmap]]()
    mapped = huge_pages._mapped

    def recorded(num_bytes: int) -> mmap.mmap:
        mapping = mapped(num_bytes)
        mappings.append(weakref.ref(mapping))
        return mapping

    monkeypatch.setattr(huge_pages, "_mapped", recorded)
    monkeypatch.setattr(huge_pages, "_slabs", huge_pages._Slabs())
    first, second = (zeros((MIN_BYTES,), torch.int8) for _ in range(2))
    large = zeros((SLAB_BYTES,), torch.int8)
    assert len(mappings) == 2, "small tensors share a slab, a large tensor has its own"

    del first, large
    gc.collect()
    assert [mapping() is None for mapping in mappings] == [False, True]
    assert not second.any()
    del second
    gc.collect()
    assert mappings[0]() is None, "nothing keeps the slab that is being filled"
    third = zeros((MIN_BYTES,), torch.int8)
    assert not third.any()


def test_a_kernel_without_huge_pages_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing madvise is ignored."""

    class Refused(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("mmap.mmap", Refused)

    assert not zeros((SLAB_BYTES,), torch.int8).any()


def test_without_madvise_torch_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """On other systems than Linux `zeros` is `torch.zeros`."""
    monkeypatch.delattr("mmap.MADV_HUGEPAGE")
    monkeypatch.delattr("mmap.MAP_PRIVATE")

    assert not zeros((SLAB_BYTES,), torch.int8).any()


def test_a_failed_mapping_is_a_memory_error_that_names_the_size() -> None:
    """The message names the bytes asked for and the option to change."""
    with pytest.raises(MemoryError, match="1,000,000,000,000,000,000 bytes"):
        zeros((10**18,), torch.int8)
    with pytest.raises(MemoryError, match="kv_cache_tokens"):
        zeros((10**20,), torch.int8)


@pytest.mark.parametrize("num_bytes", [4, MIN_BYTES, 3 << 20])
def test_small_pages_hold_zeros_too(num_bytes: int) -> None:
    """Of any size, contiguous, and aligned to a cache line."""
    tensor = small_page_zeros((num_bytes // 4, 4), torch.int8)

    assert tensor.shape == (num_bytes // 4, 4)
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0
    assert not tensor.any()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's memory counters")
def test_a_pool_takes_the_memory_of_what_is_written() -> None:
    """60 planes of 64 MiB with one token each take less than 2 MiB, not a huge page each."""
    pool = KVPool(KVLayout.mha(30, 4, 64), 2**16, 16, dtype=torch.int8)
    values = torch.ones(1, 4, 64)
    pool.write_kv(29, torch.tensor([0]), k=values, v=values)
    gc.collect()
    before = resident_memory()

    for layer in range(29):
        pool.write_kv(layer, torch.tensor([77]), k=values, v=values)

    assert resident_memory() - before < 2 << 20
