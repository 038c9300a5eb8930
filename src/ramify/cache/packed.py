"""Compare and slice packed atoms (int32 token ids): the inner loops of the tree."""

from __future__ import annotations

from typing import Final

ATOM_BYTES: Final = 4  # one int32 per token
MIN_VIEW_BYTES: Final = 1 << 12  # below this, a copy is as fast as a memoryview


def common_pages(first: bytes, second: bytes, page_bytes: int, start: int = 0) -> int:
    """Length in whole pages of the common prefix of `first[start:]` and `second[start:]`."""
    return shared_pages(first, start, memoryview(second)[start:], page_bytes)


def shared_pages(atoms: bytes, position: int, edge: bytes | memoryview, page_bytes: int) -> int:
    """Length in whole pages of the common prefix of `atoms[position:]` and `edge`.

    Binary search for the first page that differs; compares each byte twice at most, copies none.
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
    """`atoms[begin:end]` to store, as a view or a copy.

    A view is at least `MIN_VIEW_BYTES` long and 3/4 of the buffer that it keeps alive.
    """
    count = end - begin
    if count >= MIN_VIEW_BYTES:
        if isinstance(atoms, bytes):
            if 3 * len(atoms) <= 4 * count < 4 * len(atoms):
                return memoryview(atoms)[begin:end]
        elif 3 * len(atoms.obj) <= 4 * count:  # type: ignore[arg-type]  # it is bytes
            return atoms[begin:end]
    return bytes(atoms[begin:end])
