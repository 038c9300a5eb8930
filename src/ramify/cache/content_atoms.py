"""Content atoms: images, audio, video and salts as negative atoms that cannot collide with tokens.

A media segment of 3 atoms becomes `[-n, CONTINUED, CONTINUED]`: the number n is interned for the
segment's (kind, 256-bit digest) in this process. Token ids are never negative, and equal numbers mean
equal digests, so a page of media matches only the same media. A number is reused once no key and no
cached page has it.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from operator import index, itemgetter
from threading import Lock
from typing import SupportsIndex
from weakref import WeakValueDictionary, finalize

from ramify.errors import InvalidKeyError

DIGEST_BYTES = 32
CONTINUED = -1  # every atom of a media segment after its first
_HASHED_CONTENT = -2  # any content atom in page hashes, which add its digest
_FIRST, _LAST = 3, 2**31
_SETTINGS = (bytes, str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Media:
    """A media segment: atoms `start` to `start + length - 1` of a prompt stand for this content.

    Args:
        digest: 32 bytes that identify the content *and everything that shapes its K/V* (processor
            settings, resolution); `Media.digest_of` makes one.
        start: position of its first atom in the prompt.
        length: number of its atoms, at least 1.
    """

    digest: bytes
    start: int
    length: int

    @staticmethod
    def digest_of(
        content: bytes | bytearray | memoryview, *settings: str | bytes | float | None
    ) -> bytes:
        """BLAKE2b-256 of raw content and the settings that shape its K/V, each framed by its length.

        Raises:
            InvalidKeyError: the content is not bytes (an array has `tobytes()`, but its shape and
                dtype belong to the settings), or a setting is not text, bytes, a number or None.
        """
        if not isinstance(content, bytes | bytearray | memoryview):
            raise InvalidKeyError(
                f"the content is a {type(content).__name__}, not bytes; an array has tobytes(), "
                "and its shape and dtype are settings"
            )
        hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"ramify-media")
        for part in (bytes(content), *settings):
            if type(part) not in _SETTINGS:  # the repr of another type may be incomplete
                raise InvalidKeyError(
                    f"a setting is a {type(part).__name__}; give text, bytes, numbers or None"
                )
            raw = part if isinstance(part, bytes) else repr(part).encode()
            hasher.update(type(part).__name__.encode() + len(raw).to_bytes(8, "big") + raw)
        return hasher.digest()


@dataclass(frozen=True, slots=True)
class Salt:
    """From position `start` on, a prompt shares pages only with prompts of the same salt there.

    Pages before `start` stay shared: a public system prompt, then a private tail.
    """

    start: int
    salt: str | bytes


class ContentAtom:
    """A (kind, digest) and the negative atom that stands for it in this process."""

    __slots__ = ("__weakref__", "atom", "digest", "kind", "salt")

    def __init__(self, kind: bytes, digest: bytes, atom: int, salt: bytes | None) -> None:
        self.kind, self.digest, self.atom = kind, digest, atom
        self.salt = salt  # the salt that begins here; None for media

    def __reduce__(self) -> tuple[object, ...]:
        return intern_content, (self.kind, self.digest, self.salt)


ContentAtoms = tuple[tuple[int, ContentAtom], ...]  # (position, atom), positions ascending
_position = itemgetter(0)

_interned: WeakValueDictionary[tuple[bytes, bytes], ContentAtom] = WeakValueDictionary()
_numbers = count(_FIRST)
_free_numbers: list[int] = []
_interning_lock = Lock()


def intern_content(kind: bytes, digest: bytes, salt: bytes | None = None) -> ContentAtom:
    """The content atom of a digest; as long as it is in use, the same object for equal digests."""
    atom = _interned.get((kind, digest))
    return atom if atom is not None else _create(kind, digest, salt)


def _create(kind: bytes, digest: bytes, salt: bytes | None) -> ContentAtom:
    with _interning_lock:  # keys are made in any thread
        atom = _interned.get((kind, digest))
        if atom is not None:
            return atom
        try:
            number = _free_numbers.pop()
        except IndexError:  # finalizers of any thread append numbers: pop without a look first
            number = next(_numbers)
        if number > _LAST:
            raise InvalidKeyError(
                f"{number - _FIRST} different contents and salts are in use in this process, which "
                "is all there are numbers for; end some requests or clear the cache"
            )
        atom = _interned[kind, digest] = ContentAtom(kind, digest, -number, salt)
        finalize(atom, _free_numbers.append, number).atexit = False
    return atom


def utf8(text: str) -> bytes:
    """Text as UTF-8, lone surrogates included: different texts give different bytes."""
    return text.encode("utf-8", "surrogatepass")


def _as_index(number: SupportsIndex) -> int:
    try:
        return index(number)
    except TypeError:
        raise InvalidKeyError(f"{number!r} must be an integer: a position or a length") from None


def validate_media(segment: Media) -> Media:
    """A segment with its start and length as plain ints.

    Raises:
        InvalidKeyError: `segment` is not a Media, or its start or length is not an integer.
    """
    if not isinstance(segment, Media):
        raise InvalidKeyError(f"{segment!r} is not a Media")
    return Media(segment.digest, _as_index(segment.start), _as_index(segment.length))


def zero_placeholders(atoms: array[int], media: Sequence[Media]) -> array[int]:
    """A copy of the atoms with 0 for the placeholders of segments, which may be any int32."""
    atoms = atoms[:]
    for segment in media:
        end = segment.start + segment.length
        if 0 <= segment.start < end <= len(atoms):  # else `place_content` raises
            atoms[segment.start : end] = array("i", [0]) * segment.length
    return atoms


def place_content(
    atoms: array[int], media: Sequence[Media], salts: Sequence[Salt]
) -> tuple[array[int], ContentAtoms]:
    """Atoms with content atoms in place of media and salts, and those content atoms by position.

    Raises:
        InvalidKeyError: segments overlap, leave the prompt or have no whole digest; a salt begins
            outside the prompt, inside a segment, or where another begins.
    """
    atoms, content, end = atoms[:], dict[int, ContentAtom](), 0
    for segment in sorted(media, key=lambda segment: segment.start):
        if not isinstance(segment.digest, bytes) or len(segment.digest) != DIGEST_BYTES:
            raise InvalidKeyError(
                f"the digest of the segment at {segment.start} is {segment.digest!r}, not {DIGEST_BYTES} "
                "bytes; Media.digest_of makes one"
            )
        if segment.length < 1 or segment.start < 0 or segment.start + segment.length > len(atoms):
            raise InvalidKeyError(
                f"a media segment takes atoms {segment.start} to {segment.start + segment.length} of a prompt "
                f"of {len(atoms)}; it needs at least 1 atom, all inside the prompt"
            )
        if segment.start < end:
            raise InvalidKeyError(
                f"a media segment begins at {segment.start} but the one before ends at {end}; "
                "segments must not overlap"
            )
        end = segment.start + segment.length
        content[segment.start] = intern_content(b"media", segment.digest)
        atoms[segment.start : end] = array("i", [CONTINUED]) * segment.length
        atoms[segment.start] = content[segment.start].atom
    salt_starts = set[int]()
    for salt in salts:
        if not isinstance(salt, Salt) or not isinstance(salt.salt, str | bytes):
            raise InvalidKeyError(f"{salt!r} is not a Salt of a position and a string or bytes")
        at = _as_index(salt.start)
        if not 0 <= at < len(atoms) or at in salt_starts or atoms[at] == CONTINUED:
            raise InvalidKeyError(
                f"a salt begins at {at} of a prompt of {len(atoms)} atoms; it must begin inside "
                "the prompt, not inside a media segment, and not where another salt does"
            )
        salt_starts.add(at)
        raw = utf8(salt.salt) if isinstance(salt.salt, str) else salt.salt
        if at in content:
            kind, salted = b"salted media", content[at].digest
        else:
            kind, salted = b"salted token", atoms[at].to_bytes(4, "little", signed=True)
        hasher = hashlib.blake2b(salted, digest_size=DIGEST_BYTES, person=b"ramify-salt")
        hasher.update(raw)  # needs no frame: the kind implies the length of `salted`
        content[at] = intern_content(kind, hasher.digest(), raw)
        atoms[at] = content[at].atom
    return atoms, tuple(sorted(content.items()))


def slice_atoms(content: ContentAtoms, start: int, end: int) -> ContentAtoms:
    """The content atoms at positions start .. end - 1, positions counted from `start`."""
    low = bisect_left(content, start, key=_position)
    high = bisect_left(content, end, low, key=_position)
    return tuple((at - start, atom) for at, atom in content[low:high])


def bytes_for_hash(page: bytes, content: ContentAtoms) -> bytes:
    """A page's atoms, little-endian, then the digests of its content atoms.

    The same in every process, unlike the numbers of content atoms.
    """
    atoms = array("i", page)
    for at, _ in content:
        atoms[at] = _HASHED_CONTENT
    if sys.byteorder == "big":
        atoms.byteswap()
    return atoms.tobytes() + b"".join(atom.kind + b"\0" + atom.digest for _, atom in content)
