"""Content that is no token: images, audio, video and salts, as atoms that cannot collide.

A prompt with media is a stream of atoms like any other, of which some stand for content. The first
atom of a segment is a negative number that belongs to one (kind, 256-bit digest) in this process;
the others are `CONTINUED`. Token ids are never negative, equal numbers mean equal digests exactly,
and what follows the first atom of a segment lies behind it in the tree: no two contents and no
text can be taken for each other. A number lives as long as a key or a cached page uses it; then
another content may get it.
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
CONTINUED = -1  # an atom of media content after its first
_HASHED_CONTENT = -2  # stands for any marked atom where its digest is written out: in page hashes
_FIRST, _LAST = 3, 2**31
_SETTINGS = (bytes, str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Media:
    """`length` atoms from `start` on are content with this digest, whatever ids stand there.

    Args:
        digest: 32 bytes that name the content *and everything that shapes its K/V* (processor
            settings, resolution); `Media.digest_of` makes one.
        start: position of the first of its atoms in the prompt.
        length: how many atoms it takes, at least 1.
    """

    digest: bytes
    start: int
    length: int

    @staticmethod
    def digest_of(
        content: bytes | bytearray | memoryview, *settings: str | bytes | float | None
    ) -> bytes:
        """BLAKE2b-256 of raw content and of what else shapes its K/V, each framed by its length.

        Raises:
            InvalidKeyError: the content is no bytes (an array has `tobytes()`, but its shape and
                dtype belong to the settings), or a setting is no text, bytes, number or None.
        """
        if not isinstance(content, bytes | bytearray | memoryview):
            raise InvalidKeyError(
                f"the content is a {type(content).__name__}, not bytes; an array has tobytes(), "
                "and its shape and dtype are settings"
            )
        named = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"ramify-media")
        for part in (bytes(content), *settings):
            if type(part) not in _SETTINGS:  # the repr of anything else may leave something out
                raise InvalidKeyError(
                    f"a setting is a {type(part).__name__}; give text, bytes, numbers or None"
                )
            raw = part if isinstance(part, bytes) else repr(part).encode()
            named.update(type(part).__name__.encode() + len(raw).to_bytes(8, "big") + raw)
        return named.digest()


@dataclass(frozen=True, slots=True)
class Salt:
    """From position `start` on, nothing is shared with a prompt that has no such salt there.

    What lies before stays shared: a public system prompt, then a private tail.
    """

    start: int
    salt: str | bytes


class ContentAtom:
    """One (kind, digest) and the atom that stands for it in this process."""

    __slots__ = ("__weakref__", "atom", "digest", "kind", "salt")

    def __init__(self, kind: bytes, digest: bytes, atom: int, salt: bytes | None) -> None:
        self.kind, self.digest, self.atom = kind, digest, atom
        self.salt = salt  # what begins to be private here; None at the content of a segment

    def __reduce__(self) -> tuple[object, ...]:
        return intern_content, (self.kind, self.digest, self.salt)


ContentAtoms = tuple[tuple[int, ContentAtom], ...]  # positions of marked atoms, ascending
_position = itemgetter(0)

_interned: WeakValueDictionary[tuple[bytes, bytes], ContentAtom] = WeakValueDictionary()
_numbers = count(_FIRST)
_free_numbers: list[int] = []
_interning_lock = Lock()


def intern_content(kind: bytes, digest: bytes, salt: bytes | None = None) -> ContentAtom:
    """The mark of a digest: the same object for the same digest while anybody uses it."""
    mark = _interned.get((kind, digest))
    return mark if mark is not None else _create(kind, digest, salt)


def _create(kind: bytes, digest: bytes, salt: bytes | None) -> ContentAtom:
    with _interning_lock:  # keys are made in any thread
        mark = _interned.get((kind, digest))
        if mark is not None:
            return mark
        try:
            number = _free_numbers.pop()
        except IndexError:  # not looked at before: another thread may take the last one
            number = next(_numbers)
        if number > _LAST:
            raise InvalidKeyError(
                f"{number - _FIRST} different contents and salts are in use in this process, which "
                "is all there are numbers for; end some requests or clear the cache"
            )
        mark = _interned[kind, digest] = ContentAtom(kind, digest, -number, salt)
        finalize(mark, _free_numbers.append, number).atexit = False
    return mark


def utf8(text: str) -> bytes:
    """Text as bytes, different ones for different texts, lone surrogates included."""
    return text.encode("utf-8", "surrogatepass")


def _as_index(number: SupportsIndex) -> int:
    try:
        return index(number)
    except TypeError:
        raise InvalidKeyError(f"{number!r} must be an integer: a position or a length") from None


def validate_media(segment: Media) -> Media:
    """A segment, its position and length as Python's own integers.

    Raises:
        InvalidKeyError: it is none, or they are none.
    """
    if not isinstance(segment, Media):
        raise InvalidKeyError(f"{segment!r} is no Media")
    return Media(segment.digest, _as_index(segment.start), _as_index(segment.length))


def zero_placeholders(atoms: array[int], media: Sequence[Media]) -> array[int]:
    """Atoms without the placeholders of segments, which may be any int32."""
    atoms = atoms[:]
    for one in media:
        if 0 <= one.start < one.start + one.length <= len(atoms):  # else `place_content` tells
            atoms[one.start : one.start + one.length] = array("i", [0]) * one.length
    return atoms


def place_content(
    atoms: array[int], media: Sequence[Media], salts: Sequence[Salt]
) -> tuple[array[int], ContentAtoms]:
    """Atoms with content and salts in their places, and where these are.

    Raises:
        InvalidKeyError: segments overlap, leave the prompt or have no whole digest; a salt begins
            outside the prompt, inside a segment, or where another begins.
    """
    atoms, found, end = atoms[:], dict[int, ContentAtom](), 0
    for one in sorted(media, key=lambda each: each.start):
        if not isinstance(one.digest, bytes) or len(one.digest) != DIGEST_BYTES:
            raise InvalidKeyError(
                f"the digest of the segment at {one.start} is {one.digest!r}, not {DIGEST_BYTES} "
                "bytes; Media.digest_of makes one"
            )
        if one.length < 1 or one.start < 0 or one.start + one.length > len(atoms):
            raise InvalidKeyError(
                f"a media segment takes atoms {one.start} to {one.start + one.length} of a prompt "
                f"of {len(atoms)}; it needs at least 1 atom, all inside the prompt"
            )
        if one.start < end:
            raise InvalidKeyError(
                f"a media segment begins at {one.start} but the one before ends at {end}; "
                "segments must not overlap"
            )
        end = one.start + one.length
        found[one.start] = intern_content(b"media", one.digest)
        atoms[one.start : end] = array("i", [CONTINUED]) * one.length
        atoms[one.start] = found[one.start].atom
    salted = set[int]()
    for salt in salts:
        if not isinstance(salt, Salt) or not isinstance(salt.salt, str | bytes):
            raise InvalidKeyError(f"{salt!r} is no Salt of a position and a string or bytes")
        at = _as_index(salt.start)
        if not 0 <= at < len(atoms) or at in salted or atoms[at] == CONTINUED:
            raise InvalidKeyError(
                f"a salt begins at {at} of a prompt of {len(atoms)} atoms; it must begin inside "
                "the prompt, not inside a media segment, and not where another salt does"
            )
        salted.add(at)
        raw = utf8(salt.salt) if isinstance(salt.salt, str) else salt.salt
        below = found[at].digest if at in found else atoms[at].to_bytes(4, "little", signed=True)
        named = hashlib.blake2b(below, digest_size=DIGEST_BYTES, person=b"ramify-salt")
        named.update(raw)  # `below` has one of two lengths, and the kind says which
        kind = b"salted media" if at in found else b"salted token"
        found[at] = intern_content(kind, named.digest(), raw)
        atoms[at] = found[at].atom
    return atoms, tuple(sorted(found.items()))


def slice_atoms(content: ContentAtoms, start: int, end: int) -> ContentAtoms:
    """The marks at positions start .. end - 1, counted from `start`."""
    low = bisect_left(content, start, key=_position)
    high = bisect_left(content, end, low, key=_position)
    return tuple((at - start, mark) for at, mark in content[low:high])


def bytes_for_hash(page: bytes, content: ContentAtoms) -> bytes:
    """A page's atoms, little-endian, and the digests that its marks stand for.

    The same in every process, as the numbers of marks are not.
    """
    atoms = array("i", page)
    for at, _ in content:
        atoms[at] = _HASHED_CONTENT
    if sys.byteorder == "big":
        atoms.byteswap()
    return atoms.tobytes() + b"".join(mark.kind + b"\0" + mark.digest for _, mark in content)
