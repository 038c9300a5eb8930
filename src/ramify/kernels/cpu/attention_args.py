"""Argument structs of the attention kernel: addresses, strides in bytes, counts.

Numba counts references to an array, atomically, at every call that takes one; hence addresses.
Numba compares structs by class name: each must be unique among all kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ramify.kernels.cpu.abi import BF16, F16, F32, FP8, INT8, ITEM_BYTES
from ramify.kernels.cpu.simd import i32, i64, load_as_f32

_int, _float, _bool = types.int64, types.float32, ir.IntType(1)


class KVPlane(NamedTuple):
    """A K/V plane [slots, heads, width] of one layer; its subclass is its storage kind."""

    address: int
    width: int  # elements per token and head; 0: no such plane
    token_stride: int  # from one slot to the next
    head_stride: int  # from one head to the next
    scales: int  # address of float32 [slots, heads], or 0


class F32Plane(KVPlane):
    """Float32."""

    kind, vnni = F32, False


class BF16Plane(KVPlane):
    """Bfloat16, widened to float32 for arithmetic."""

    kind, vnni = BF16, False


class BF16VnniPlane(KVPlane):
    """Bfloat16 for bf16 dot products or tiles: all planes, queries and softmax weights are VNNI then."""

    kind, vnni = BF16, True


class F16Plane(KVPlane):
    """Float16."""

    kind, vnni = F16, False


class INT8Plane(KVPlane):
    """Int8 with scales."""

    kind, vnni = INT8, False


class FP8Plane(KVPlane):
    """Float8 e4m3fn with scales."""

    kind, vnni = FP8, False


KV_PLANES = (F32Plane, BF16Plane, F16Plane, INT8Plane, FP8Plane)  # by kind


class KVBlock(NamedTuple):
    """The keys, or the values, of one KV block and head."""

    plane: KVPlane
    base: int  # address of the head in slot 0
    # address of [BLOCK_KEYS] int64: bytes from `base` to each key; readable `PREFETCH_KEYS` further
    offsets: int
    scales: int  # address of [BLOCK_KEYS] float32; 0 in a `PrefetchRange`
    packed: int  # address of the packed block (see `kv_pack`); 0 for rope and in a `PrefetchRange`


class PrefetchRange(NamedTuple):
    """Keys and values [begin, end) that are read next, to be prefetched during a tile of rows."""

    keys: KVBlock
    values: KVBlock
    begin: int
    end: int


class InPlaceBlock(NamedTuple):
    """A KV block and the rows of several heads that read it in place, for `decode_attention`."""

    keys: KVPlane
    values: KVPlane
    head: int  # first K/V head
    num_heads: int
    num_rows: int  # per head
    # address of [BLOCK_KEYS] int64: bytes from the plane's address; readable `PREFETCH_KEYS` further
    key_offsets: int
    value_offsets: int
    # address of [num_heads, num_rows, key_dim] float32; VNNI without tiles: bf16, half of each row
    queries: int
    scores: int  # address of [num_heads, padded rows, BLOCK_KEYS] float32; weights afterwards
    block_output: int  # address of [num_heads, padded rows, value_stride] float32
    next_offsets: int  # of the keys of the next block, which may be the next task's first
    next_count: int
    next_head: int
    next_heads: int


class QueryRows(NamedTuple):
    """Queries and attention output."""

    kind: int  # of both: F32 or BF16
    queries: int  # address of [T, num_heads, key_dim]
    stride: int  # bytes from token to token of the queries
    out: int  # address of [T, num_heads, value_dim]


class AttentionParams(NamedTuple):
    """Launch parameters, the same for all tasks."""

    state_head_stride: int  # rows of `state` per head
    page_size: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    value_stride: int  # value_dim rounded up to a multiple of TILE_N
    window: int  # 0: none
    num_workers: int
    soft_cap: float  # 0: none
    scale: float  # of queries
    sinks: int  # address of a float32 logit per head, or 0
    # BF16_TILES or BF16_TILES_EMULATED: planes that are VNNI have the sums of tiles; 0: of dot products
    tiles: int


def storage_kind(plane: Any) -> int:
    """Storage kind of a plane, at compile time; `plane` is the Numba type of its struct."""
    kind: int = plane.instance_class.kind
    return kind


@intrinsic
def with_address(_: Any, plane: Any, address: Any) -> Any:
    """The plane with another address: that of another layer."""
    field = plane.instance_class._fields.index("address")

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.insert_value(args[0], args[1], field)

    return plane(plane, _int), code


@intrinsic
def with_window_and_sinks(_: Any, params: Any, window: Any, sinks: Any) -> Any:
    """The launch parameters with another window and other sinks: those of another layer."""
    window_field, sinks_field = map(params.instance_class._fields.index, ("window", "sinks"))

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        of_window = builder.insert_value(args[0], args[1], window_field)
        return builder.insert_value(of_window, args[2], sinks_field)

    return params(params, _int, _int), code


def _make_constant(numba_type: Any, llvm_type: Any, of: Callable[[Any], int]) -> Any:
    @intrinsic
    def constant(_: Any, plane: Any) -> Any:
        """What `of` returns for the struct of a plane, at compile time."""
        value = of(plane.instance_class)

        def code(*_: Any) -> Any:
            return llvm_type(value)

        return numba_type(plane), code

    return constant


# bytes of an element
item_bytes = _make_constant(_int, i64, lambda struct: ITEM_BYTES[struct.kind])
# whether the kind is quantized, so that elements are multiplied by `scales`
has_scales = _make_constant(types.boolean, _bool, lambda struct: struct.kind >= INT8)
# whether it is a `BF16VnniPlane`
is_vnni = _make_constant(types.boolean, _bool, lambda struct: struct.vnni)


@intrinsic
def load_plane_element(_: Any, plane: Any, address: Any) -> Any:
    """One element of a plane as float32."""
    stored = storage_kind(plane)

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.extract_element(load_as_f32(builder, args[1], stored, 1), i32(0))

    return _float(plane, _int), code
