"""What the tree compares: packed atoms inside a namespace."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from ramify.errors import InvalidKeyError

ATOM_BYTES = 4  # one int32 per token


def pack(tokens: Iterable[int]) -> bytes:
    """Token ids as native int32 bytes, the form in which the tree keeps and compares them.

    Raises:
        InvalidKeyError: an id does not fit in an int32, or is negative.
    """
    try:
        packed = array("i", tokens)
    except (OverflowError, TypeError) as error:
        raise InvalidKeyError(f"token ids must be integers in 0..{2**31 - 1}: {error}") from None
    if packed and min(packed) < 0:
        raise InvalidKeyError(f"token id {min(packed)} is negative; ids are in 0..{2**31 - 1}")
    return packed.tobytes()


def namespace_of(**parts: str | bytes | int) -> bytes:
    """One namespace from named parts (model, weights epoch, K/V dtype, adapter, tenant, salt).

    Every part is framed by its type and length, so that no two different sets of parts give
    the same bytes; the order in which they are named does not matter.

    Raises:
        InvalidKeyError: a part is none of str, bytes and int (a bool is not an int here).
    """
    kinds = {str: b"s", bytes: b"b", int: b"i"}
    framed = bytearray()
    for name in sorted(parts):
        value = parts[name]
        kind = kinds.get(type(value))
        if kind is None:
            raise InvalidKeyError(f"{name}={value!r} is no namespace part; use a str, bytes or int")
        raw = value if isinstance(value, bytes) else str(value).encode()
        for piece in (name.encode(), raw):
            framed += len(piece).to_bytes(4, "big") + piece
        framed += kind
    return bytes(framed)


@dataclass(frozen=True, slots=True)
class CacheKey:
    """A sequence of atoms in a namespace; nothing is ever shared between namespaces.

    Args:
        atoms: token ids, or their packed int32 bytes.
        namespace: any string or bytes; `namespace_of` builds one from parts.

    Raises:
        InvalidKeyError: an id is negative or wider than an int32, or the bytes are no whole atoms.
    """

    atoms: bytes
    namespace: bytes = b""

    def __init__(self, atoms: bytes | Iterable[int], namespace: str | bytes = b"") -> None:
        packed = bytes(atoms) if isinstance(atoms, bytes | bytearray) else pack(atoms)
        if len(packed) % ATOM_BYTES:
            raise InvalidKeyError(
                f"{len(packed)} bytes are no whole number of {ATOM_BYTES}-byte atoms"
            )
        if not isinstance(namespace, str | bytes):
            raise InvalidKeyError(f"namespace={namespace!r} but it must be a string or bytes")
        raw = namespace.encode() if isinstance(namespace, str) else namespace
        object.__setattr__(self, "atoms", packed)
        object.__setattr__(self, "namespace", raw)

    def __len__(self) -> int:
        return len(self.atoms) // ATOM_BYTES

    def num_pages(self, page_size: int) -> int:
        """How many whole pages the atoms fill."""
        return len(self) // page_size

    def prefix(self, num_tokens: int) -> CacheKey:
        """The first `num_tokens` atoms, in the same namespace."""
        return CacheKey(self.atoms[: num_tokens * ATOM_BYTES], self.namespace)

    def page_hashes(self, page_size: int) -> list[bytes]:
        """A 16-byte name for each whole page and everything before it, for external stores.

        BLAKE2b over the previous page's hash and this page's atoms as little-endian int32, keyed
        with the namespace's own hash: the same in every process.
        """
        atoms = self.tokens()
        if sys.byteorder == "big":
            atoms.byteswap()
        raw, step = atoms.tobytes(), page_size * ATOM_BYTES
        key = hashlib.blake2b(self.namespace, digest_size=32).digest()
        hashes, last = list[bytes](), b""
        for start in range(0, len(raw) - step + 1, step):
            page = raw[start : start + step]
            last = hashlib.blake2b(last + page, digest_size=16, key=key).digest()
            hashes.append(last)
        return hashes

    def tokens(self) -> array[int]:
        """The atoms as integers."""
        return array("i", self.atoms)


def common_pages(one: bytes, other: bytes, page_bytes: int, start: int = 0) -> int:
    """Whole pages that two packed sequences share from byte `start` on, which both have.

    Compares slices (each a memcmp) and halves the range when they differ, so that the cost is
    that of a few memcmps however long the sequences are.
    """
    low, high = 0, (min(len(one), len(other)) - start) // page_bytes
    if one[start : start + high * page_bytes] == other[start : start + high * page_bytes]:
        return high
    high -= 1  # invariant: the first `low` pages agree, the first `high + 1` do not
    while low < high:
        middle = (low + high + 1) // 2
        begin, end = start + low * page_bytes, start + middle * page_bytes
        if one[begin:end] == other[begin:end]:
            low = middle
        else:
            high = middle - 1
    return low
