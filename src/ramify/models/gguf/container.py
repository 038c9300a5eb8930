"""The GGUF container: metadata and tensor infos, each bound checked against the file's size."""

from __future__ import annotations

import math
import os
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from ramify.errors import CheckpointError
from ramify.models.gguf.blocks import TYPES, BlockType

SCALARS = dict(enumerate(["u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"]))
SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9
MAX_STRING_BYTES = MAX_ARRAY = 1 << 30
MAX_DIMS = MAX_DEPTH = 4
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `shape` slowest dimension first, `start` from the file's first byte."""

    path: Path
    kind: BlockType
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) // self.kind.width * self.kind.num_bytes

    def read(self) -> NDArray[np.uint8]:
        """The bytes of its rows: [all dimensions but the last, row_bytes]."""
        data = np.empty(self.num_bytes, np.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            filled = 0
            while filled < len(data):
                num_read = file.readinto(memoryview(data)[filled:])
                if not num_read:
                    raise CheckpointError(
                        f"{self.path}: expected {len(data)} bytes of a tensor at byte "
                        f"{self.start}, found {filled}; download it again"
                    )
                filled += num_read
        return data.reshape(-1, self.shape[-1] // self.kind.width * self.kind.num_bytes)


@dataclass(frozen=True, slots=True)
class Container:
    """Metadata of the first part, and the tensors of all parts by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Reader:
    """Reads fields in order; refuses each that needs more bytes than are left."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.at = 0

    def refuse(self, field: str, expected: object, actual: object) -> NoReturn:
        raise CheckpointError(
            f"{self.path}: {field}: expected {expected}, found {actual}; download it again"
        )

    def need(self, num_bytes: int, field: str) -> None:
        if num_bytes > self.size - self.at:
            self.refuse(field, f"{num_bytes} bytes or more", f"{self.size - self.at} to the end")

    def take(self, num_bytes: int, field: str) -> bytes:
        self.need(num_bytes, field)
        data = self.file.read(num_bytes)
        if len(data) != num_bytes:
            self.refuse(field, f"{num_bytes} bytes", len(data))
        self.at += num_bytes
        return data

    def integer(self, code: str, field: str) -> int:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize(code), field))
        return int(value)

    def string(self, field: str) -> str:
        length = self.integer("Q", f"length of {field}")
        if length > MAX_STRING_BYTES:
            self.refuse(f"length of {field}", f"at most {MAX_STRING_BYTES}", length)
        return self.take(length, field).decode("utf-8", "replace")

    def value(self, kind: int, field: str, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string(field)
        if kind in SCALARS:
            dtype = np.dtype(SCALARS[kind])
            return np.frombuffer(self.take(dtype.itemsize, field), dtype)[0].item()
        if kind != ARRAY or depth == MAX_DEPTH:
            self.refuse(f"value type of {field}", "0 to 12, nested at most 4 deep", kind)
        element, count = self.integer("I", field), self.integer("Q", f"count of {field}")
        if count > MAX_ARRAY:
            self.refuse(f"count of {field}", f"at most {MAX_ARRAY}", count)
        if element in SCALARS:
            dtype = np.dtype(SCALARS[element])
            return np.frombuffer(self.take(count * dtype.itemsize, field), dtype)
        self.need(count * (8 if element == STRING else 12), field)
        return [self.value(element, field, depth + 1) for _ in range(count)]


def read_container(path: Path) -> Container:
    """Read the header of a file, or of all parts if its name is that of a part.

    Raises:
        CheckpointError: a part is missing, or a field is not possible; names the field.
    """
    match = PART.search(path.name)
    if match is None:
        return _read_part(path)
    stem, count = path.name[: match.start()], int(match[2])
    merged = Container({}, {})
    for number in range(1, count + 1):
        part_path = path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf")
        part = _read_part(part_path)
        split = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if split != (number - 1, count):
            raise CheckpointError(
                f"{part_path}: split.no, split.count: expected {(number - 1, count)}, found {split}"
            )
        for name, info in part.tensors.items():
            if name in merged.tensors:
                raise CheckpointError(f"{part_path}: tensor {name!r} is in an earlier part too")
            merged.tensors[name] = info
        if number == 1:
            merged.metadata.update(part.metadata)
    total = merged.metadata.get("split.tensors.count", len(merged.tensors))
    if total != len(merged.tensors):
        raise CheckpointError(
            f"{path}: split.tensors.count: expected {total}, found {len(merged.tensors)}"
        )
    return merged


def _read_part(path: Path) -> Container:
    try:
        with path.open("rb", buffering=1 << 20) as file:
            return _read_fields(_Reader(path, file))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _read_fields(reader: _Reader) -> Container:
    magic = reader.take(4, "magic")
    if magic != b"GGUF":
        reader.refuse("magic", b"GGUF", magic)
    version = reader.integer("I", "version")
    if version not in (2, 3):
        big = version in (2 << 24, 3 << 24)
        reader.refuse("version", "2 or 3", "a big-endian file" if big else version)
    num_tensors = reader.integer("Q", "tensor count")
    num_keys = reader.integer("Q", "key count")
    reader.need(num_tensors * 32 + num_keys * 13, "tensor count and key count")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.string("key")
        if key in metadata:
            reader.refuse("key", "each name once", repr(key))
        metadata[key] = reader.value(reader.integer("I", f"value type of {key!r}"), repr(key))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        reader.refuse("general.alignment", "a power of two", alignment)
    tensors: dict[str, TensorInfo] = {}
    end = 0
    for _ in range(num_tensors):
        name = reader.string("name of a tensor")
        if name in tensors:
            reader.refuse("name of a tensor", "each name once", repr(name))
        info = _read_info(reader, name)
        if info.start != end:
            reader.refuse(f"offset of {name!r}", end, info.start)
        tensors[name] = info
        end += -(-info.num_bytes // alignment) * alignment
    base = -(-reader.at // alignment) * alignment
    for name, info in tensors.items():
        stop = base + info.start + info.num_bytes
        if stop > reader.size:
            reader.refuse(f"end of the data of {name!r}", f"byte {stop}", f"{reader.size} bytes")
        tensors[name] = replace(info, start=base + info.start)
    return Container(metadata, tensors)


def _read_info(reader: _Reader, name: str) -> TensorInfo:
    num_dims = reader.integer("I", f"dimensions of {name!r}")
    if not 1 <= num_dims <= MAX_DIMS:
        reader.refuse(f"dimensions of {name!r}", f"1 to {MAX_DIMS}", num_dims)
    dims = [reader.integer("Q", f"shape of {name!r}") for _ in range(num_dims)]
    if min(dims) < 1 or math.prod(dims) >= 1 << 63:
        reader.refuse(f"shape of {name!r}", "positive sizes, product below 2**63", dims)
    number = reader.integer("I", f"type of {name!r}")
    if number not in TYPES:
        known = ", ".join(kind.name for kind in TYPES.values())
        reader.refuse(f"type of {name!r}", known, f"type {number}")
    kind = TYPES[number]
    if dims[0] % kind.width:
        reader.refuse(f"row of {name!r}", f"a multiple of {kind.width} ({kind.name})", dims[0])
    offset = reader.integer("Q", f"offset of {name!r}")
    return TensorInfo(reader.path, kind, tuple(reversed(dims)), offset)
