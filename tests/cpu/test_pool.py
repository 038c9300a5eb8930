"""`KVPool`: write, gather, copy and erase by slot and page, in all planes of all layers."""

import pytest
import torch
from torch import Tensor

from ramify.errors import ConfigError
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
    gathered = pool.gather_kv(1, slots[order])
    assert torch.equal(gathered["k"], keys[order])
    assert torch.equal(gathered["v"], values[order])
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

    for layer, expected in enumerate(before):
        for name, plane in pool.gather_kv(layer, torch.tensor([6, 7, 4, 5])).items():
            assert torch.equal(plane, expected[name])
        for plane in pool.gather_kv(layer, torch.tensor([0, 1])).values():
            assert not plane.any()


def test_the_padding_page_is_outside_every_count() -> None:
    """It is the page after the last: counts leave it out, planes have it."""
    layout = KVLayout(3, (Plane("latent", (8,)), Plane("rope", (2,))))
    pool = KVPool(layout, num_pages=5, page_size=4)

    assert (pool.num_pages, pool.padding_page) == (5, 5)
    assert layout.token_bytes(torch.float32) == 3 * (8 + 2) * 4
    assert pool.planes(2)["latent"].shape == (6, 4, 8)


def test_misuse_is_refused() -> None:
    """Sizes below 1, missing planes, page lists of different lengths, repeated or unknown pages."""
    layout = KVLayout.mha(1, 1, 4)
    with pytest.raises(ValueError, match="num_pages=0"):
        KVPool(layout, 0, 16)
    pool = KVPool(layout, 2, 2)
    with pytest.raises(ValueError, match="planes are"):
        pool.write_kv(0, torch.tensor([0]), k=rows(1, 1, 4))
    with pytest.raises(ValueError, match="2 source pages, 1 target"):
        pool.copy_pages([0, 1], [1])
    with pytest.raises(ConfigError, match="named twice"):
        pool.copy_pages([0, 1], [1, 1])
    for pages in ([0, -1], [3]):
        with pytest.raises(ConfigError, match=r"are not all in 0\.\.2"):
            pool.zero_pages(pages)


SLOT = torch.tensor([0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    ("slots", "value", "message"),
    [
        (SLOT.int(), rows(1, 1, 16), "slots are torch.int32"),
        (SLOT[None], rows(1, 1, 16), r"shape \(1, 1\)"),
        (SLOT, rows(2, 1, 16), r"v is .*\(2, 1, 16\).* must have shape \(1, 1, 16\)"),
        (SLOT, rows(1, 2, 16), "v is"),
        (SLOT, rows(1, 1, 15), "v is"),
        (SLOT, rows(1, 1, 16).to(torch.int8), "v is torch.int8"),
        (SLOT, rows(1, 1, 16).double(), "v is torch.float64"),
        (SLOT, rows(1, 1, 16).to("meta"), "on meta"),
    ],
)
def test_nothing_is_written_when_a_value_does_not_fit(
    slots: Tensor, value: Tensor, message: str, dtype: torch.dtype
) -> None:
    """Keys that fit are not written either if the values do not fit."""
    pool = KVPool(KVLayout.mha(1, 1, 16), 2, 16, dtype=dtype)
    fitting = rows(1, 1, 16).bfloat16()
    value = value.bfloat16() if value.dtype == torch.float32 else value

    with pytest.raises(ConfigError, match=message):
        pool.write_kv(0, slots, k=fitting, v=value)

    assert not pool.gather_kv(0, torch.arange(32))["k"].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_gather_writes_into_given_tensors(dtype: torch.dtype) -> None:
    """`out` may be strided and of another float dtype; slots may repeat."""
    pool = KVPool(KVLayout.mha(1, 2, 16, 8).vectorised(), 2, 16, dtype=dtype)
    wide = torch.float32 if dtype == torch.int8 else dtype
    pool.write_kv(0, torch.arange(32), k=rows(32, 2, 16).to(wide), v=rows(32, 2, 8).to(wide))
    slots = torch.tensor([31, 4, 4, 17])
    expected = pool.gather_kv(0, slots)
    out = {
        "k": torch.zeros(4, 2, 16, dtype=torch.float16),
        "v": torch.zeros(2, 4, 8).transpose(0, 1),
    }

    returned = pool.gather_kv(0, slots, out)

    for name, dense in expected.items():
        assert returned[name] is out[name]
        assert torch.equal(out[name], dense.to(out[name].dtype))
    assert expected["k"].dtype == wide
    assert torch.equal(expected["v"][1], expected["v"][2])
    assert bool(expected["v"].any())


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ({"k": torch.zeros(2, 1, 4)}, "planes are"),
        ({"k": torch.zeros(2, 1, 4), "v": torch.zeros(3, 1, 4)}, r"out\['v'\] .*\(2, 1, 4\)"),
        ({"k": torch.zeros(2, 1, 4), "v": torch.zeros(2, 1, 4).int()}, "must be a float"),
    ],
)
def test_gather_refuses_an_out_that_does_not_fit(out: dict[str, Tensor], message: str) -> None:
    """Missing planes, wrong shapes, integers raise; nothing is written to the tensors that fit."""
    pool = KVPool(KVLayout.mha(1, 1, 4), 1, 2)
    pool.write_kv(0, torch.arange(2), k=rows(2, 1, 4), v=rows(2, 1, 4))

    with pytest.raises(ConfigError, match=message):
        pool.gather_kv(0, torch.arange(2), out)

    assert not out["k"].any()
