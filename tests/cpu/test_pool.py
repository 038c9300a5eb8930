"""The K/V pool: slots anywhere, one page id for all planes of all layers."""

import pytest
import torch
from torch import Tensor

from ramify.kv.pool import KVLayout, KVPool, Plane


def rows(count: int, *shape: int) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_what_is_written_to_scattered_slots_is_gathered_in_any_order(
    page_size: int, dtype: torch.dtype
) -> None:
    """Layers and planes do not touch each other, and untouched slots stay zero."""
    pool = KVPool(KVLayout.mha(2, 3, 5), num_pages=8, page_size=page_size, dtype=dtype)
    slots = torch.tensor([7, 0, 5, 2])
    keys, values = rows(4, 3, 5).to(dtype), rows(5, 3, 5)[:4].to(dtype)

    pool.write_kv(1, slots, k=keys, v=values)

    order = torch.tensor([2, 0, 3, 1])
    found = pool.gather_kv(1, slots[order])
    assert torch.equal(found["k"], keys[order])
    assert torch.equal(found["v"], values[order])
    assert not pool.gather_kv(0, slots)["k"].any()
    assert not pool.gather_kv(1, torch.tensor([1, 3, 4, 6]))["v"].any()


def test_copying_and_erasing_pages_reaches_every_plane_of_every_layer() -> None:
    """Pages 0 and 1 go to 3 and 2; then page 0 is erased, the copies stay."""
    pool = KVPool(KVLayout.mha(2, 1, 4), num_pages=4, page_size=2)
    for layer in range(2):
        pool.write_kv(layer, torch.arange(4), k=rows(4, 1, 4) + layer, v=rows(6, 1, 4)[:4])
    before = [pool.gather_kv(layer, torch.arange(4)) for layer in range(2)]

    pool.copy_pages([0, 1], [3, 2])
    pool.zero_pages([0])

    for layer, kept in enumerate(before):
        for name, plane in pool.gather_kv(layer, torch.tensor([6, 7, 4, 5])).items():
            assert torch.equal(plane, kept[name])
        for plane in pool.gather_kv(layer, torch.tensor([0, 1])).values():
            assert not plane.any()


def test_the_padding_page_is_outside_every_count() -> None:
    """It is the page after the last, has slots of its own, and is part of the memory only."""
    layout = KVLayout(3, (Plane("latent", (8,)), Plane("rope", (2,))))
    pool = KVPool(layout, num_pages=5, page_size=4)

    assert (pool.num_pages, pool.padding_page) == (5, 5)
    assert layout.token_bytes(torch.float32) == 3 * (8 + 2) * 4
    assert pool.num_bytes == 6 * 4 * layout.token_bytes(torch.float32)
    assert pool.planes(2)["latent"].shape == (6, 4, 8)


def test_misuse_is_refused() -> None:
    """Sizes below one, planes that do not exist, lists that do not match."""
    layout = KVLayout.mha(1, 1, 4)
    with pytest.raises(ValueError, match="num_pages=0"):
        KVPool(layout, 0, 16)
    pool = KVPool(layout, 2, 2)
    with pytest.raises(ValueError, match="planes are"):
        pool.write_kv(0, torch.tensor([0]), k=rows(1, 1, 4))
    with pytest.raises(ValueError, match="2 source pages, 1 target"):
        pool.copy_pages([0, 1], [1])
