"""K/V layouts and dtypes: the pool and attention read what was written, floats exactly, 8 bits within bounds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ramify.attention.backends.eager import EagerBackend
from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.gather import gather_kv_f32
from ramify.attention.spec import AttentionSpec
from ramify.errors import ConfigError, SlotOutOfRangeError
from ramify.kv.block_table import PagedBlockTable
from ramify.kv.pool import KVLayout, KVPool, Plane
from ramify.kv.quantize import SCALED_DTYPES, dequantize, quantize

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int8, torch.float8_e4m3fn)
NUM_HEADS = 5


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.")


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Random rows of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(*shape[:-1], 1, generator=generator) * 8 - 4
    return torch.randn(*shape, generator=generator) * torch.exp(sizes)


def bound(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Maximum error of dequantised `values`, in float64; see `quantize`."""
    exact = values.double()
    if dtype == torch.int8:
        return exact.abs().amax(-1, keepdim=True) / 127 * 0.50002
    step = exact.abs().amax(-1, keepdim=True) / 448 / 1024
    return torch.maximum(exact.abs() / 16, step) * (1 + 2**-20)


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert torch.equal(bits(actual), bits(expected))


def pools(layout: KVLayout, num_pages: int, page_size: int, dtype: torch.dtype) -> list[KVPool]:
    """A pool in nhd, and in the vectorised format where the page size allows it."""
    formats = [KVPool(layout, num_pages, page_size, dtype=dtype)]
    if page_size % (16 // dtype.itemsize) == 0:
        formats.append(KVPool(layout.vectorised(), num_pages, page_size, dtype=dtype))
    return formats


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_ab27_gather_returns_what_was_written(
    dtype: torch.dtype, head_dim: int, page_size: int
) -> None:
    """Any head_dim, page size, dtype and format; floats exactly, 8 bits within the bound."""
    layout = KVLayout.mha(2, NUM_HEADS, head_dim, value_dim=head_dim // 2)
    num_pages = -(-96 // page_size)
    slots = torch.randperm(num_pages * page_size, generator=torch.Generator().manual_seed(1))[:40]
    wide = dtype if dtype in FLOATS else torch.float32
    written = {
        "k": noise(40, NUM_HEADS, head_dim).to(wide),
        "v": noise(40, NUM_HEADS, head_dim // 2, seed=1).to(wide),
    }
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))

    gathered = []
    for pool in pools(layout, num_pages, page_size, dtype):
        pool.write_kv(1, slots, **written)
        gathered.append(pool.gather_kv(1, slots[order]))
        assert not pool.gather_kv(0, slots)["k"].float().any()

    assert len(gathered) == (1 if page_size < 16 else 2)
    for dense in gathered:
        for name, values in written.items():
            assert_same(dense[name], gathered[0][name])
            if dtype in FLOATS:
                assert_same(dense[name], values[order])
            else:
                error = (dense[name].double() - values[order].double()).abs()
                assert bool((error <= bound(values[order], dtype)).all())
                assert bool(error.any())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_attention_reads_the_same_bits_from_both_layouts(dtype: torch.dtype, head_dim: int) -> None:
    """Eager attention gives the same bits for both formats, and reads the values of `gather_kv`."""
    page_size, shares = 16, ((20, 7), (0, 3), (33, 1))
    model = dtype if dtype in FLOATS else torch.float32
    table = PagedBlockTable.of([[6, 1], [4], [0, 7, 3]], page_size)
    batch = AttentionBatch.build(
        [Extend(i, i, cached, new) for i, (cached, new) in enumerate(shares)], table
    )
    spec = AttentionSpec(
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_HEADS,
        head_dim=head_dim,
        page_size=page_size,
        dtype=model,
        windows=(None,),
        scale=head_dim**-0.5,
        kv_dtype=dtype,
    )
    q = noise(batch.num_tokens, NUM_HEADS, head_dim, seed=3).to(model)
    slots = torch.cat([torch.from_numpy(batch.kv_slots(seq)) for seq in range(batch.num_seqs)])
    written = {name: noise(len(slots), NUM_HEADS, head_dim, seed=4).to(model) for name in "kv"}

    outputs = []
    for pool in pools(KVLayout.mha(1, NUM_HEADS, head_dim), 8, page_size, dtype):
        pool.write_kv(0, slots, **written)
        dense = pool.gather_kv(0, slots)
        keys, values = gather_kv_f32(pool.planes(0), slots)
        assert_same(keys, dense["k"].float())
        assert_same(values, dense["v"].float())
        backend = EagerBackend(replace(spec, layout=pool.layout.format), torch.device("cpu"))
        outputs.append(backend.run(backend.plan(batch), 0, q, pool.planes(0)))

    assert len(outputs) == 2
    assert_same(outputs[0], outputs[1])
    assert bool(outputs[0].any())


@pytest.mark.parametrize("dtype", SCALED_DTYPES, ids=name_of)
def test_a_row_is_quantised_on_its_own(dtype: torch.dtype) -> None:
    """A row's codes and scale are the same alone, among other rows, and at any place."""
    rows = noise(23, 3, 80)
    codes, scale = quantize(rows, dtype)

    for row in (0, 7, 22):
        for subset in (rows[row : row + 1], rows[row:].clone(), rows[: row + 1].flip(0)[:1]):
            subset_codes, subset_scale = quantize(subset, dtype)
            assert_same(subset_codes[0], codes[row])
            assert_same(subset_scale[0], scale[row])


@pytest.mark.parametrize("wide", FLOATS, ids=name_of)
@pytest.mark.parametrize("dtype", SCALED_DTYPES, ids=name_of)
def test_the_error_is_within_its_bound(dtype: torch.dtype, wide: torch.dtype) -> None:
    """For rows with outliers, ties, tiny and huge elements; the bound is tight; zeros stay zero."""
    rows = noise(4000, 64, seed=9)
    rows[::3, 5] *= 300  # an outlier
    rows[1::3] = torch.linspace(-1, 1, 64)
    rows[2::3, 3:] *= torch.exp2(torch.arange(61) * -0.25)
    rows[7] = 0
    rows[8] *= 1e4
    rows = rows.clamp(-6e4, 6e4).to(wide)

    dequantized = dequantize(*quantize(rows, dtype))

    error = (dequantized.double() - rows.double()).abs()
    assert bool((error <= bound(rows, dtype)).all())
    assert float((error / bound(rows, dtype).clamp(min=1e-300)).max()) > 0.9
    assert not dequantized[7].any()


@pytest.mark.parametrize("dtype", SCALED_DTYPES, ids=name_of)
def test_the_smallest_and_largest_numbers_survive(dtype: torch.dtype) -> None:
    """Scales of the smallest normal and of half the largest float32 neither underflow nor overflow."""
    tiny, huge = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max / 2
    rows = torch.tensor([[tiny, -tiny], [huge, -huge / 2], [1e-45, 0.0]])

    dequantized = dequantize(*quantize(rows, dtype))

    assert torch.isfinite(dequantized).all()
    torch.testing.assert_close(dequantized[:2], rows[:2], rtol=2**-4, atol=0)
    assert float(dequantized[2].abs().max()) < tiny


@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", SCALED_DTYPES, ids=name_of)
def test_damage_stays_visible(dtype: torch.dtype, damage: float) -> None:
    """A row with a NaN or an infinity dequantises to NaN; other rows stay finite."""
    rows = noise(3, 16)
    rows[1, 4] = damage

    dequantized = dequantize(*quantize(rows, dtype))

    assert dequantized[1].isnan().all()
    assert torch.isfinite(dequantized[[0, 2]]).all()


def test_vectors_of_16_bytes_lie_together() -> None:
    """Slot 9 of pages of 8, bfloat16: x is 8, so it is token 1 of page 1 in both planes."""
    pool = KVPool(KVLayout.mha(1, 2, 24, 3).vectorised(), 3, 8, dtype=torch.bfloat16)
    keys, values = noise(1, 2, 24).bfloat16(), noise(1, 2, 3).bfloat16()

    pool.write_kv(0, torch.tensor([9]), k=keys, v=values)

    planes = pool.planes(0)
    assert planes["k"].shape == (4, 2, 3, 8, 8)
    assert planes["v"].shape == (4, 2, 1, 3, 8)
    assert_same(planes["k"][1, :, :, 1].flatten(1), keys[0])
    assert_same(planes["v"][1, :, 0, :, 1], values[0])
    assert int(planes["k"].count_nonzero()) == keys.numel()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "page_size", "message"),
    [
        (torch.float32, 66, 16, r"dim=66 of plane k is no multiple of 4.*use dim=68"),
        (torch.bfloat16, 20, 16, r"dim=20 of plane k is no multiple of 8"),
        (torch.int8, 64, 8, r"page_size=8 of plane v is no multiple of 16.*use page_size=16"),
        (torch.float8_e4m3fn, 64, 1, r"page_size=1 of plane v .* or format='nhd'"),
    ],
)
def test_sizes_that_vectors_do_not_divide_are_refused(
    dtype: torch.dtype, head_dim: int, page_size: int, message: str
) -> None:
    """The error names the size, the plane and both ways out; nhd accepts the same sizes."""
    layout = KVLayout.mha(1, 1, head_dim)

    with pytest.raises(ConfigError, match=message):
        KVPool(layout.vectorised(), 2, page_size, dtype=dtype)

    KVPool(layout, 2, page_size, dtype=dtype)


def test_invalid_layouts_are_refused() -> None:
    """No layers, repeated plane names, sizes below 1, unknown formats and dtypes."""
    with pytest.raises(ConfigError, match="num_layers=0"):
        KVLayout.mha(0, 1, 4)
    with pytest.raises(ConfigError, match="no name twice"):
        KVLayout.mla(1, 8, 4).with_index_key(4).with_index_key(4)
    with pytest.raises(ConfigError, match=r"plane v of shape \(1, 0\)"):
        KVLayout.mha(1, 1, 4, 0)
    with pytest.raises(ConfigError, match="keys and values per head"):
        KVLayout.mla(1, 8, 4).vectorised()
    with pytest.raises(ConfigError, match="format='hnd' does not exist"):
        KVLayout(1, (Plane("k", (1, 4)),), "hnd")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"cannot be torch.int16; use one of torch.float32"):
        KVPool(KVLayout.mha(1, 1, 4), 1, 1, dtype=torch.int16)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    "layout",
    [
        KVLayout.mha(2, 3, 32, 16),
        KVLayout.mha(2, 3, 32).vectorised(),
        KVLayout.mha(1, 3, 32).with_index_key(8).vectorised(),
        KVLayout.mla(3, 24, 8).with_index_key(16),
        KVLayout(2, (Plane("latent", (24,)), Plane("rope", (8,), torch.bfloat16))),
    ],
    ids=["mha", "vectorised", "vectorised_index", "mla_index", "own_dtype"],
)
def test_eb6_every_layer_has_its_planes_and_all_bytes_are_counted(
    layout: KVLayout, dtype: torch.dtype
) -> None:
    """Bytes of all tensors = token_bytes * slots, scales and padding page included."""
    pool = KVPool(layout, 4, 16, dtype=dtype)
    tensors = [t for layer in range(layout.num_layers) for t in pool.planes(layer).values()]

    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    assert sum(tensor.nbytes for tensor in tensors) == layout.token_bytes(dtype) * 5 * 16
    assert [tensor.shape[0] for tensor in tensors] == [5] * len(tensors)
    for name, plane in pool.planes(0).items():
        scaled = plane.dtype in SCALED_DTYPES
        assert (f"{name}_scale" in pool.planes(0)) == scaled
        if scaled:
            assert pool.planes(0)[f"{name}_scale"].dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_latents_and_index_keys_are_rows_too(dtype: torch.dtype) -> None:
    """MLA planes read as one head: key = latent and rope, value = latent; each plane with its scale."""
    pool = KVPool(KVLayout.mla(1, 24, 8).with_index_key(16), 3, 4, dtype=dtype)
    slots = torch.tensor([10, 0, 7])
    wide = dtype if dtype in FLOATS else torch.bfloat16
    widths = {"latent": 24, "rope": 8, "index_key": 16}
    written = {name: noise(3, width, seed=width).to(wide) for name, width in widths.items()}

    pool.write_kv(0, slots, **written)

    keys, values = gather_kv_f32(pool.planes(0), slots)
    dense = pool.gather_kv(0, slots)
    assert_same(keys, torch.cat([dense["latent"], dense["rope"]], -1).float()[:, None])
    assert_same(values, dense["latent"].float()[:, None])
    for name, rows in written.items():
        allowed = bound(rows, dtype) if dtype in SCALED_DTYPES else 0.0
        assert bool(((dense[name].double() - rows.double()).abs() <= allowed).all())


@pytest.mark.parametrize("vectorised", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_yb17_a_hole_in_the_table_is_refused(dtype: torch.dtype, vectorised: bool) -> None:
    """Page -1 gives slots below 0, which raise on write and gather in both formats."""
    layout = KVLayout.mha(1, NUM_HEADS, 96)
    pool = KVPool(layout.vectorised() if vectorised else layout, 2, 16, dtype=dtype)
    new = torch.ones(1, NUM_HEADS, 96).to(dtype if dtype in FLOATS else torch.float32)

    for slot in (-1, -16, 3 * 16):
        with pytest.raises(IndexError):
            pool.write_kv(0, torch.tensor([slot]), k=new, v=new)
        with pytest.raises(IndexError):
            pool.gather_kv(0, torch.tensor([slot]))
    if vectorised:
        with pytest.raises(SlotOutOfRangeError, match=r"slots -1 to 4 are not all in 0\.\.47"):
            pool.gather_kv(0, torch.tensor([-1, 4]))

    assert not pool.gather_kv(0, torch.arange(48))["k"].any()


@pytest.mark.parametrize("vectorised", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_pages_are_copied_and_erased_in_every_layout(dtype: torch.dtype, vectorised: bool) -> None:
    """Swap pages 0 and 1, erase page 2, in every layer; scales are copied and erased too."""
    layout = KVLayout.mha(2, 2, 16).with_index_key(16)
    pool = KVPool(layout.vectorised() if vectorised else layout, 3, 16, dtype=dtype)
    wide = dtype if dtype in FLOATS else torch.float32
    for layer in range(2):
        rows = noise(48, 2, 16, seed=layer).to(wide)
        pool.write_kv(layer, torch.arange(48), k=rows, v=rows * 2, index_key=rows[:, 0])
    before = [pool.gather_kv(layer, torch.arange(48)) for layer in range(2)]

    pool.copy_pages([0, 1], [1, 0])
    pool.zero_pages([2])

    moved = torch.cat([torch.arange(16, 32), torch.arange(16)])
    for layer in range(2):
        after = pool.gather_kv(layer, torch.arange(48))
        for name, values in after.items():
            assert_same(values[:32], before[layer][name][moved])
            assert not values[32:].any()


class LargestResult(TorchDispatchMode):
    """Records the largest result of a torch operation in bytes; views of the pool do not count."""

    def __init__(self, pool: KVPool) -> None:
        super().__init__()
        self.num_bytes = 0
        self.known = {plane.untyped_storage().data_ptr() for plane in pool.planes(0).values()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in self.known:
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


@pytest.mark.parametrize("vectorised", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_ab14_a_gather_reads_the_layout_as_it_is(dtype: torch.dtype, vectorised: bool) -> None:
    """No operation allocates more than the gathered tokens in float32, however large the pool is."""
    layout = KVLayout.mha(1, 2, 64)
    pool = KVPool(layout.vectorised() if vectorised else layout, 100, 16, dtype=dtype)
    slots = torch.tensor([3, 1599, 40])

    with LargestResult(pool) as largest:
        pool.gather_kv(0, slots)
        gather_kv_f32(pool.planes(0), slots)

    assert 0 < largest.num_bytes <= 3 * 2 * 64 * 4
