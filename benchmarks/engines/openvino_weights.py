"""Weights of an OpenVINO graph as integers, in the form that its compressor, NNCF, writes.

int8: unsigned codes with a zero point and a float16 scale for each row. int4: the same of 4 bits for
each group of a row. The graph computes `(codes - zero) * scale`, which the CPU plugin recognises and
leaves packed.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

GROUPS = (128, 64, 32)  # of 4 bits: the largest that divides a row


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix as `(codes - zero) * scale`: codes [out, groups, size], the others [out, groups, 1]."""

    bits: int
    codes: Any  # uint8, also of 4 bits
    zero: Any  # uint8
    scale: Any  # float16

    @property
    def num_bytes(self) -> int:
        """Of codes, zero points and scales, packed."""
        num_codes = int(self.codes.size + self.zero.size)
        return num_codes * self.bits // 8 + int(self.scale.nbytes)

    def values(self) -> Any:
        """The matrix [out, in] in float32."""
        codes, zero = self.codes.astype(np.float32), self.zero.astype(np.float32)
        return ((codes - zero) * self.scale.astype(np.float32)).reshape(len(codes), -1)


def encode(weight: Any, bits: int) -> Codes:
    """Round a float32 matrix [out, in]: the least and the largest element of a group are representable."""
    rows, width = weight.shape
    size = width if bits == 8 else next((n for n in GROUPS if width % n == 0), width)
    grouped = weight.reshape(rows, width // size, size)
    levels = (1 << bits) - 1
    low = np.minimum(grouped.min(2, keepdims=True), 0.0)
    high = np.maximum(grouped.max(2, keepdims=True), 0.0)
    scale = ((high - low) / levels).astype(np.float16)
    step = np.where(scale == 0, np.float16(1), scale).astype(np.float32)
    zero = np.clip(np.rint(-low / step), 0, levels)
    codes = np.clip(np.rint(grouped / step) + zero, 0, levels)
    return Codes(bits, codes.astype(np.uint8), zero.astype(np.uint8), scale)


def node(encoded: Codes) -> Any:
    """The subgraph that decodes a matrix to float32 [out, in]."""
    o: Any = importlib.import_module("openvino.opset13")
    rows, groups, size = encoded.codes.shape
    per_row = groups == 1
    shape = (rows, size) if per_row else (rows, groups, size)
    scale_shape = (rows, 1) if per_row else (rows, groups, 1)
    codes = o.convert(_constant(encoded.codes.reshape(shape), encoded.bits), "f16")
    zero = o.convert(_constant(encoded.zero.reshape(scale_shape), encoded.bits), "f16")
    scale = o.constant(encoded.scale.reshape(scale_shape))
    decoded = o.multiply(o.subtract(codes, zero), scale)
    if not per_row:
        decoded = o.reshape(decoded, o.constant(np.array([rows, groups * size], np.int64)), False)
    return o.convert(decoded, "f32")


def _constant(codes: Any, bits: int) -> Any:
    """A constant of unsigned integers; of two 4-bit codes in a byte, the first has the low bits."""
    openvino: Any = importlib.import_module("openvino")
    if bits == 8:
        return openvino.op.Constant(codes)
    flat = codes.reshape(-1)
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    packed = flat[::2] | flat[1::2] << 4
    tensor = openvino.Tensor(packed, openvino.Shape(list(codes.shape)), openvino.Type.u4)
    return openvino.op.Constant(tensor)
