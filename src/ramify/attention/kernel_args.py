"""What the kernels of `block_kernels` are told: planes, blocks, rows and shapes, as addresses."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ramify.attention.simd import BF16, F16, F32, FP8, INT8, SIZES, _i32, _i64, _widen

_int, _float = types.int64, types.float32


class Part(NamedTuple):
    """One plane as a kernel sees it: addresses and strides in bytes."""

    address: int
    width: int  # elements per token and head; 0: there is no such plane
    token: int  # from one slot to the next
    head: int  # from one head to the next
    scales: int  # address of float32 factors [slots, heads], or 0


class F32Part(Part):
    """A plane of float32: kernels are compiled for the kinds that are used."""

    kind, pairs = F32, False


class BF16Part(Part):
    """A plane of bfloat16."""

    kind, pairs = BF16, False


class PairsPart(Part):
    """A plane of bfloat16 that is computed with in pairs, as are the others, queries and weights."""

    kind, pairs = BF16, True


class F16Part(Part):
    """A plane of float16."""

    kind, pairs = F16, False


class INT8Part(Part):
    """A plane of int8."""

    kind, pairs = INT8, False


class FP8Part(Part):
    """A plane of float8 e4m3fn."""

    kind, pairs = FP8, False


PARTS = (F32Part, BF16Part, F16Part, INT8Part, FP8Part)  # by kind


class Block(NamedTuple):
    """The keys, or the values, of one block and head: addresses all.

    Arrays would be counted, atomically, at every call that takes one.
    """

    part: Part
    source: int  # of the head in the first slot
    offsets: int  # of [BLOCK_KEYS] int64: bytes from there to each; `key_vectors.AHEAD` more behind
    factors: int  # of [BLOCK_KEYS] float32; 0 for those that are only fetched
    packed: int  # of them laid out; 0 for those that are not, or only fetched


class Later(NamedTuple):
    """Keys and values that a task, or the next one, reads later: fetched during a tile of rows."""

    keys: Block
    values: Block
    begin: int
    end: int  # those [begin, end) of both are still to be fetched


class Few(NamedTuple):
    """A block, several heads and few rows, as `few_rows` sees them: addresses and counts."""

    keys: Part
    values: Part
    head: int  # the first of the heads
    num_heads: int
    num_rows: int  # of each head
    key_offsets: int  # of [BLOCK_KEYS] int64: bytes from the plane's address; AHEAD more behind
    value_offsets: int
    queries: int  # of [num_heads, num_rows, key_dim] float32; in pairs bfloat16, half of each row
    scores: int  # of room for [num_heads, tiled rows, BLOCK_KEYS] float32; weights likewise
    partial: int  # of room for [num_heads, tiled rows, value_stride] float32
    next_offsets: int  # of the keys of the next block, or of the next task's first
    next_count: int
    next_head: int
    next_heads: int


class Rows(NamedTuple):
    """Queries and results as a kernel sees them."""

    kind: int  # of both: F32 or BF16
    queries: int  # address of [T, num_heads, key_dim], heads side by side
    stride: int  # bytes from one token's queries to the next
    out: int  # address of [T, num_heads, value_dim]


class Shape(NamedTuple):
    """What is the same for all tasks of a launch."""

    head_rows: int  # of `state`, from a head to the next
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


def stored_as(part: Any) -> int:
    """What a plane is stored in, known when a kernel is compiled; `part` is the type of its `Part`."""
    kind: int = part.instance_class.kind
    return kind


@intrinsic
def moved(_: Any, part: Any, address: Any) -> Any:
    """The same plane of another layer: a `Part` with another address."""
    place = part.instance_class._fields.index("address")

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.insert_value(args[0], args[1], place)

    return part(part, _int), code


@intrinsic
def stored_size(_: Any, part: Any) -> Any:
    """Bytes of an element of a plane."""
    size = SIZES[stored_as(part)]

    def code(*_: Any) -> Any:
        return _i64(size)

    return _int(part), code


@intrinsic
def has_scales(_: Any, part: Any) -> Any:
    """Whether what a plane holds is to be multiplied with factors."""
    scaled = stored_as(part) >= INT8

    def code(*_: Any) -> Any:
        return ir.IntType(1)(scaled)

    return types.boolean(part), code


@intrinsic
def in_pairs(_: Any, part: Any) -> Any:
    """Whether a plane is read in pairs: known when a kernel is compiled."""
    pairs = part.instance_class.pairs

    def code(*_: Any) -> Any:
        return ir.IntType(1)(pairs)

    return types.boolean(part), code


@intrinsic
def stored_at(_: Any, part: Any, address: Any) -> Any:
    """One element of a plane as float32."""
    stored = stored_as(part)

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.extract_element(_widen(builder, args[1], stored, 1), _i32(0))

    return _float(part, _int), code
