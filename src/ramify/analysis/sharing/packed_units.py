"""Token ids, or hashes of blocks, as packed 64-bit units that compare as bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from ramify.errors import InvalidKeyError

UNIT_BYTES = 8


def pack_units(units: Iterable[int]) -> bytes:
    """A copy of the units, 8 native bytes each.

    Raises:
        InvalidKeyError: a unit is no integer, negative, or wider than 64 bits.
    """
    if isinstance(units, np.ndarray):
        if units.dtype.kind not in "iu":
            raise InvalidKeyError(f"an array of {units.dtype} holds no token ids; use integers")
        if units.dtype.kind == "i" and units.size and units.min() < 0:
            raise InvalidKeyError(f"token id {units.min()} is negative; ids are in 0..{2**64 - 1}")
        return units.astype(np.uint64).tobytes()
    if isinstance(units, str | bytes | bytearray | set | frozenset | dict):
        raise InvalidKeyError(f"a {type(units).__name__} is not a sequence of token ids")
    try:
        return array("Q", units).tobytes()
    except (OverflowError, TypeError) as error:
        raise InvalidKeyError(f"token ids must be integers in 0..{2**64 - 1}: {error}") from None


def unpack_units(packed: bytes) -> list[int]:
    """The units of packed bytes."""
    return array("Q", packed).tolist()
