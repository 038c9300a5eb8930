"""RadixAttentionWithPagedKVCache: appended K/V is read back, and every block is freed."""

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
    """A token per value, filled with that value."""
    return (
        torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, HEADS, DIM).contiguous()
    )


def read(paged: PagedCache, ids: list[Any], lengths: list[int] | None = None) -> list[float]:
    """The value of each token's key; asserts that its value is ten times the key."""
    keys, values = paged.get_kv_cache(ids, lengths)
    assert keys.shape == values.shape == (1, keys.shape[1], HEADS, DIM)
    assert torch.equal(values, keys * 10)
    assert bool((keys == keys[..., :1, :1]).all())
    tokens: list[float] = keys[0, :, 0, 0].tolist()
    return tokens


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("batched", [False, True])
def test_eb3_single_tokens_are_read_back_in_order(block_size: int, batched: bool) -> None:
    """Every append follows the last one, across blocks and with two requests in turns."""
    paged = cache(block_size=block_size)

    for position in range(11):
        for name, first in (("a", 0), ("b", 100)):
            new = rows(first + position)
            new = new[None] if batched else new
            slots = paged.append_slot(new, new * 10, name)
            page, offset = divmod(int(slots[0]), block_size)
            assert (paged.blocks(name)[-1], position % block_size) == (page, offset)

    assert read(paged, ["a", "b"]) == [*range(11), *range(100, 111)]
    assert [paged.length(name) for name in "ab"] == [11, 11]


def test_appends_of_any_length_fill_the_last_block_first() -> None:
    """3, 6, 0 and 2 tokens are 11 in 3 blocks of 4."""
    paged, length = cache(), 0

    for count in (3, 6, 0, 2):
        new = rows(*range(length, length + count))
        paged.append_slot(new, new * 10, 7)
        length += count

    assert read(paged, [7]) == list(range(11))
    assert len(paged.blocks(7)) == 3


def test_eb4_blocks_are_used_again() -> None:
    """10,000 times allocate and free: the same blocks and memory, the newest content."""
    paged = cache(num_blocks=5)
    planes = paged.pool.planes(0)["k"].data_ptr()

    for request in range(10_000):
        blocks = paged.allocate_blocks(request, 1 + request % 5)
        assert set(blocks) <= set(range(5))
        if request % 1000 == 0:
            new = rows(request, request + 1)
            paged.append_slot(new, new * 10, request)
            assert read(paged, [request]) == [request, request + 1]
        paged.free_request(request)

    assert paged.num_free_blocks == 5
    assert paged.pool.planes(0)["k"].data_ptr() == planes


def test_eb5_limits_hold_for_every_method() -> None:
    """The limits of a request and of the pool, for `allocate_blocks` and `append_slot`."""
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
    """The earlier blocks and their contents stay."""
    paged = cache()
    first = paged.allocate_blocks("a", 2)
    paged.append_slot(rows(1, 2), rows(10, 20), "a")

    second = paged.allocate_blocks("a", 3)

    assert not set(first) & set(second)
    assert paged.blocks("a") == first + second
    assert read(paged, ["a"]) == [1, 2]
    paged.append_slot(rows(*range(3, 21)), rows(*range(3, 21)) * 10, "a")
    assert paged.blocks("a") == first + second  # 20 tokens fill the allocated blocks
    assert read(paged, ["a"]) == list(range(1, 21))


def test_eb6_every_layer_has_its_own_content() -> None:
    """A block has the same index in all layers; each layer has its own length."""
    paged = cache(num_layers=3)
    for layer in range(3):
        new = rows(*(100.0 * layer + token for token in range(6 - layer)))
        paged.append_slot(new, new * 10, "a", layer=layer)

    assert len(paged.blocks("a")) == 2
    for layer in range(3):
        keys, _ = paged.get_kv_cache(["a"], layer=layer)
        assert keys[0, :, 0, 0].tolist() == [100 * layer + token for token in range(6 - layer)]
        assert paged.length("a", layer=layer) == 6 - layer
    with pytest.raises(CacheError, match="5 tokens of request 'a' asked for, but layer 2 has 4"):
        paged.get_kv_cache(["a"], [5], layer=2)
    with pytest.raises(ConfigError, match=r"layer=3 but layers are 0\.\.2"):
        paged.append_slot(rows(1), rows(1), "a", layer=3)


def test_eb7_free_and_held_blocks_are_all_blocks() -> None:
    """After any mixture of allocating, extending and freeing; at the end all are free."""
    paged = cache(num_blocks=20, max_blocks_per_request=20)
    generator = torch.Generator().manual_seed(3)

    live: set[int] = set()
    for _ in range(500):
        name, count = (int(number) for number in torch.randint(0, 6, (2,), generator=generator))
        if count == 5 and name in live:
            paged.free_request(name)
            live.discard(name)
        elif count <= paged.num_free_blocks:
            paged.allocate_blocks(name, count)
            live.add(name)
        held = [block for request in live for block in paged.blocks(request)]
        assert len(set(held)) == len(held) == 20 - paged.num_free_blocks
        assert not any(paged.ledger.is_free(block) for block in held)
    for name in live:
        paged.free_request(name)

    paged.ledger.check(())
    assert paged.num_free_blocks == 20


def test_eb8_lengths_are_per_request() -> None:
    """5 and 3 tokens in blocks of 4: eight rows, no unused slot of a block."""
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
    """No other request's data is returned instead; freed requests are unknown too."""
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
def test_a_rejected_append_changes_nothing(key: Tensor, value: Tensor) -> None:
    """A wrong shape or dtype: no block is allocated and no request starts."""
    paged = cache()

    with pytest.raises(ConfigError):
        paged.append_slot(key, value, "a")

    assert paged.num_free_blocks == 32
    with pytest.raises(UnknownRequestError):
        paged.length("a")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("num_new", [1, 3])
def test_eb21_backends_read_its_planes_as_they_are(name: str, num_new: int) -> None:
    """Every backend over its planes, with more than 32 blocks, equals dense attention."""
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
    spec = next((spec for spec in specs if cls.supports(spec, cpu) is None), None)
    if spec is None:
        pytest.skip(f"{name}: {cls.supports(specs[1], cpu)}")
    paged = cache(num_blocks=64)
    torch.manual_seed(9)
    for position in range(max(lengths)):  # in turns, so that a request's blocks are scattered
        for request, length in enumerate(lengths):
            if position < length:
                new = torch.randn(2, 1, HEADS, DIM)
                paged.append_slot(new[0], new[1], request)
    table = PagedBlockTable.of([paged.blocks(request) for request in range(3)], 4)
    extends = [Extend(i, i, length - num_new, num_new) for i, length in enumerate(lengths)]
    batch = AttentionBatch.build(extends, table)
    q = torch.randn(3 * num_new, 6, DIM)
    backend = cls(spec, cpu)

    out = backend.run(backend.plan(batch), 0, q, paged.pool.planes(0))

    for request, length in enumerate(lengths):
        keys, values = (dense[0].double() for dense in paged.get_kv_cache([request]))
        for row in range(num_new):
            end = length - num_new + row + 1
            for head in range(6):
                q_row = request * num_new + row
                scores = keys[:end, head // 3] @ q[q_row, head].double() / DIM**0.5
                expected = (scores.softmax(0) @ values[:end, head // 3]).float()
                assert torch.allclose(out[q_row, head], expected, atol=2e-6)
