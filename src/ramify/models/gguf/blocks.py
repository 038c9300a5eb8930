"""Blocks of GGUF's tensor types as quantised weights, with the bits of each type's formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.kernels.cpu.abi import NORMAL_LEVELS
from ramify.models.gguf.tensor_types import TensorType
from ramify.models.ops.blocks_of_rows import for_blocks
from ramify.models.ops.quantized import QuantizedWeight, WeightFormat

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Groups(NamedTuple):
    """Scales of blocks, or their offsets: `factor` [blocks, 1] of fp16 times `multiples` [blocks, groups], int8."""

    factor: Floats
    multiples: Floats

    @property
    def values(self) -> Floats:
        """[blocks, groups]."""
        return self.factor * self.multiples


# codes [blocks, width] int8, scales and offsets [blocks, groups]
Decoded = tuple[NDArray[np.int8], Floats | Groups, Floats | Groups | None]

CHUNK_BYTES = 1 << 20
UNSIGNED = tuple(range(16))
SIGNED = tuple(range(-8, 8))
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class Blocks:
    """What blocks of a quantised type are: `decode` makes integers, scales and offsets of their bytes."""

    format: WeightFormat
    decode: Callable[[Bytes], Decoded]


def _half(b: Bytes, at: int) -> NDArray[np.float32]:
    """The fp16 at byte `at` of each block: [blocks, 1]."""
    return np.ascontiguousarray(b[:, at : at + 2]).view("<f2").astype(np.float32)


def _halves(b: Bytes) -> Bytes:
    """Low nibbles of each run of bytes, then its high ones, along the last axis."""
    return np.concatenate([b & 15, b >> 4], axis=-1)


def _fifth(b: Bytes, at: int) -> Bytes:
    return np.unpackbits(b[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(b: Bytes) -> Decoded:
    return _halves(b[:, 2:]).astype(np.int8) - np.int8(8), _half(b, 0), None


def _q4_1(b: Bytes) -> Decoded:
    return _halves(b[:, 4:]).astype(np.int8), _half(b, 0), _half(b, 2)


def _q5_0(b: Bytes) -> Decoded:
    return (_halves(b[:, 6:]) | _fifth(b, 2)).astype(np.int8) - np.int8(16), _half(b, 0), None


def _q5_1(b: Bytes) -> Decoded:
    return (_halves(b[:, 8:]) | _fifth(b, 4)).astype(np.int8), _half(b, 0), _half(b, 2)


def _q8_0(b: Bytes) -> Decoded:
    return b[:, 2:].view(np.int8), _half(b, 0), None


def _two_bits(b: Bytes) -> Bytes:
    """2-bit fields: runs of 32 bytes, each four rows of 32 elements from the lowest bits up."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return ((b.reshape(len(b), -1, 1, 32) >> shifts) & np.uint8(3)).reshape(len(b), -1)


def _q2_k(b: Bytes) -> Decoded:
    scales, mins = (b[:, :16] & 15).astype(np.float32), (b[:, :16] >> 4).astype(np.float32)
    codes = _two_bits(b[:, 16:80]).astype(np.int8)
    return codes, Groups(_half(b, 80), scales), Groups(-_half(b, 82), mins)


def _q3_k(b: Bytes) -> Decoded:
    bits = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = (_two_bits(b[:, 32:96]) | bits.reshape(len(b), -1) << 2).astype(np.int8) - np.int8(4)
    upper = (b[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    scales = _halves(b[:, 96:104]) | upper.reshape(len(b), 16) << 4
    return codes, Groups(_half(b, 108), scales.astype(np.float32) - 32), None


def _k_scales(b: Bytes) -> tuple[Groups, Groups]:
    s = b[:, 4:16]
    scales = np.concatenate([s[:, :4] & 63, (s[:, 8:] & 15) | (s[:, :4] >> 6) << 4], axis=1)
    mins = np.concatenate([s[:, 4:8] & 63, (s[:, 8:] >> 4) | (s[:, 4:8] >> 6) << 4], axis=1)
    return (
        Groups(_half(b, 0), scales.astype(np.float32)),
        Groups(-_half(b, 2), mins.astype(np.float32)),
    )


def _q4_k(b: Bytes) -> Decoded:
    codes = _halves(b[:, 16:].reshape(len(b), 4, 32)).reshape(len(b), 256)
    return (codes.astype(np.int8), *_k_scales(b))


def _q5_k(b: Bytes) -> Decoded:
    bits = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    low = _halves(b[:, 48:].reshape(len(b), 4, 32)).reshape(len(b), 256)
    return ((low | bits.reshape(len(b), 256) << 4).astype(np.int8), *_k_scales(b))


def _q6_k(b: Bytes) -> Decoded:
    low = _halves(b[:, :128].reshape(len(b), 2, 64)).reshape(len(b), 256)
    codes = (low | _two_bits(b[:, 128:192]) << 4).astype(np.int8) - np.int8(32)
    return codes, Groups(_half(b, 208), b[:, 192:208].view(np.int8).astype(np.float32)), None


def _iq4_nl(b: Bytes) -> Decoded:
    return np.array(NORMAL_LEVELS, np.int8)[_halves(b[:, 2:])], _half(b, 0), None


def _iq4_xs(b: Bytes) -> Decoded:
    low = np.stack([b[:, 4:8] & 15, b[:, 4:8] >> 4], axis=-1).reshape(len(b), 8)
    high = (b[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    scales = (low | high.reshape(len(b), 8) << 4).astype(np.float32) - 32
    codes = _halves(b[:, 8:].reshape(len(b), 8, 16)).reshape(len(b), 256)
    return np.array(NORMAL_LEVELS, np.int8)[codes], Groups(_half(b, 0), scales), None


def _mxfp4(b: Bytes) -> Decoded:
    e = b[:, :1].astype(np.uint32)
    half = np.where(e < 2, np.uint32(0x200000) << np.minimum(e, 1), (np.maximum(e, 1) - 1) << 23)
    return (
        np.array(E2M1_DOUBLED, np.int8)[_halves(b[:, 1:])],
        half.astype(np.uint32).view("f4"),
        None,
    )


def _four(group: int, levels: tuple[int, ...], has_min: bool = False) -> WeightFormat:
    return WeightFormat(4, group, has_min, levels)


BLOCKS = {
    "Q4_0": Blocks(_four(32, SIGNED), _q4_0),
    "Q4_1": Blocks(_four(32, UNSIGNED, True), _q4_1),
    "Q5_0": Blocks(WeightFormat(8, 32), _q5_0),
    "Q5_1": Blocks(WeightFormat(8, 32, True), _q5_1),
    "Q8_0": Blocks(WeightFormat(8, 32), _q8_0),
    "Q2_K": Blocks(_four(16, UNSIGNED, True), _q2_k),
    "Q3_K": Blocks(_four(16, SIGNED), _q3_k),
    "Q4_K": Blocks(_four(32, UNSIGNED, True), _q4_k),
    "Q5_K": Blocks(WeightFormat(8, 32, True), _q5_k),
    "Q6_K": Blocks(WeightFormat(8, 16), _q6_k),
    "IQ4_NL": Blocks(_four(32, NORMAL_LEVELS), _iq4_nl),
    "IQ4_XS": Blocks(_four(32, NORMAL_LEVELS), _iq4_xs),
    "MXFP4": Blocks(_four(32, E2M1_DOUBLED), _mxfp4),
}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def decode_rows(kind: TensorType, rows: Bytes, dtype: torch.dtype) -> Tensor | QuantizedWeight:
    """Rows of bytes [out, row_bytes], contiguous, as a float tensor or a weight computed in `dtype`.

    A float tensor has the type that is stored; it shares the memory of `rows`.
    """
    blocks = BLOCKS.get(kind.name)
    if blocks is None:
        return torch.from_numpy(rows).view(FLOATS[kind.name])
    num_rows, row_bytes = rows.shape
    width = row_bytes // kind.num_bytes * kind.width
    groups = (num_rows, width // blocks.format.group_size)
    codes = np.empty((num_rows, width), np.int8)
    values = [np.empty(groups, np.float32) for _ in range(2 if blocks.format.has_min else 1)]
    factors = np.empty((num_rows, len(values), width // kind.width), np.float16)
    has_factors = False

    def decode(start: int, end: int) -> None:
        nonlocal has_factors
        part = slice(start, end)
        q, *decoded = blocks.decode(rows[part].reshape(-1, kind.num_bytes))
        codes[part] = q.reshape(-1, width)
        for index, of_groups in enumerate(decoded):
            if isinstance(of_groups, Groups):
                has_factors = True
                factors[part, index] = of_groups.factor.reshape(-1, factors.shape[2])
                values[index][part] = of_groups.values.reshape(-1, groups[1])
            elif of_groups is not None:
                values[index][part] = of_groups.reshape(-1, groups[1])

    for_blocks(decode, num_rows, max(1, CHUNK_BYTES // max(1, row_bytes)))
    scales, *mins = map(torch.from_numpy, values)
    return QuantizedWeight(
        blocks.format,
        torch.from_numpy(codes),
        scales,
        mins[0] if mins else None,
        dtype,
        torch.from_numpy(factors) if has_factors else None,
    )
