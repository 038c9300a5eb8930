"""Records of ops: what each int64 of an op in an op list holds. One table, for kernels and callers.

An op list is int64 [n, OP_FIELDS]. An op is one of the records below, the rest of its row zeros.
Callers make a record by name, `op_row(NormOp(...))`; fields that are left out are 0, and addresses of
buffers are written later. Kernels and callers read field `x` of a norm as `op[NORM.x]`.
docs/op-records.md is made of this file. Imports nothing of Numba, so that callers need none.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

OP_GEMM, OP_NORM_ROPE, OP_NORM, OP_ROUTE, OP_GROUP, OP_COMBINE = range(6)


class GemmOp(NamedTuple):
    """Packed GEMM, see `packed_gemm.packed_gemm`. No bit depends on `block_rows`, `tile`, `num_n_splits`."""

    op: Annotated[int, "OP_GEMM"] = OP_GEMM
    dtype: Annotated[int, "of rows, norm and result: F32 or BF16"] = 0
    weight_kind: Annotated[int, "of the packed weights, see `abi`"] = 0
    mode: Annotated[int, "epilogue, see `abi`"] = 0
    x: Annotated[int, "address of the rows [num_rows, width]"] = 0
    x_stride: Annotated[int, "bytes from row to row of x"] = 0
    num_rows: Annotated[int, "rows; grouped: the most rows of an expert"] = 0
    width: Annotated[int, "K: elements of a row of x"] = 0
    norm: Annotated[int, "address of the norm's weights, or 0"] = 0
    norm_kind: Annotated[int, "storage kind of the norm's weights, or LAYER_NORM"] = 0
    weight: Annotated[int, "address of the micro-panels"] = 0
    num_panels: Annotated[int, "micro-panels of a matrix"] = 0
    bias: Annotated[int, "address of float32 [num_panels * NR], or 0"] = 0
    out: Annotated[int, "address of the result [num_rows, num_columns]"] = 0
    out_stride: Annotated[int, "bytes from row to row of the result"] = 0
    num_columns: Annotated[int, "columns of the result"] = 0
    block_rows: Annotated[int, "rows of a task, a multiple of the tile's MR; grouped: at most"] = 0
    tile: Annotated[int, "index in MR_TILES; grouped: unused, an item has its own"] = 0
    num_n_splits: Annotated[int, "ranges of panels; grouped: tasks to aim at"] = 0
    items: Annotated[int, "address of the items of a grouped GEMM, or 0"] = 0
    num_items: Annotated[int, "address of the number of items"] = 0
    gather: Annotated[int, "address of int64: the place of each row in x; 0: in order"] = 0
    scale: Annotated[int, "of ADD_RESIDUAL: bits of a float32"] = 0
    group: Annotated[int, "of codes: elements of a row that share a scale"] = 0
    scales: Annotated[int, "of codes: address of [num_panels, groups, NR]"] = 0
    scale_kind: Annotated[
        int, "storage kind of scales and mins: F32, F16, or INT8, times factors"
    ] = 0
    scale_stride: Annotated[int, "bytes of a panel's scales, and of its mins"] = 0
    scale_step: Annotated[int, "bytes from group to group; 0: all groups have one scale"] = 0
    mins: Annotated[int, "of codes: address of offsets, laid out as scales; or 0"] = 0
    levels: Annotated[
        int, "of CODES4: address of 32 int16, the 16 levels twice; 0: see code_offset"
    ] = 0
    code_tiles: Annotated[int, "of codes: elements of K of a tile of int8; 0: no tiles"] = 0
    code_offset: Annotated[int, "of CODES4 without levels: the integer of code 0"] = 0
    factors: Annotated[
        int, "of INT8: address of float16 [num_panels, scales or mins, K / 256, NR]"
    ] = 0
    row_bits: Annotated[int, "of codes: 8 or 16, of the integers that x is rounded to"] = 0


class NormRopeOp(NamedTuple):
    """QK norm and rope of tokens' heads in their QKV rows, see `norm_rope.norm_rope`."""

    op: Annotated[int, "OP_NORM_ROPE"] = OP_NORM_ROPE
    num_tasks: Annotated[int, "tasks that workers share"] = 0
    dtype: Annotated[int, "F32 or BF16"] = 0
    rows: Annotated[int, "address of the QKV rows"] = 0
    row_stride: Annotated[int, "bytes from row to row"] = 0
    num_q: Annotated[int, "query heads, which come first in a row"] = 0
    num_k: Annotated[int, "key heads, which follow"] = 0
    head_dim: Annotated[int, "elements of a head"] = 0
    q_norm: Annotated[int, "address of the query norm's weights, or 0"] = 0
    k_norm: Annotated[int, "address of the key norm's weights, or 0"] = 0
    cos: Annotated[int, "address of cosines [limit, head_dim / 2]"] = 0
    sin: Annotated[int, "address of sines [limit, head_dim / 2]"] = 0
    limit: Annotated[int, "positions of the two tables"] = 0
    out_of_range: Annotated[int, "output: 1 if a position is not below limit"] = 0
    form: Annotated[int, "a QK_NORM_ constant; weights are [head_dim] or [heads * head_dim]"] = 0
    norm_kind: Annotated[int, "storage kind of both norms' weights, or LAYER_NORM"] = 0


class NormOp(NamedTuple):
    """Norm of rows, stored or added to the result, see `norm_rope.norm_rows`."""

    op: Annotated[int, "OP_NORM"] = OP_NORM
    num_tasks: Annotated[int, "tasks that workers share"] = 0
    dtype: Annotated[int, "of rows and result: F32 or BF16"] = 0
    mode: Annotated[int, "STORE or ADD_RESIDUAL"] = 0
    x: Annotated[int, "address of the rows"] = 0
    x_stride: Annotated[int, "bytes from row to row of x"] = 0
    num_rows: Annotated[int, "rows"] = 0
    width: Annotated[int, "elements of a row"] = 0
    norm: Annotated[int, "address of the norm's weights"] = 0
    norm_kind: Annotated[int, "storage kind of the norm's weights, or LAYER_NORM"] = 0
    out: Annotated[int, "address of the result"] = 0
    out_stride: Annotated[int, "bytes from row to row of the result"] = 0
    f32_copy: Annotated[
        int, "address of a float32 copy [num_rows, width] of what is stored, or 0"
    ] = 0


class RouteOp(NamedTuple):
    """Router logits to weights of experts, in place, see `moe`."""

    op: Annotated[int, "OP_ROUTE"] = OP_ROUTE
    num_tasks: Annotated[int, "tasks that workers share"] = 0
    weights: Annotated[int, "address of float32 logits, padded to LANES; weights afterwards"] = 0
    weights_stride: Annotated[int, "bytes from row to row of weights"] = 0
    num_rows: Annotated[int, "tokens"] = 0
    num_experts: Annotated[int, "experts"] = 0
    top_k: Annotated[int, "experts of a token"] = 0
    normalise: Annotated[int, "1: weights of a token sum up to 1"] = 0


class GroupOp(NamedTuple):
    """Weights to `routing`: pairs of token and expert, sorted by expert, see `moe`. One task."""

    op: Annotated[int, "OP_GROUP"] = OP_GROUP
    num_tasks: Annotated[int, "1"] = 1
    weights: Annotated[int, "address of the experts' weights, float32"] = 0
    weights_stride: Annotated[int, "bytes from row to row of weights"] = 0
    num_rows: Annotated[int, "tokens"] = 0
    num_experts: Annotated[int, "experts"] = 0
    top_k: Annotated[int, "at most non-zero weights of a token"] = 0
    routing: Annotated[int, "address of `routing`, see `moe.routing_offsets`"] = 0
    num_items: Annotated[int, "address of the number of items, which it writes"] = 0


class CombineOp(NamedTuple):
    """Sum over the experts of a token of weight * result, see `moe`."""

    op: Annotated[int, "OP_COMBINE"] = OP_COMBINE
    num_tasks: Annotated[int, "tasks that workers share"] = 0
    dtype: Annotated[int, "of results and sum: F32 or BF16"] = 0
    mode: Annotated[int, "STORE, into zeros, or ADD_RESIDUAL"] = 0
    x: Annotated[int, "address of the results in sorted order"] = 0
    x_stride: Annotated[int, "bytes from row to row of x and of shared"] = 0
    num_rows: Annotated[int, "tokens"] = 0
    num_experts: Annotated[int, "experts"] = 0
    top_k: Annotated[int, "experts of a token"] = 0
    routing: Annotated[int, "address of `routing`"] = 0
    width: Annotated[int, "elements of a row"] = 0
    out: Annotated[int, "address of the sums"] = 0
    out_stride: Annotated[int, "bytes from row to row of the sums"] = 0
    shared: Annotated[int, "address of a shared expert's results in order of tokens, or 0"] = 0
    shared_weights: Annotated[int, "address of their float32 weights; joins the sum last"] = 0


RECORDS = GemmOp, NormRopeOp, NormOp, RouteOp, GroupOp, CombineOp
OP_FIELDS = max(len(record._fields) for record in RECORDS)

# Numbers of the fields: constants for kernels.
GEMM = GemmOp(*range(len(GemmOp._fields)))
NORM_ROPE = NormRopeOp(*range(len(NormRopeOp._fields)))
NORM = NormOp(*range(len(NormOp._fields)))
ROUTE = RouteOp(*range(len(RouteOp._fields)))
GROUP = GroupOp(*range(len(GroupOp._fields)))
COMBINE = CombineOp(*range(len(CombineOp._fields)))
# The fields that every record has at the same place; `OP_NUM_TASKS` every one but a GEMM's.
OP_KIND, OP_NUM_TASKS = GEMM.op, NORM.num_tasks


def op_row(record: tuple[int, ...]) -> tuple[int, ...]:
    """A record as a row of an op list: [OP_FIELDS]."""
    return (*record, *(0,) * (OP_FIELDS - len(record)))
