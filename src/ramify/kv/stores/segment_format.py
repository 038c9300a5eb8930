"""Format of segment files and records: encode and decode alone, no files.

    segment   preamble 4 KiB | record x n | footer | trailer 64 B (sealed segments end here)
    record    header 64 B | payload | zeros to the record's length
    footer    40 B for each record: name, parent tag, tenant tag, slot, flags
    trailer   magic, segment id, count, footer offset, checksum of the footer

Little-endian. All records of a segment have the same length, so a slot number is an address. Every
checksum is seeded by the segment's random id: bytes of a deleted segment that reappear in
preallocated blocks, or a record copied from another segment, do not verify. Lengths and counts are
checked against the file before anything is allocated.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from ramify.kv.stores.page_names import NAME_BYTES, TAG_BYTES

FORMAT_VERSION = 1
PREAMBLE_BYTES = 4096
HEADER_BYTES = 64
TRAILER_BYTES = 64
ID_BYTES = 16
CHECKSUM_BYTES = 16

# Flags of a record. A reader that does not know a flag takes the page for absent.
ENCRYPTED = 1
# Reserved: planes of some layers (those before a window) are absent, and are zeros in the payload.
ABSENT_LAYERS = 2
KNOWN_FLAGS = ENCRYPTED

_PREAMBLE = struct.Struct("<8sHHIIIQ16s16s")
_PREAMBLE_MAGIC = b"RAMIFYKV"
_HEADER = struct.Struct(f"<4sHH{NAME_BYTES}s{TAG_BYTES}s{TAG_BYTES}sI")
_HEADER_MAGIC = b"page"
_CHECK_BYTES = 4
_TRAILER = struct.Struct(f"<8s{ID_BYTES}sIIQ{CHECKSUM_BYTES}s8x")
_TRAILER_MAGIC = b"KVSEALED"

# One row for each record of a footer. A name is two integers, for sorting.
ENTRY = np.dtype(
    [
        ("high", "<u8"), ("low", "<u8"), ("parent", "V8"), ("tenant", "V8"),
        ("slot", "<u4"), ("flags", "<u2"), ("unused", "<u2"),
    ]
)  # fmt: skip
Entries = NDArray[np.void]


def align(num_bytes: int, alignment: int) -> int:
    """The next multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Geometry:
    """Lengths that all segments of a directory share.

    Args:
        payload_bytes: of a record: a page, with the nonce if it is encrypted.
        segment_bytes: of a full segment's file.
    """

    payload_bytes: int
    segment_bytes: int

    @property
    def record_bytes(self) -> int:
        """Length of a record with its padding: 4 KiB, or 512 B for payloads below 64 KiB."""
        alignment = 4096 if self.payload_bytes >= 65536 else 512
        return align(HEADER_BYTES + self.payload_bytes, alignment)

    @property
    def num_slots(self) -> int:
        """Records of a full segment, whose footer still fits."""
        room = self.segment_bytes // 4096 * 4096 - PREAMBLE_BYTES - TRAILER_BYTES
        return max(room // (self.record_bytes + ENTRY.itemsize), 0)

    def offset(self, slot: int) -> int:
        """Where a record begins in the file; the first slot that is not used, where the footer does."""
        return PREAMBLE_BYTES + slot * self.record_bytes

    def sealed_bytes(self, num_used: int, num_entries: int) -> int:
        """Length of the file of a sealed segment."""
        return align(self.offset(num_used) + num_entries * ENTRY.itemsize + TRAILER_BYTES, 4096)


@dataclass(frozen=True, slots=True)
class Preamble:
    """What the first 4 KiB of a segment say."""

    geometry: Geometry
    number: int
    identity: bytes
    segment_id: bytes

    def encode(self) -> bytes:
        """The 4 KiB."""
        fields = _PREAMBLE.pack(
            _PREAMBLE_MAGIC,
            FORMAT_VERSION,
            0,
            self.geometry.record_bytes,
            self.geometry.payload_bytes,
            self.geometry.num_slots,
            self.number,
            self.identity,
            self.segment_id,
        )
        return (fields + xxhash.xxh3_128_digest(fields)).ljust(PREAMBLE_BYTES, b"\0")

    @classmethod
    def decode(
        cls, block: bytes, geometry: Geometry, number: int, identity: bytes
    ) -> Preamble | None:
        """The preamble of a segment that must have these properties; None: it is damaged, or differs."""
        if len(block) != PREAMBLE_BYTES:
            return None
        segment_id = _PREAMBLE.unpack_from(block)[-1]
        expected = cls(geometry, number, identity, segment_id)
        return expected if expected.encode() == block else None


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The header of a record.

    Args:
        checksum: xxh3-128 of the fields before it and of the payload, or the tag of AES-GCM.
    """

    name: bytes
    parent_tag: bytes
    tenant_tag: bytes
    flags: int
    payload_bytes: int
    checksum: bytes

    def encode(self, segment_id: bytes) -> bytes:
        """64 bytes."""
        fields = header_fields(
            self.name, self.parent_tag, self.tenant_tag, self.flags, self.payload_bytes
        )
        return fields + self.checksum + _header_check(fields + self.checksum, segment_id)

    @classmethod
    def decode(cls, block: bytes | memoryview, segment_id: bytes) -> RecordHeader | None:
        """The header in the first 64 bytes; None: it is damaged, or another segment's."""
        block = bytes(block[:HEADER_BYTES])
        if len(block) != HEADER_BYTES:
            return None
        body, check = block[:-_CHECK_BYTES], block[-_CHECK_BYTES:]
        magic, version, flags, name, parent_tag, tenant_tag, length = _HEADER.unpack_from(block)
        if magic != _HEADER_MAGIC or version != FORMAT_VERSION:
            return None
        if check != _header_check(body, segment_id):
            return None
        return cls(name, parent_tag, tenant_tag, flags, length, body[_HEADER.size :])


def header_fields(
    name: bytes, parent_tag: bytes, tenant_tag: bytes, flags: int, payload_bytes: int
) -> bytes:
    """The 44 bytes of a header that its checksum covers beside the payload."""
    return _HEADER.pack(
        _HEADER_MAGIC, FORMAT_VERSION, flags, name, parent_tag, tenant_tag, payload_bytes
    )


def seed_of(segment_id: bytes) -> int:
    """The seed of the checksums of a segment."""
    return int.from_bytes(segment_id[:8], "little")


def _header_check(body: bytes, segment_id: bytes) -> bytes:
    return xxhash.xxh3_64_digest(body, seed=seed_of(segment_id))[:_CHECK_BYTES]


def _footer_checksum(entries: bytes, segment_id: bytes) -> bytes:
    return xxhash.xxh3_128_digest(entries + segment_id, seed=seed_of(segment_id))


def encode_footer(entries: Entries, geometry: Geometry, num_used: int, segment_id: bytes) -> bytes:
    """Footer, padding and trailer: what follows the last record of a sealed segment."""
    body = entries.tobytes()
    start = geometry.offset(num_used)
    trailer = _TRAILER.pack(
        _TRAILER_MAGIC,
        segment_id,
        len(entries),
        num_used,
        start,
        _footer_checksum(body, segment_id),
    )
    total = geometry.sealed_bytes(num_used, len(entries)) - start
    return body.ljust(total - TRAILER_BYTES, b"\0") + trailer


def decode_trailer(
    block: bytes, geometry: Geometry, file_bytes: int, segment_id: bytes
) -> tuple[int, int, bytes] | None:
    """Number of entries, of used slots, and the footer's checksum; None: not sealed, or damaged.

    What it returns fits into the file: `footer_bytes` can be read without further checks.
    """
    if len(block) != TRAILER_BYTES:
        return None
    magic, its_id, count, num_used, start, checksum = _TRAILER.unpack(block)
    if magic != _TRAILER_MAGIC or its_id != segment_id:
        return None
    if not count <= num_used <= geometry.num_slots or start != geometry.offset(num_used):
        return None
    if file_bytes != geometry.sealed_bytes(num_used, count):
        return None
    return count, num_used, checksum


def decode_footer(body: bytes, checksum: bytes, segment_id: bytes, num_used: int) -> Entries | None:
    """The entries of a footer; None: it is damaged."""
    if _footer_checksum(body, segment_id) != checksum:
        return None
    entries = np.frombuffer(body, ENTRY)
    if len(entries) and int(entries["slot"].max()) >= num_used:
        return None
    return entries


def entry_of(header: RecordHeader, slot: int) -> tuple[int, int, bytes, bytes, int, int, int]:
    """The row of a record in the footer."""
    high, low = split_name(header.name)
    return high, low, header.parent_tag, header.tenant_tag, slot, header.flags, 0


def split_name(name: bytes) -> tuple[int, int]:
    """A name as two integers."""
    return int.from_bytes(name[:8], "little"), int.from_bytes(name[8:], "little")


def join_name(high: int, low: int) -> bytes:
    """A name from its two integers."""
    return int(high).to_bytes(8, "little") + int(low).to_bytes(8, "little")
