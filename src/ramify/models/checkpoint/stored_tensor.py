"""`StoredTensor`: a tensor of a safetensors file, read by plain reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ramify.errors import CheckpointError, shortened
from ramify.models.checkpoint.find import INDEX
from ramify.models.checkpoint.safetensors_files import opened, weight_files
from ramify.reasons import reason_of

# As safetensors names them.
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Place, shape and type of a tensor in a file.

    It is not mapped: pages of a mapped file count as the process's memory, and a file that shrinks
    while it is mapped ends the process.
    """

    file: Path
    name: str  # in the file
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int

    def read(self) -> Tensor:
        """The tensor as it is in the file.

        Raises:
            CheckpointError: the file has become shorter, or the type is unknown.
        """
        return self._read(self.shape, [(self.offset, self.num_bytes)])

    def read_part(self, index: int) -> Tensor:
        """`self.read()[index]`; reads no more of the file."""
        num_bytes = self.num_bytes // self.shape[0]
        return self._read(self.shape[1:], [(self.offset + index * num_bytes, num_bytes)])

    def read_ranges(self, axis: int, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """These rows (axis 0) or columns (axis 1), one range after the other; reads no more of the file."""
        size = sum(end - begin for begin, end in ranges)
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        width = self.num_bytes // max(1, prod(self.shape[: axis + 1]))  # bytes of a row, or column
        spans = [
            (self.offset + (row * self.shape[axis] + begin) * width, (end - begin) * width)
            for row in range(prod(self.shape[:axis]))
            for begin, end in ranges
        ]
        return self._read(shape, spans)

    def _read(self, shape: tuple[int, ...], spans: Sequence[tuple[int, int]]) -> Tensor:
        """The bytes of spans (offset in the file, length), one after the other, as a tensor."""
        dtype, num_bytes = DTYPES.get(self.dtype), sum(length for _, length in spans)
        if dtype is None or dtype.itemsize * prod(shape) != num_bytes:
            raise CheckpointError(
                f"{self.file}: tensor {shortened(self.name)} has the type {self.dtype}, which is not read; "
                "use the original checkpoint"
            )
        data = torch.empty(num_bytes, dtype=torch.uint8)
        rest = data.numpy().data
        try:
            with self.file.open("rb", buffering=0) as file:
                for offset, length in spans:
                    file.seek(offset)
                    span, rest = rest[:length], rest[length:]
                    while span:
                        count = file.readinto(span)
                        if not count:
                            raise EOFError(f"it ends inside the tensor {shortened(self.name)}")
                        span = span[count:]
        except (OSError, EOFError) as error:
            raise CheckpointError(
                f"{self.file} is corrupt or truncated ({reason_of(error, self.file)}); download it again"
            ) from error
        return data.view(dtype).view(shape)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """All tensors in a checkpoint's files by the names that they have there; reads headers only.

    Raises:
        CheckpointError: files are missing, truncated or damaged, or lack tensors that the index promises.
    """
    stored: dict[str, StoredTensor] = {}
    for file, promised in weight_files(path).items():
        tensors = _tensors_of(file)
        for name in sorted(promised - tensors.keys()):
            raise CheckpointError(
                f"{file} lacks the tensor {shortened(name)} that {INDEX} promises; download both again"
            )
        stored |= tensors
    return stored


def _tensors_of(file: Path) -> dict[str, StoredTensor]:
    """Of one file, by name; the header is checked by safetensors, which does not tell offsets."""
    with opened(file):
        pass
    try:
        with file.open("rb") as opened_file:
            header_bytes = int.from_bytes(opened_file.read(8), "little")
            header: dict[str, Any] = json.loads(opened_file.read(header_bytes))
        start, tensors = 8 + header_bytes, dict[str, StoredTensor]()
        header.pop("__metadata__", None)
        for name in sorted(header):
            entry = header[name]
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            tensors[name] = StoredTensor(
                file, name, entry["dtype"], shape, start + begin, end - begin
            )
    # Where Python reads JSON in another way than safetensors.
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{file} is corrupt or truncated ({reason_of(error, file)}); download it again"
        ) from error
    return tensors
