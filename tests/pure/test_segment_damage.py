"""Damaged bytes in every region of segments: detected or harmless, never served, never a large allocation."""

import math
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ramify.kv.stores.file_ops import OsFileOps
from ramify.kv.stores.segment import open_segment
from ramify.kv.stores.segment_format import (
    ENTRY,
    HEADER_BYTES,
    PREAMBLE_BYTES,
    TRAILER_BYTES,
    Geometry,
    Preamble,
    RecordHeader,
    decode_footer,
    decode_trailer,
    encode_footer,
    entry_of,
)
from ramify.kv.stores.segments import SegmentStore
from tests.budget import examples
from tests.pure.store_cases import (
    PAGE_BYTES,
    SEGMENT_BYTES,
    hash_of,
    hits,
    opened,
    put,
    segment_files,
)

NUM_PAGES = 8
GEOMETRY = Geometry(PAGE_BYTES, SEGMENT_BYTES)
RECORDS_END = GEOMETRY.offset(NUM_PAGES)


def regions(file_bytes: int) -> dict[str, tuple[int, int]]:
    """Byte ranges of a sealed segment of 8 pages by what they hold."""
    record = GEOMETRY.offset(3)
    payload = record + HEADER_BYTES
    footer_end = RECORDS_END + NUM_PAGES * ENTRY.itemsize
    return {
        "preamble": (0, 80),
        "preamble's padding": (80, PREAMBLE_BYTES),
        "header's magic and version": (record, record + 8),
        "header's names": (record + 8, record + 40),
        "header's length": (record + 40, record + 44),
        "header's checksums": (record + 44, payload),
        "payload": (payload, payload + PAGE_BYTES),
        "record's padding": (payload + PAGE_BYTES, GEOMETRY.offset(4)),
        "footer": (RECORDS_END, footer_end),
        "footer's padding": (footer_end, file_bytes - TRAILER_BYTES),
        "trailer": (file_bytes - TRAILER_BYTES, file_bytes),
    }


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one sealed segment of 8 pages."""
    directory = tmp_path_factory.mktemp("sealed")
    store = opened(directory)
    put(store, range(NUM_PAGES))
    store.close()
    return directory


def reopened(directory: Path, content: bytes) -> SegmentStore:
    """The store after its segment was replaced."""
    for path in segment_files(directory):
        path.unlink()
    path = next(directory.glob("*/key")).parent / "00000001.seg"
    path.write_bytes(content)
    return opened(directory, read_only=True)


@pytest.mark.parametrize("region", regions(SEGMENT_BYTES))
def test_flipped_bits_are_never_served(sealed: Path, region: str) -> None:
    """Flips in each region, a hundred in a full run: every page that is read is right, other pages are not lost."""
    content = segment_files(sealed)[0].read_bytes()
    start, end = regions(len(content))[region]
    rng = random.Random(region)

    for _ in range(examples(100)):
        damaged = bytearray(content)
        damaged[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
        store = reopened(sealed, bytes(damaged))
        intact = hits(store, range(NUM_PAGES))
        store.close()

        if region.startswith("preamble"):
            assert intact == []
        elif region == "payload" or region.startswith("header"):
            assert intact == [0, 1, 2, 4, 5, 6, 7]
        else:
            assert intact == list(range(NUM_PAGES))
    reopened(sealed, content).close()


def test_truncated_segments_give_what_is_whole(sealed: Path) -> None:
    """A segment cut anywhere: records before the cut are read, none is wrong."""
    content = segment_files(sealed)[0].read_bytes()
    rng = random.Random(1)

    for length in [
        *(GEOMETRY.offset(slot) for slot in range(9)),
        *rng.sample(range(len(content)), 90),
    ]:
        store = reopened(sealed, content[:length])
        intact = hits(store, range(NUM_PAGES))
        store.close()

        num_whole = max((length - PREAMBLE_BYTES) // GEOMETRY.record_bytes, 0)
        assert intact == list(range(min(num_whole, NUM_PAGES)))
    reopened(sealed, content).close()


def flip_byte(path: Path, offset: int) -> None:
    """Damage one byte of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_removal_log_damaged_in_the_middle_drops_every_page(
    tmp_path: Path, read_only: bool
) -> None:
    """Whose entry is lost is not known, so no page is served; later removals hold, too."""
    store = opened(tmp_path)
    put(store, range(NUM_PAGES))
    store.remove_many([hash_of(n) for n in range(3)], deadline=math.inf)
    store.close()
    flip_byte(next(tmp_path.glob("*/removed.log")), 40)

    store = opened(tmp_path, read_only=read_only)
    store.maintain()
    served = hits(store, range(NUM_PAGES))
    store.close()

    assert served == []
    assert bool(segment_files(tmp_path)) == read_only
    assert hits(opened(tmp_path), range(NUM_PAGES)) == []


def test_a_torn_end_of_the_removal_log_drops_no_page(tmp_path: Path) -> None:
    """The last entry is damaged: a crash while it was written, and nothing was acknowledged."""
    store = opened(tmp_path)
    put(store, range(NUM_PAGES))
    store.remove_many([hash_of(0), hash_of(1)], deadline=math.inf)
    store.close()
    flip_byte(next(tmp_path.glob("*/removed.log")), -1)

    assert hits(opened(tmp_path), range(NUM_PAGES)) == list(range(1, NUM_PAGES))


def test_a_record_of_another_place_is_not_served(sealed: Path) -> None:
    """A record copied over another one, or from another segment, does not verify."""
    content = bytearray(segment_files(sealed)[0].read_bytes())
    first, second = GEOMETRY.offset(1), GEOMETRY.offset(2)
    whole = bytes(content)
    content[second : second + GEOMETRY.record_bytes] = content[first:second]

    store = reopened(sealed, bytes(content))
    assert hits(store, range(NUM_PAGES)) == [0, 1, 3, 4, 5, 6, 7]
    store.close()

    # Header of one page and payload of another, both of this segment.
    content = bytearray(whole)
    content[second + HEADER_BYTES : second + HEADER_BYTES + PAGE_BYTES] = content[
        first + HEADER_BYTES : first + HEADER_BYTES + PAGE_BYTES
    ]
    store = reopened(sealed, bytes(content))
    assert hits(store, range(NUM_PAGES)) == [0, 1, 3, 4, 5, 6, 7]
    store.close()
    reopened(sealed, whole).close()


def test_a_header_of_another_name_is_not_served(sealed: Path) -> None:
    """A payload under another page's name does not verify, even if the header's own check does."""
    content = bytearray(segment_files(sealed)[0].read_bytes())
    whole, segment_id = bytes(content), _segment_id(content)
    first, second = GEOMETRY.offset(1), GEOMETRY.offset(2)
    header = RecordHeader.decode(whole[second : second + HEADER_BYTES], segment_id)
    other = RecordHeader.decode(whole[first : first + HEADER_BYTES], segment_id)
    assert header is not None and other is not None
    forged = replace(header, checksum=other.checksum).encode(segment_id)
    payload = content[first + HEADER_BYTES : first + HEADER_BYTES + PAGE_BYTES]
    content[second : second + HEADER_BYTES + PAGE_BYTES] = forged + payload

    store = reopened(sealed, bytes(content))

    assert hits(store, range(NUM_PAGES)) == [0, 1, 3, 4, 5, 6, 7]
    store.close()
    reopened(sealed, whole).close()


def _segment_id(content: bytes | bytearray) -> bytes:
    """The id in a preamble: its checksum follows it."""
    return bytes(content[48:64])


def test_bytes_of_a_deleted_segment_do_not_verify(sealed: Path) -> None:
    """The records of an old segment behind the preamble of a new one are none of its records."""
    content = segment_files(sealed)[0].read_bytes()
    preamble = Preamble(GEOMETRY, 1, _identity(sealed), b"another id 16 by")
    stale = preamble.encode() + content[PREAMBLE_BYTES:]

    store = reopened(sealed, stale)

    assert hits(store, range(NUM_PAGES)) == []
    store.close()
    reopened(sealed, content).close()


def _identity(directory: Path) -> bytes:
    return bytes.fromhex(next(directory.glob("*/key")).parent.name)


def headers() -> Iterator[bytes]:
    """Mutated headers: bits flipped, fields of extreme values, noise."""
    rng = random.Random(3)
    header = RecordHeader(rng.randbytes(16), rng.randbytes(8), rng.randbytes(8), 0, 200, bytes(16))
    good = header.encode(b"i" * 16)
    for _ in range(5000):
        damaged = bytearray(good)
        for _ in range(rng.choice((1, 2, 8))):
            damaged[rng.randrange(len(damaged))] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
        yield bytes(damaged)
        yield rng.randbytes(rng.randrange(HEADER_BYTES + 1))


def test_damaged_headers_are_no_headers() -> None:
    """10,000 damaged headers: decoded as they were written, or not at all; no exception."""
    rng = random.Random(3)
    header = RecordHeader(rng.randbytes(16), rng.randbytes(8), rng.randbytes(8), 0, 200, bytes(16))
    good = header.encode(b"i" * 16)

    assert RecordHeader.decode(good, b"i" * 16) == header
    assert RecordHeader.decode(good, b"j" * 16) is None
    decoded = [RecordHeader.decode(block, b"i" * 16) for block in headers() if block != good]
    assert decoded == [None] * len(decoded) and len(decoded) > 9000


def test_damaged_footers_allocate_no_more_than_the_segment(tmp_path: Path) -> None:
    """10,000 damaged trailers, with valid checksums over absurd numbers too: bounded, no exception."""
    rng = random.Random(4)
    segment_id = b"s" * 16
    header = RecordHeader(rng.randbytes(16), rng.randbytes(8), rng.randbytes(8), 0, 200, bytes(16))
    entries = np.array([entry_of(header, slot) for slot in range(4)], ENTRY)
    preamble = Preamble(GEOMETRY, 1, b"d" * 16, segment_id).encode()
    footer = encode_footer(entries, GEOMETRY, 4, segment_id)
    body = bytes(GEOMETRY.offset(4) - PREAMBLE_BYTES)
    path = tmp_path / "00000001.seg"
    tracemalloc.start()

    for number in range(10_000):
        damaged = bytearray(footer)
        if number % 2:
            # Counts and offsets of extreme values.
            place = len(footer) - TRAILER_BYTES + rng.choice((24, 28, 32))
            damaged[place : place + 4] = rng.choice((b"\xff" * 4, b"\0\0\0\x80", rng.randbytes(4)))
        else:
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        trailer = decode_trailer(
            bytes(damaged[-TRAILER_BYTES:]), GEOMETRY, GEOMETRY.sealed_bytes(4, 4), segment_id
        )
        if trailer is not None:
            count, num_used, checksum = trailer
            assert count * ENTRY.itemsize <= SEGMENT_BYTES
            decoded = decode_footer(
                bytes(damaged[: count * ENTRY.itemsize]), checksum, segment_id, num_used
            )
            assert decoded is None or decoded.tobytes() == entries.tobytes()
        if number % 50 == 0:
            path.write_bytes(preamble + body + damaged)
            segment = open_segment(OsFileOps(), path, GEOMETRY, b"d" * 16)
            assert segment is not None and len(segment.entries) in {0, 4}

    assert tracemalloc.get_traced_memory()[1] < 64 * SEGMENT_BYTES
    tracemalloc.stop()
