"""The table of entry points and of all their signatures: what wheels carry object code of.

Each signature is written as arguments with which a call does nothing. Whoever adds an entry point, a
kind of K/V plane or an argument adds it here; a call with another signature compiles at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import numpy as np
from numba import typeof
from numba.core.registry import cpu_target

from ramify.kernels.cpu.attention_args import (
    KV_PLANES,
    AttentionParams,
    BF16Plane,
    BF16VnniPlane,
    F32Plane,
    KVPlane,
    QueryRows,
)
from ramify.kernels.cpu.fused_layers import run_fused_layers
from ramify.kernels.cpu.op_list import run_ops
from ramify.kernels.cpu.op_records import OP_FIELDS
from ramify.kernels.cpu.paged_attention import paged_attention
from ramify.kernels.cpu.round_weights import round_groups
from ramify.kernels.cpu.simd import HAS_BF16_DOT

_VNNI = (BF16VnniPlane,) if HAS_BF16_DOT else ()
PLANES: tuple[Any, ...] = (*KV_PLANES, *_VNNI)
# Fused layers write K/V in the dtype of the rows.
ROW_PLANES: tuple[Any, ...] = (F32Plane, BF16Plane, *_VNNI)


def _ints(*shape: int) -> Any:
    return np.zeros(shape, np.int64)


def _floats(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def _zeros(struct: Any) -> Any:
    """A struct of zeros."""
    return struct(*(kind() for kind in get_type_hints(struct).values()))


def _table() -> Any:
    table = np.zeros((0, 1), np.int32)
    table.flags.writeable = False
    return table


def _run_ops_args() -> tuple[Any, ...]:
    return _ints(0, OP_FIELDS), np.zeros(0), _ints(0), 1, _floats(1, 0), _ints(1, 2)


def _round_groups_args() -> tuple[Any, ...]:
    codes, scales = np.zeros((0, 1), np.int8), np.zeros(0, np.float32)
    return _floats(0, 1), codes, scales, scales, 1, _floats(1, 1, 1)


def _attention_args(plane: type[KVPlane]) -> tuple[Any, ...]:
    planes = [_zeros(plane)] * 3
    return (
        _zeros(AttentionParams), *planes, _ints(0, 10), _ints(0, 5), _ints(0), _ints(0), _table(),
        _zeros(QueryRows), _floats(0, 0), _floats(0, 0), _ints(1),
    )  # fmt: skip


def _fused_layers_args(plane: type[KVPlane]) -> tuple[Any, ...]:
    planes = [_zeros(plane)] * 3
    return (
        *_run_ops_args(), _ints(6), _ints(0, 4), _ints(0), _zeros(AttentionParams), *planes, _ints(0, 10),
        _ints(2), _ints(0, 5), _ints(0), _ints(0), _table(), _floats(0, 0), _floats(0, 0), _ints(1),
    )  # fmt: skip


# Stands for planes of a kernel that runs while weights load, which no model needs afterwards.
AT_LOAD = "at load"
# An entry point, the kinds of planes that it is compiled for, and arguments for a kind.
ENTRY_POINTS: tuple[tuple[Any, tuple[Any, ...], Callable[[Any], tuple[Any, ...]]], ...] = (
    (paged_attention, PLANES, _attention_args),
    (run_ops, (None,), lambda _: _run_ops_args()),
    (run_fused_layers, ROW_PLANES, _fused_layers_args),
    (round_groups, (AT_LOAD,), lambda _: _round_groups_args()),
)


def signatures() -> Iterator[tuple[Any, Any, tuple[Any, ...]]]:
    """All entry points with each kind of planes (None: it reads none), and the Numba types of its arguments.

    `AT_LOAD` stands for planes where no step of a model needs the kernel.
    """
    for entry, planes, args_of in ENTRY_POINTS:
        for plane in planes:
            yield entry, plane, tuple(map(typeof, args_of(plane)))


def num_missing(signature: Any) -> int:
    """How many kernels a model must compile whose K/V planes are those of a signature; at least 1.

    With no planes in the signature, only its own kernel is known to be needed.
    """
    structs = [getattr(kind, "instance_class", None) for kind in signature]
    plane = next((struct for struct in structs if struct in PLANES), None)
    if plane is None:
        return 1
    context = cpu_target.target_context
    return sum(
        not entry._cache.has(types, context)  # noqa: SLF001 - of `KernelCache`
        for entry, of_plane, types in signatures()
        if of_plane in (None, plane)
    )
