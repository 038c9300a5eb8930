"""`CacheKey`: packed token ids in a namespace, what the tree compares. Also chained page hashes."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ramify.cache.content_atoms import (
    ContentAtoms,
    Media,
    Salt,
    bytes_for_hash,
    place_content,
    slice_atoms,
    utf8,
    validate_media,
    zero_placeholders,
)
from ramify.cache.packed import ATOM_BYTES
from ramify.errors import InvalidKeyError

HASH_BYTES = 16  # of a page hash
_SIGN = 3 if sys.byteorder == "little" else 0  # index of the byte with the sign bit of an atom
_page_hasher = hashlib.blake2b(digest_size=HASH_BYTES)


def pack(tokens: Iterable[int]) -> bytes:
    """Token ids as native int32 bytes, the form in which the tree stores and compares them.

    Raises:
        InvalidKeyError: an id does not fit in an int32, or is negative.
    """
    return _not_negative(_packed(tokens))


def _not_negative(packed: bytes) -> bytes:
    if not packed[_SIGN::ATOM_BYTES].isascii():  # a sign bit is set somewhere
        least = min(array("i", packed))
        raise InvalidKeyError(f"token id {least} is negative; ids are in 0..{2**31 - 1}")
    return packed


def _packed(tokens: Iterable[int]) -> bytes:
    if isinstance(tokens, bytes | bytearray):
        packed = bytes(tokens)
        if len(packed) % ATOM_BYTES:
            raise InvalidKeyError(
                f"{len(packed)} bytes are no whole number of {ATOM_BYTES}-byte atoms"
            )
    elif isinstance(tokens, array | memoryview) and memoryview(tokens).format == "i":
        packed = tokens.tobytes()
    elif isinstance(tokens, set | frozenset | dict) or (
        isinstance(tokens, memoryview) and tokens.itemsize == 1
    ):
        raise InvalidKeyError(f"a {type(tokens).__name__} is not a sequence of token ids")
    else:
        try:
            packed = array("i", tokens).tobytes()
        except (OverflowError, TypeError, NotImplementedError) as error:
            raise InvalidKeyError(
                f"token ids must be integers in 0..{2**31 - 1}: {error}"
            ) from None
    return packed


def namespace_of(**parts: str | bytes | int) -> bytes:
    """A namespace from named parts (model, weights epoch, K/V dtype, adapter, tenant, salt).

    Every part is framed by its type and length: different sets of parts give different bytes. The
    order of the parts does not matter.

    Raises:
        InvalidKeyError: a part is not a str, bytes or int (a bool is not an int here).
    """
    kinds = {str: b"s", bytes: b"b", int: b"i"}
    framed = bytearray()
    for name in sorted(parts):
        value = parts[name]
        kind = kinds.get(type(value))
        if kind is None:
            raise InvalidKeyError(
                f"{name}={value!r} is not a namespace part; use a str, bytes or int"
            )
        try:
            raw = value if isinstance(value, bytes) else utf8(str(value))
        except ValueError as error:  # an integer of thousands of digits
            raise InvalidKeyError(f"{name} is not a namespace part: {error}") from None
        for field in (utf8(name), raw):
            framed += len(field).to_bytes(4, "big") + field
        framed += kind
    return bytes(framed)


def namespace_parts(namespace: bytes) -> dict[str, str | bytes | int]:
    """The parts of a namespace made by `namespace_of`; empty for any other namespace."""
    parts: dict[str, str | bytes | int] = {}
    unread = namespace
    try:
        while unread:
            fields = []
            for _ in range(2):
                end = 4 + int.from_bytes(unread[:4], "big")
                fields.append(unread[4:end])
                unread = unread[end:]
            name, raw = fields[0].decode("utf-8", "surrogatepass"), fields[1]
            kind, unread = unread[:1], unread[1:]
            text = raw if kind == b"b" else raw.decode("utf-8", "surrogatepass")
            parts[name] = int(text) if kind == b"i" else text
    except ValueError:
        return {}
    return parts if namespace == namespace_of(**parts) else {}


@dataclass(frozen=True, slots=True)
class CacheKey:
    """A sequence of atoms in a namespace; different namespaces share nothing.

    Args:
        atoms: token ids, or their packed int32 bytes.
        namespace: any string or bytes; `namespace_of` builds a namespace from parts.
        media: segments that stand for images, audio or video; their placeholder ids are ignored and
            may be negative.
        salts: from each salt's position on, only prompts with the same salt share pages.

    Raises:
        InvalidKeyError: an id is negative or wider than an int32, the bytes are no whole atoms, or
            segments overlap or leave the prompt.
    """

    atoms: bytes
    namespace: bytes = b""
    marks: ContentAtoms = ()

    def __init__(
        self,
        atoms: bytes | Iterable[int],
        namespace: str | bytes = b"",
        *,
        media: Sequence[Media] = (),
        salts: Sequence[Salt] = (),
    ) -> None:
        packed, media, salts = _packed(atoms), tuple(map(validate_media, media)), tuple(salts)
        if media:
            packed = zero_placeholders(array("i", packed), media).tobytes()
        _not_negative(packed)
        if not isinstance(namespace, str | bytes):
            raise InvalidKeyError(f"namespace={namespace!r} but it must be a string or bytes")
        marks: ContentAtoms = ()
        if media or salts:
            marked, marks = place_content(array("i", packed), media, salts)
            packed = marked.tobytes()
        object.__setattr__(self, "atoms", packed)
        raw = namespace if isinstance(namespace, bytes) else utf8(namespace)
        object.__setattr__(self, "namespace", raw)
        object.__setattr__(self, "marks", marks)

    def __reduce__(self) -> tuple[object, ...]:
        """Content atoms are numbers of this process; the unpickling process puts in its own."""
        return _unpickled, (self.atoms, self.namespace, self.marks)

    def __len__(self) -> int:
        return len(self.atoms) // ATOM_BYTES

    def num_pages(self, page_size: int) -> int:
        """The number of whole pages that the atoms fill."""
        if page_size < 1:
            raise InvalidKeyError(f"page_size={page_size} but it must be 1 or more")
        return len(self) // page_size

    def prefix(self, num_tokens: int) -> CacheKey:
        """The first `num_tokens` atoms, or all there are, in the same namespace."""
        if num_tokens < 0:
            raise InvalidKeyError(f"a prefix of {num_tokens} tokens; num_tokens must be 0 or more")
        marks = slice_atoms(self.marks, 0, num_tokens) if self.marks else ()
        return key_of_atoms(self.atoms[: num_tokens * ATOM_BYTES], self.namespace, marks)

    def page_hashes(self, page_size: int) -> list[bytes]:
        """The hashes of `packed_hashes`, each by itself."""
        return split_hashes(self.packed_hashes(page_size))

    def packed_hashes(self, page_size: int) -> bytes:
        """A 16-byte hash of each whole page and its prefix, for external stores.

        `hash(i) = BLAKE2b-128(hash(i - 1) + atoms of page i as little-endian int32)`; before the
        first page comes the hash of the namespace. A content atom is written as -2, and the digests
        follow the page's atoms. The same in every process.
        """
        whole = self.num_pages(page_size) * page_size * ATOM_BYTES
        return chain_hashes(
            namespace_hash(self.namespace), self.atoms[:whole], page_size * ATOM_BYTES, self.marks
        )

    def tokens(self) -> array[int]:
        """The atoms as integers."""
        return array("i", self.atoms)


def key_of_atoms(atoms: bytes, namespace: bytes, marks: ContentAtoms) -> CacheKey:
    """The key of packed atoms of another key or of the tree, with their content atoms."""
    key = CacheKey.__new__(CacheKey)
    object.__setattr__(key, "atoms", atoms)
    object.__setattr__(key, "namespace", namespace)
    object.__setattr__(key, "marks", marks)
    return key


def atoms_of(key: CacheKey) -> bytes:
    """The atoms of a key that a caller passed.

    Raises:
        InvalidKeyError: `key` is not a CacheKey.
    """
    try:
        return key.atoms
    except AttributeError:
        message = f"a {type(key).__name__} is not a CacheKey; make one of token ids: CacheKey(ids)"
        raise InvalidKeyError(message) from None


def _unpickled(atoms: bytes, namespace: bytes, content: ContentAtoms) -> CacheKey:
    renumbered = array("i", atoms)
    for at, content_atom in content:
        renumbered[at] = content_atom.atom
    return key_of_atoms(renumbered.tobytes(), namespace, content)


def namespace_hash(namespace: bytes) -> bytes:
    """The hash that the chain of page hashes of a namespace begins with."""
    return hashlib.blake2b(namespace, digest_size=HASH_BYTES, person=b"ramify-ns").digest()


def chain_hashes(parent: bytes, atoms: bytes, page_bytes: int, content: ContentAtoms = ()) -> bytes:
    """The hashes of consecutive pages after a page with hash `parent`; packed, 16 bytes each."""
    if len(atoms) == page_bytes and not content and sys.byteorder == "little":
        hasher = _page_hasher.copy()
        hasher.update(parent + atoms)
        return hasher.digest()
    pages = [atoms[at : at + page_bytes] for at in range(0, len(atoms), page_bytes)]
    if content or sys.byteorder == "big":
        page_size = page_bytes // ATOM_BYTES
        for i, page in enumerate(pages):
            pages[i] = bytes_for_hash(
                page, slice_atoms(content, i * page_size, (i + 1) * page_size)
            )
    copy, hashes = _page_hasher.copy, []
    for page in pages:
        hasher = copy()
        hasher.update(parent + page)
        parent = hasher.digest()
        hashes.append(parent)
    return b"".join(hashes)


def split_hashes(packed: bytes) -> list[bytes]:
    """Packed page hashes as a list of 16-byte hashes."""
    return [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]
