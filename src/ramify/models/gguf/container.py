"""The GGUF container: metadata and tensor infos, each bound checked against the file's size. No torch."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from ramify.errors import CheckpointError, UnsupportedModelError, shortened
from ramify.models.configs.checkpoint_files import check_checkpoint_file
from ramify.models.gguf.tensor_types import OTHER_TYPES, TENSOR_TYPES, TensorType
from ramify.reasons import reason_of

SUFFIX, MAGIC = ".gguf", b"GGUF"
# of the names of files in a directory
ANY_CASE = "*.[gG][gG][uU][fF]"
SCALARS = dict(enumerate(["u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"]))
SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
STRING, ARRAY = 8, 9
MAX_STRING_BYTES = MAX_ARRAY = 1 << 30
MAX_DIMS = MAX_DEPTH = 4
READ_BYTES = 1 << 20
PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `shape` slowest dimension first, `start` from the file's first byte."""

    path: Path
    kind: TensorType
    shape: tuple[int, ...]
    start: int

    @property
    def num_rows(self) -> int:
        """Runs of elements along the last dimension: 1 for a vector."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the file."""
        return self.shape[-1] // self.kind.width * self.kind.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.num_rows * self.row_bytes

    def read_rows(self, first: int = 0, num_rows: int | None = None) -> NDArray[np.uint8]:
        """Read the bytes of some rows, by default of all: [num_rows, row_bytes].

        Raises:
            CheckpointError: the file has become shorter, or cannot be read.
        """
        num_rows = self.num_rows - first if num_rows is None else num_rows
        assert 0 <= first <= first + num_rows <= self.num_rows
        data = np.empty(num_rows * self.row_bytes, np.uint8)
        start, filled = self.start + first * self.row_bytes, 0
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(start)
                while filled < len(data):
                    num_read = file.readinto(data.data[filled:])
                    if not num_read:
                        break
                    filled += num_read
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read: {reason_of(error, self.path)}"
            ) from error
        if filled < len(data):
            raise CheckpointError(
                f"{self.path}: expected {len(data)} bytes of a tensor at byte {start}, found {filled}; "
                "download it again"
            )
        return data.reshape(num_rows, self.row_bytes)


@dataclass(frozen=True, slots=True)
class StringArray:
    """An array of strings as its bytes, decoded when it is iterated over: most are never asked for."""

    data: bytes  # each string behind its length
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        at, data = 0, self.data
        for _ in range(self.count):
            (length,) = LENGTH.unpack_from(data, at)
            at += 8 + length
            yield data[at - length : at].decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Container:
    """Metadata of the first part, the tensors of all parts by name, and the files.

    Numbers, texts and truth values are Python's; arrays are numpy's, of strings `StringArray`, of arrays
    lists.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]

    @property
    def path(self) -> Path:
        """The first file, for messages."""
        return self.files[0]


class _Reader:
    """Reads fields in order; refuses each that needs more bytes than are left."""

    def __init__(self, path: Path, file: BinaryIO, num_bytes: int) -> None:
        self.path, self.file = path, file
        self.size = num_bytes
        self.at = 0
        self._data = bytearray()  # the file's first bytes, as many as were needed

    def refuse(self, field: str, expected: object, actual: object) -> NoReturn:
        raise CheckpointError(
            f"{self.path}: {shortened(field)}: expected {expected}, found {shortened(str(actual))}; "
            "download it again"
        )

    def need(self, num_bytes: int, field: str) -> None:
        if num_bytes > self.size - self.at:
            self.refuse(field, f"{num_bytes} bytes or more", f"{self.size - self.at} to the end")

    def _buffer(self, end: int, field: str) -> None:
        """Read on, until the file's first `end` bytes are there."""
        while len(self._data) < end:
            wanted = max(end - len(self._data), READ_BYTES)
            data = self.file.read(min(wanted, self.size - len(self._data)))
            if not data:
                self.refuse(field, f"{end} bytes", len(self._data))
            self._data += data

    def take(self, num_bytes: int, field: str) -> bytes:
        self.need(num_bytes, field)
        start, self.at = self.at, self.at + num_bytes
        self._buffer(self.at, field)
        return bytes(memoryview(self._data)[start : self.at])

    def integer(self, code: str, field: str) -> int:
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize(code), field))
        return int(value)

    def string(self, field: str) -> str:
        length = self.integer("Q", f"length of {field}")
        if length > MAX_STRING_BYTES:
            self.refuse(f"length of {field}", f"at most {MAX_STRING_BYTES}", length)
        return self.take(length, field).decode("utf-8", "replace")

    def strings(self, count: int, field: str) -> StringArray:
        self.need(count * 8, field)
        start = at = self.at
        available, unpack = len(self._data), LENGTH.unpack_from
        for _ in range(count):
            if at + 8 > available:
                self.at = at
                self.need(8, field)
                self._buffer(at + 8, field)
                available = len(self._data)
            (length,) = unpack(self._data, at)
            at += 8 + length
            if length > MAX_STRING_BYTES or at > self.size:
                self.at = at - length
                limit = min(MAX_STRING_BYTES, self.size - self.at)
                self.refuse(f"length of a string of {field}", f"at most {limit}", length)
        self.at = start
        return StringArray(self.take(at - start, field), count)

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
        if element == STRING:
            return self.strings(count, field)
        self.need(count * 12, field)
        return [self.value(element, field, depth + 1) for _ in range(count)]


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file: by its name, or, without such a suffix, by its first bytes."""
    if path.suffix.lower() == SUFFIX:
        return True
    # Names that no file can have, and pipes, are not opened.
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_container(path: Path) -> Container:
    """Read the header of a file, or of all parts if its name is that of a part.

    Raises:
        CheckpointError: a part is missing, or a field is not possible; names the field.
        UnsupportedModelError: a tensor has a type that is not read.
    """
    paths = part_paths(path)
    merged = Container({}, {}, paths)
    for number, part_path in enumerate(paths):
        part = _read_part(part_path)
        split = (_count(part, "split.no", 0), _count(part, "split.count", 1))
        # Writers of single files may say that they have no parts.
        if split != (number, len(paths)) and (len(paths) > 1 or split != (0, 0)):
            raise CheckpointError(
                f"{part_path}: split.no, split.count: expected {(number, len(paths))} by its name, found "
                f"{split}; give parts the names that they were made with (…-00001-of-0000N.gguf)"
            )
        for name, info in part.tensors.items():
            if name in merged.tensors:
                raise CheckpointError(
                    f"{part_path}: tensor {shortened(name)} is in an earlier part too; download all "
                    f"{len(paths)} parts again"
                )
            merged.tensors[name] = info
        if number == 0:
            merged.metadata.update(part.metadata)
    total = _count(merged, "split.tensors.count", len(merged.tensors))
    if len(paths) > 1 and total != len(merged.tensors):
        raise CheckpointError(
            f"{path}: split.tensors.count: expected {total}, found {len(merged.tensors)}; download all "
            f"{len(paths)} parts again"
        )
    return merged


def model_name(path: Path) -> str:
    """The name of a model by that of its file, any part of it, or its directory: without number and suffix."""
    name = PART.sub("", path.name)
    return path.stem if name == path.name and path.suffix.lower() == SUFFIX else name


def part_paths(path: Path) -> tuple[Path, ...]:
    """The files of a model by the name of any of its parts, in their order.

    Raises:
        CheckpointError: the name is that of no possible part, or a part is missing.
    """
    match = PART.search(path.name)
    if match is None:
        return (path,)
    stem, number, count = path.name[: match.start()], int(match[1]), int(match[2])
    if not 1 <= number <= count:
        raise CheckpointError(
            f"{path}: part {number} of {count} by its name; expected 1 to {count or 'the number of parts'}"
        )
    paths = tuple(
        path.with_name(f"{stem}-{part:05}-of-{count:05}{path.suffix}")
        for part in range(1, count + 1)
    )
    absent = [part.name for part in paths if not part.is_file()]
    if absent:
        raise CheckpointError(
            f"{path}: {len(absent)} of {count} parts are missing, the first is {absent[0]}; put all parts "
            "into one directory"
        )
    return paths


def _count(container: Container, key: str, default: int) -> int:
    value = container.metadata.get(key, default)
    if type(value) is not int:
        raise CheckpointError(
            f"{container.path}: {key}: expected an integer, found {shortened(str(value))}; download it again"
        )
    return value


def _read_part(path: Path) -> Container:
    try:
        num_bytes = check_checkpoint_file(path)
        with path.open("rb", buffering=0) as file:
            return _read_fields(_Reader(path, file, num_bytes))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason_of(error, path)}") from error


def _read_fields(reader: _Reader) -> Container:
    magic = reader.take(4, "magic")
    if magic != MAGIC:
        reader.refuse("magic", MAGIC, magic)
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
    return Container(metadata, tensors, (reader.path,))


def _read_info(reader: _Reader, name: str) -> TensorInfo:
    num_dims = reader.integer("I", f"dimensions of {name!r}")
    if not 1 <= num_dims <= MAX_DIMS:
        reader.refuse(f"dimensions of {name!r}", f"1 to {MAX_DIMS}", num_dims)
    dims = [reader.integer("Q", f"shape of {name!r}") for _ in range(num_dims)]
    if min(dims) < 1 or math.prod(dims) >= 1 << 63:
        reader.refuse(f"shape of {name!r}", "positive sizes, product below 2**63", dims)
    number = reader.integer("I", f"type of {name!r}")
    if number in OTHER_TYPES:
        raise UnsupportedModelError(
            f"{reader.path}: type of {name!r}: {OTHER_TYPES[number]} is not read; the types that are: "
            f"{_type_names()}; take a file of another quantisation, such as Q4_K_M"
        )
    if number not in TENSOR_TYPES:
        reader.refuse(f"type of {name!r}", _type_names(), f"type {number}")
    kind = TENSOR_TYPES[number]
    if dims[0] % kind.width:
        reader.refuse(f"row of {name!r}", f"a multiple of {kind.width} ({kind.name})", dims[0])
    offset = reader.integer("Q", f"offset of {name!r}")
    return TensorInfo(reader.path, kind, tuple(reversed(dims)), offset)


def _type_names() -> str:
    return ", ".join(kind.name for kind in TENSOR_TYPES.values())
