"""Packed atoms compared and cut: the inner loops of the tree."""

from __future__ import annotations

from typing import Final

ATOM_BYTES: Final = 4  # one int32 per token
MIN_VIEW_BYTES: Final = 1 << 12  # what is shorter is copied: no slower than to make a view


def common_pages(one: bytes, other: bytes, page_bytes: int, start: int = 0) -> int:
    """Whole pages that `one` from byte `start` on shares with `other` from byte `start` on."""
    return shared_pages(one, start, memoryview(other)[start:], page_bytes)


def shared_pages(atoms: bytes, position: int, edge: bytes | memoryview, page_bytes: int) -> int:
    """Whole pages that `atoms` from byte `position` on share with the beginning of `edge`.

    Halves the range until it is one page: in all, a memcmp of at most twice the shared part, and
    nothing is copied.
    """
    low, high = 0, max(0, min(len(atoms) - position, len(edge))) // page_bytes * page_bytes
    view = memoryview(edge)
    if atoms.startswith(view[:high], position):
        return high // page_bytes
    two_pages = 2 * page_bytes  # invariant: the first `low` bytes agree, the first `high` do not
    while half := (high - low) // two_pages * page_bytes:
        middle = low + half
        if atoms.startswith(view[low:middle], position + low):
            low = middle
        else:
            high = middle
    return low // page_bytes


def piece(atoms: bytes | memoryview, begin: int, end: int) -> bytes | memoryview:
    """Bytes `begin` to `end`, to be kept: a view of what they are a part of, or a copy.

    A view is never less than three quarters of the buffer that it keeps alive.
    """
    count = end - begin
    if count >= MIN_VIEW_BYTES:
        if isinstance(atoms, bytes):
            if 3 * len(atoms) <= 4 * count < 4 * len(atoms):
                return memoryview(atoms)[begin:end]
        elif 3 * len(atoms.obj) <= 4 * count:  # type: ignore[arg-type]  # which is bytes
            return atoms[begin:end]
    return bytes(atoms[begin:end])
