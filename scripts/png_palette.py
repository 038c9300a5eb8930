"""PNG with a palette of 256 colours: a third of the size of a screenshot in true colour."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

MAX_COLOURS = 256


def palette_png(rgb: NDArray[np.uint8]) -> bytes:
    """Encode an image with its most frequent colours, each other colour as the nearest of these.

    Args:
        rgb: [height, width, 3].
    """
    height, width, _ = rgb.shape
    colours, where, counts = np.unique(
        rgb.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True
    )
    frequent = np.argsort(-counts)[:MAX_COLOURS]
    palette = colours[frequent]
    distances = ((colours[:, None].astype(int) - palette[None].astype(int)) ** 2).sum(axis=2)
    pixels = distances.argmin(axis=1).astype(np.uint8)[where.reshape(-1)].reshape(height, width)
    rows = np.zeros((height, width + 1), np.uint8)  # a row begins with its filter: 0, none
    rows[:, 1:] = pixels
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            _chunk(b"PLTE", palette.astype(np.uint8).tobytes()),
            _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
