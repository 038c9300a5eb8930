"""A safetensors file as numpy arrays, for engines whose environments have no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def read_weights(path: Path) -> dict[str, Any]:
    """Tensors by name: float32, or uint16 where the file has bfloat16. Read-only."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    data = np.memmap(path, np.uint8, "r", offset=8 + length)
    kinds = {"F32": np.float32, "BF16": np.uint16}
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors[name] = data[begin:end].view(kinds[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def as_float32(values: Any) -> Any:
    """Convert to float32 without loss; a bfloat16 value is the upper half of a float32."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(values)
