"""RadixAttentionWithPagedKVCache: what is appended is read back, and every block comes back."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.attention import AttentionBatch, AttentionSpec, Extend
from ramify.attention import RadixAttentionWithPagedKVCache as PagedCache
from ramify.attention.backend import BACKENDS, backend_class
from ramify.errors import CacheError, ConfigError, OutOfPagesError, UnknownRequestError
from ramify.kv.block_table import PagedBlockTable

HEADS, DIM = 2, 8


def cache(num_layers: int = 1, block_size: int = 4, **changes: Any) -> PagedCache:
    return PagedCache(num_layers, HEADS, DIM, block_size, **({"num_blocks": 32} | changes))


def rows(*values: float) -> Tensor:
    """One token per value, all of whose numbers are that value."""
    return (
        torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, HEADS, DIM).contiguous()
    )


def read(paged: PagedCache, ids: list[Any], lengths: list[int] | None = None) -> list[float]:
    """What the keys are; the values must be ten times as much."""
    keys, values = paged.get_kv_cache(ids, lengths)
    assert keys.shape == values.shape == (1, keys.shape[1], HEADS, DIM)
    assert torch.equal(values, keys * 10)
    assert bool((keys == keys[..., :1, :1]).all())
    found: list[float] = keys[0, :, 0, 0].tolist()
    return found


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("batched", [False, True])
def test_eb3_one_by_one_is_read_back_in_order(block_size: int, batched: bool) -> None:
    """Every append goes behind the last one, also across blocks and between two requests."""
    paged = cache(block_size=block_size)

    for at in range(11):
        for name, first in (("a", 0), ("b", 100)):
            new = rows(first + at)
            new = new[None] if batched else new
            slots = paged.append_slot(new, new * 10, name)
            page, offset = divmod(int(slots[0]), block_size)
            assert (paged.blocks(name)[-1], at % block_size) == (page, offset)

    assert read(paged, ["a", "b"]) == [*range(11), *range(100, 111)]
    assert [paged.length(name) for name in "ab"] == [11, 11]


def test_appends_of_any_length_fill_the_last_block_first() -> None:
    """3, 6, 0 and 2 tokens are 11 in 3 blocks of 4."""
    paged, at = cache(), 0

    for count in (3, 6, 0, 2):
        new = rows(*range(at, at + count))
        paged.append_slot(new, new * 10, 7)
        at += count

    assert read(paged, [7]) == list(range(11))
    assert len(paged.blocks(7)) == 3


def test_eb4_blocks_are_used_again() -> None:
    """10,000 times take and free: the same few blocks, the same memory, the newest content."""
    paged = cache(num_blocks=5)
    planes = paged.pool.planes(0)["k"].data_ptr()

    for at in range(10_000):
        blocks = paged.allocate_blocks(at, 1 + at % 5)
        assert set(blocks) <= set(range(5))
        if at % 1000 == 0:
            paged.append_slot(rows(at, at + 1), rows(at, at + 1) * 10, at)
            assert read(paged, [at]) == [at, at + 1]
        paged.free_request(at)

    assert paged.num_free_blocks == 5
    assert paged.pool.planes(0)["k"].data_ptr() == planes


def test_eb5_limits_hold_for_every_way_in() -> None:
    """A request's maximum and the pool's, by `allocate_blocks` and by `append_slot`."""
    paged = cache(num_blocks=5, max_blocks_per_request=3)
    paged.append_slot(rows(*range(9)), rows(*range(9)) * 10, "a")  # 3 blocks, 3 slots left
    before = (paged.blocks("a"), paged.length("a"), paged.num_free_blocks)

    with pytest.raises(CacheError, match=r"would hold 4 blocks .* max_blocks_per_request is 3"):
        paged.append_slot(rows(*range(4)), rows(*range(4)) * 10, "a")
    with pytest.raises(CacheError, match="would hold 4 blocks"):
        paged.allocate_blocks("a", 1)
    with pytest.raises(OutOfPagesError) as caught:
        paged.append_slot(rows(*range(12)), rows(*range(12)) * 10, "b")
    with pytest.raises(ConfigError, match="num_blocks=-1"):
        paged.allocate_blocks("a", -1)

    assert (caught.value.asked, caught.value.free) == (3, 2)
    assert (paged.blocks("a"), paged.length("a"), paged.num_free_blocks) == before
    with pytest.raises(KeyError):
        paged.blocks("b")
    assert read(paged, ["a"]) == list(range(9))


def test_eb5_a_second_allocation_extends_the_first() -> None:
    """The earlier blocks and what is in them stay."""
    paged = cache()
    first = paged.allocate_blocks("a", 2)
    paged.append_slot(rows(1, 2), rows(10, 20), "a")

    second = paged.allocate_blocks("a", 3)

    assert not set(first) & set(second)
    assert paged.blocks("a") == first + second
    assert read(paged, ["a"]) == [1, 2]
    paged.append_slot(rows(*range(3, 21)), rows(*range(3, 21)) * 10, "a")
    assert paged.blocks("a") == first + second  # 20 tokens: what was allocated is used
    assert read(paged, ["a"]) == list(range(1, 21))


def test_eb6_every_layer_has_content_of_its_own() -> None:
    """One block addresses the same rows of all layers; each layer has its own fill level."""
    paged = cache(num_layers=3)
    for layer in range(3):
        new = rows(*(100.0 * layer + at for at in range(6 - layer)))
        paged.append_slot(new, new * 10, "a", layer=layer)

    assert len(paged.blocks("a")) == 2
    for layer in range(3):
        keys, _ = paged.get_kv_cache(["a"], layer=layer)
        assert keys[0, :, 0, 0].tolist() == [100 * layer + at for at in range(6 - layer)]
        assert paged.length("a", layer=layer) == 6 - layer
    with pytest.raises(CacheError, match="5 tokens of request 'a' asked for, but layer 2 has 4"):
        paged.get_kv_cache(["a"], [5], layer=2)
    with pytest.raises(ConfigError, match=r"layer=3 but layers are 0\.\.2"):
        paged.append_slot(rows(1), rows(1), "a", layer=3)


def test_eb7_free_and_held_blocks_are_all_blocks() -> None:
    """After any mixture of taking, extending and freeing, and at the end all are free."""
    paged = cache(num_blocks=20, max_blocks_per_request=20)
    generator = torch.Generator().manual_seed(3)

    live: set[int] = set()
    for _ in range(500):
        name, count = (int(x) for x in torch.randint(0, 6, (2,), generator=generator))
        if count == 5 and name in live:
            paged.free_request(name)
            live.discard(name)
        elif count <= paged.num_free_blocks:
            paged.allocate_blocks(name, count)
            live.add(name)
        held = [block for each in live for block in paged.blocks(each)]
        assert len(set(held)) == len(held) == 20 - paged.num_free_blocks
        assert not any(paged.ledger.is_free(block) for block in held)
    for name in live:
        paged.free_request(name)

    paged.ledger.check(())
    assert paged.num_free_blocks == 20


def test_eb8_lengths_are_each_requests_own() -> None:
    """5 and 3 tokens in blocks of 4: eight rows, nothing of a block's unused end."""
    paged = cache()
    paged.append_slot(rows(1, 1, 1, 1, 2, 9, 9), rows(1, 1, 1, 1, 2, 9, 9) * 10, "a")
    paged.append_slot(rows(3, 3, 3), rows(3, 3, 3) * 10, "b")

    assert read(paged, ["a", "b"], [5, 3]) == [1, 1, 1, 1, 2, 3, 3, 3]
    assert read(paged, ["b", "a"], [2, 0]) == [3, 3]
    assert read(paged, []) == []
    for lengths in ([5, 4], [8, 3], [-1, 3]):
        with pytest.raises(CacheError, match="asked for, but layer 0 has"):
            paged.get_kv_cache(["a", "b"], lengths)
    with pytest.raises(ConfigError, match="2 requests but 1 lengths"):
        paged.get_kv_cache(["a", "b"], [5])


def test_eb9_an_unknown_request_is_a_key_error() -> None:
    """Nobody's data moves into its place; freed ones are unknown too."""
    paged = cache()
    paged.append_slot(rows(1), rows(10), "a")
    paged.append_slot(rows(2), rows(20), "gone")
    paged.free_request("gone")

    for call in (
        lambda: paged.get_kv_cache(["a", "gone"], [1, 1]),
        lambda: paged.free_request("gone"),
        lambda: paged.blocks("never"),
        lambda: paged.length("never"),
    ):
        with pytest.raises(UnknownRequestError, match="no live request has id '") as caught:
            call()
        assert isinstance(caught.value, KeyError)
    assert read(paged, ["a"]) == [1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (torch.zeros(2, HEADS, DIM), torch.zeros(3, HEADS, DIM)),
        (torch.zeros(2, HEADS + 1, DIM), torch.zeros(2, HEADS + 1, DIM)),
        (torch.zeros(2, HEADS, DIM).half(), torch.zeros(2, HEADS, DIM).half()),
        (torch.zeros(2, 2, HEADS, DIM), torch.zeros(2, 2, HEADS, DIM)),
    ],
)
def test_what_does_not_fit_is_not_begun(key: Tensor, value: Tensor) -> None:
    """A wrong shape or dtype: no block is taken and no request is known afterwards."""
    paged = cache()

    with pytest.raises(ConfigError):
        paged.append_slot(key, value, "a")

    assert paged.num_free_blocks == 32
    with pytest.raises(UnknownRequestError):
        paged.length("a")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("num_new", [1, 3])
def test_eb21_backends_read_its_planes_as_they_are(name: str, num_new: int) -> None:
    """Scale, every dimension of a head, block tables and more than 32 blocks: as over dense K/V."""
    lengths = (150, 9, 33)
    cls, cpu = backend_class(name), torch.device("cpu")
    specs = [
        AttentionSpec(
            num_heads=6,
            num_kv_heads=HEADS,
            head_dim=DIM,
            page_size=4,
            dtype=torch.float32,
            windows=(None,),
            scale=DIM**-0.5,
            exact=exact,
        )
        for exact in (True, False)
    ]
    spec = next((each for each in specs if cls.supports(each, cpu) is None), None)
    if spec is None:
        pytest.skip(f"{name}: {cls.supports(specs[1], cpu)}")
    paged = cache(num_blocks=64)
    torch.manual_seed(9)
    for at in range(max(lengths)):  # in turns, so that no request's blocks are neighbours
        for request, length in enumerate(lengths):
            if at < length:
                new = torch.randn(2, 1, HEADS, DIM)
                paged.append_slot(new[0], new[1], request)
    table = PagedBlockTable.of([paged.blocks(request) for request in range(3)], 4)
    extends = [Extend(at, at, length - num_new, num_new) for at, length in enumerate(lengths)]
    batch = AttentionBatch.build(extends, table)
    q = torch.randn(3 * num_new, 6, DIM)
    backend = cls(spec, cpu)

    found = backend.run(backend.plan(batch), 0, q, paged.pool.planes(0))

    for request, length in enumerate(lengths):
        keys, values = (each[0].double() for each in paged.get_kv_cache([request]))
        for row in range(num_new):
            end = length - num_new + row + 1
            for head in range(6):
                at = request * num_new + row
                scores = keys[:end, head // 3] @ q[at, head].double() / DIM**0.5
                wanted = (scores.softmax(0) @ values[:end, head // 3]).float()
                assert torch.allclose(found[at, head], wanted, atol=2e-6)
