"""Pages, keys and small stores on disk for the tests of stores."""

import hashlib
import math
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ramify.kv.stores.file_ops import FileOps
from ramify.kv.stores.page_store import PageKey, PageStore, ReadOutcome, WriteOutcome
from ramify.kv.stores.segment_format import Geometry
from ramify.kv.stores.segment_options import SegmentOptions
from ramify.kv.stores.segments import SegmentStore
from ramify.kv.stores.store_identity import Value

PAGE_BYTES = 200
SEGMENT_BYTES = 16384
IDENTITY: dict[str, Value] = {
    "weights": "w1",
    "kv_dtype": "bfloat16",
    "page_size": 16,
    "threads": 2,
}


def hash_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def key(number: int, tenant: bytes = b"") -> PageKey:
    return PageKey(hash_of(number), hash_of(number - 1 if number else 2**63), tenant)


def page(number: int, num_bytes: int = PAGE_BYTES) -> memoryview:
    return memoryview(random.Random(number).randbytes(num_bytes))


def options(directory: Path, **changes: Any) -> SegmentOptions:
    values: dict[str, Any] = {
        "directory": directory,
        "identity": IDENTITY,
        "page_bytes": PAGE_BYTES,
        "budget_bytes": 8 * SEGMENT_BYTES,
        "segment_bytes": SEGMENT_BYTES,
    }
    return SegmentOptions(**{**values, **changes})


def opened(
    directory: Path,
    *,
    ops: FileOps | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    **changes: Any,
) -> SegmentStore:
    return SegmentStore(options(directory, **changes), ops=ops, clock=clock)


def slots_per_segment(page_bytes: int = PAGE_BYTES) -> int:
    return Geometry(page_bytes, SEGMENT_BYTES).num_slots


def put(store: PageStore, numbers: Iterable[int]) -> list[WriteOutcome]:
    numbers = list(numbers)
    pages = [page(number, store.page_bytes) for number in numbers]
    return store.put_many([key(number) for number in numbers], pages, deadline=math.inf)


def get(store: PageStore, number: int) -> ReadOutcome:
    """The outcome of reading a page; the bytes of a hit are the page's."""
    buffer = memoryview(bytearray(store.page_bytes))
    outcome = store.get_many([key(number)], [buffer], deadline=math.inf)[0]
    assert outcome is not ReadOutcome.HIT or bytes(buffer) == bytes(page(number, store.page_bytes))
    return outcome


def hits(store: PageStore, numbers: Iterable[int]) -> list[int]:
    """The pages that are read, and are right."""
    return [number for number in numbers if get(store, number)]


def segment_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*/*.seg"))


def crash(store: SegmentStore) -> None:
    """End a store as SIGKILL would: nothing is sealed, only the lock is freed."""
    store._directory.release()
    store._reader.files.close()
    if store._writer._fd >= 0:
        os.close(store._writer._fd)
