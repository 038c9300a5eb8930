"""Tensors that share a mapping: each has memory of its own, of zeros, as long as it lives."""

from __future__ import annotations

import gc
import itertools
import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.kv import huge_pages
from ramify.kv.huge_pages import MIN_BYTES, SLAB_BYTES, zeros

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "num_bytes", [0, 4, MIN_BYTES, MIN_BYTES + 4, SLAB_BYTES // 2, SLAB_BYTES // 2 + 4]
)
def test_zeros_of_any_size(num_bytes: int, dtype: torch.dtype) -> None:
    found = zeros((num_bytes // dtype.itemsize // 4, 4), dtype)

    assert found.shape == (num_bytes // dtype.itemsize // 4, 4)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert found.data_ptr() % 64 == 0
    assert not found.view(torch.uint8).any()


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(MIN_BYTES, SLAB_BYTES), min_size=1, max_size=8))
def test_no_two_share_a_byte(sizes: list[int]) -> None:
    found = [zeros((size,), torch.int8) for size in sizes]
    places = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in found)

    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))


def test_what_threads_take_at_once_is_apart() -> None:
    def take(value: int) -> torch.Tensor:
        return zeros((MIN_BYTES,), torch.int8).fill_(value)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(take, range(100)))

    assert all(bool((one == value).all()) for value, one in enumerate(found))


def test_a_mapping_lives_as_long_as_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[weakref.ref[mmap.mmap]]()
    mapped = huge_pages._mapped

    def watched(num_bytes: int) -> mmap.mmap:
        found = mapped(num_bytes)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(huge_pages, "_mapped", watched)
    monkeypatch.setattr(huge_pages, "_slabs", huge_pages._Slabs())
    first, second = (zeros((MIN_BYTES,), torch.int8) for _ in range(2))
    large = zeros((SLAB_BYTES,), torch.int8)
    assert len(made) == 2, "two small ones share a slab, the large one has its own"

    del first, large
    gc.collect()
    assert [one() is None for one in made] == [False, True]
    assert not second.any()
    del second
    gc.collect()
    assert made[0]() is None, "nothing keeps the slab that is being filled"
    third = zeros((MIN_BYTES,), torch.int8)
    assert not third.any()


def test_a_kernel_without_huge_pages_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("mmap.mmap", Refused)

    assert not zeros((SLAB_BYTES,), torch.int8).any()


def test_elsewhere_than_on_linux_torch_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmap.MADV_HUGEPAGE")
    monkeypatch.delattr("mmap.MAP_PRIVATE")

    assert not zeros((SLAB_BYTES,), torch.int8).any()


def test_no_room_is_a_memory_error_that_names_the_size() -> None:
    with pytest.raises(MemoryError, match="1,000,000,000,000,000,000 bytes"):
        zeros((10**18,), torch.int8)
    with pytest.raises(MemoryError, match="kv_cache_tokens"):
        zeros((10**20,), torch.int8)
