"""What the kernels of `paged_attention` are told: planes, blocks, rows and shapes, as addresses."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ramify.kernels.cpu.abi import BF16, F16, F32, FP8, INT8, ITEM_BYTES
from ramify.kernels.cpu.simd import i32, i64, load_as_f32

_int, _float = types.int64, types.float32


class KVPlane(NamedTuple):
    """One plane as a kernel sees it: addresses and strides in bytes."""

    address: int
    width: int  # elements per token and head; 0: there is no such plane
    token_stride: int  # from one slot to the next
    head_stride: int  # from one head to the next
    scales: int  # address of float32 factors [slots, heads], or 0


class F32Plane(KVPlane):
    """A plane of float32: kernels are compiled for the kinds that are used."""

    kind, vnni = F32, False


class BF16Plane(KVPlane):
    """A plane of bfloat16."""

    kind, vnni = BF16, False


class BF16VnniPlane(KVPlane):
    """A plane of bfloat16 that is computed with in pairs, as are the others, queries and weights."""

    kind, vnni = BF16, True


class F16Plane(KVPlane):
    """A plane of float16."""

    kind, vnni = F16, False


class INT8Plane(KVPlane):
    """A plane of int8."""

    kind, vnni = INT8, False


class FP8Plane(KVPlane):
    """A plane of float8 e4m3fn."""

    kind, vnni = FP8, False


KV_PLANES = (F32Plane, BF16Plane, F16Plane, INT8Plane, FP8Plane)  # by kind


class KVBlock(NamedTuple):
    """The keys, or the values, of one block and head: addresses all.

    Arrays would be counted, atomically, at every call that takes one.
    """

    plane: KVPlane
    base: int  # of the head in the first slot
    # of [BLOCK_KEYS] int64: bytes from there to each; `kv_pack.PREFETCH_KEYS` more behind
    offsets: int
    scales: int  # of [BLOCK_KEYS] float32; 0 for those that are only fetched
    packed: int  # of them laid out; 0 for those that are not, or only fetched


class PrefetchRange(NamedTuple):
    """Keys and values that a task, or the next one, reads later: fetched during a tile of rows."""

    keys: KVBlock
    values: KVBlock
    begin: int
    end: int  # those [begin, end) of both are still to be fetched


class InPlaceBlock(NamedTuple):
    """A block, several heads and few rows, as `decode_attention` sees them: addresses and counts."""

    keys: KVPlane
    values: KVPlane
    head: int  # the first of the heads
    num_heads: int
    num_rows: int  # of each head
    key_offsets: int  # of [BLOCK_KEYS] int64: bytes from the plane's address; AHEAD more behind
    value_offsets: int
    queries: int  # of [num_heads, num_rows, key_dim] float32; in pairs bfloat16, half of each row
    scores: int  # of room for [num_heads, tiled rows, BLOCK_KEYS] float32; weights likewise
    block_output: int  # of room for [num_heads, tiled rows, value_stride] float32
    next_offsets: int  # of the keys of the next block, or of the next task's first
    next_count: int
    next_head: int
    next_heads: int


class QueryRows(NamedTuple):
    """Queries and results as a kernel sees them."""

    kind: int  # of both: F32 or BF16
    queries: int  # address of [T, num_heads, key_dim], heads side by side
    stride: int  # bytes from one token's queries to the next
    out: int  # address of [T, num_heads, value_dim]


class AttentionParams(NamedTuple):
    """What is the same for all tasks of a launch."""

    state_head_stride: int  # of `state`, from a head to the next
    page_size: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    value_stride: int  # floats of a row of values, value_dim rounded up to whole tiles
    window: int  # 0: none
    num_workers: int
    soft_cap: float  # 0: none
    scale: float  # of queries


def storage_kind(plane: Any) -> int:
    """What a plane is stored in, known when a kernel is compiled; `plane` is the type of its `KVPlane`."""
    kind: int = plane.instance_class.kind
    return kind


@intrinsic
def with_address(_: Any, plane: Any, address: Any) -> Any:
    """The same plane of another layer: a `KVPlane` with another address."""
    place = plane.instance_class._fields.index("address")

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.insert_value(args[0], args[1], place)

    return plane(plane, _int), code


@intrinsic
def item_bytes(_: Any, plane: Any) -> Any:
    """Bytes of an element of a plane."""
    size = ITEM_BYTES[storage_kind(plane)]

    def code(*_: Any) -> Any:
        return i64(size)

    return _int(plane), code


@intrinsic
def has_scales(_: Any, plane: Any) -> Any:
    """Whether what a plane holds is to be multiplied with factors."""
    scaled = storage_kind(plane) >= INT8

    def code(*_: Any) -> Any:
        return ir.IntType(1)(scaled)

    return types.boolean(plane), code


@intrinsic
def is_vnni(_: Any, plane: Any) -> Any:
    """Whether a plane is read in pairs: known when a kernel is compiled."""
    pairs = plane.instance_class.vnni

    def code(*_: Any) -> Any:
        return ir.IntType(1)(pairs)

    return types.boolean(plane), code


@intrinsic
def load_plane_element(_: Any, plane: Any, address: Any) -> Any:
    """One element of a plane as float32."""
    stored = storage_kind(plane)

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.extract_element(load_as_f32(builder, args[1], stored, 1), i32(0))

    return _float(plane, _int), code
