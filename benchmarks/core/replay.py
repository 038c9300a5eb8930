"""Replay a stream of requests on one core: time, memory and correctness of the hit pages."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from core.contract import Core, Make
from core.workloads import Request, small_and_tight

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Replay:
    """One run with a new cache; times in microseconds per request."""

    total_us: float
    match_us: float
    alloc_us: float  # with eviction
    insert_us: float
    p99_us: float
    slowest_us: float  # of all single calls
    peak_mb: float | None  # over the memory before the run; None where the system does not tell
    hits: list[int]  # tokens, per request


def replay(make: Make, num_tokens: int, requests: Sequence[Request]) -> Replay:
    """Serve all requests, one after the other, from an empty cache of `num_tokens`."""
    clock = time.perf_counter_ns
    before = _reset_peak_mb()
    core = make(num_tokens // PAGE_SIZE, PAGE_SIZE)
    spent: npt.NDArray[np.int64] = np.zeros((3, len(requests)), np.int64)
    hits: list[int] = []
    gc.collect()
    gc.freeze()  # as engines do after start-up; the collector stays on
    for at, (prompt, output) in enumerate(requests):
        request = core.prepare(prompt, output)
        t0 = clock()
        hit = core.match(request)
        t1 = clock()
        core.alloc(request)
        t2 = clock()
        core.insert(request)
        t3 = clock()
        spent[:, at] = t1 - t0, t2 - t1, t3 - t2
        hits.append(hit)
        del request  # what a request holds is freed off the clock
    after = _peak_mb()
    core.check()
    del core
    gc.unfreeze()
    gc.collect()
    mean = spent.mean(axis=1) / 1e3
    total = spent.sum(axis=0) / 1e3
    return Replay(
        total_us=float(total.mean()),
        match_us=float(mean[0]),
        alloc_us=float(mean[1]),
        insert_us=float(mean[2]),
        p99_us=float(np.percentile(total, 99)),
        slowest_us=float(spent.max()) / 1e3,
        peak_mb=None if before is None or after is None else after - before,
        hits=hits,
    )


def audit(make: Make, page_size: int = PAGE_SIZE, num_pages: int = 64) -> int:
    """Play the storage: every page of every hit must hold the tokens of the prompt.

    Returns:
        The number of hit pages that were compared.

    Raises:
        WrongPagesError: a hit names a page that holds something else.
    """
    core = make(num_pages, page_size)
    held: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)] * num_pages
    compared = 0
    for number, (prompt, output) in enumerate(small_and_tight(page_size)):
        request = core.prepare(prompt, output)
        hit = core.match(request)
        if hit % page_size or hit >= len(prompt):
            raise WrongPagesError(f"request {number}: {hit} of {len(prompt)} tokens hit")
        pages = core.read_pages(request)
        if len(pages) != hit // page_size:
            raise WrongPagesError(f"request {number}: {len(pages)} pages for {hit} tokens")
        for at, page in enumerate(pages):
            expected = prompt[at * page_size : (at + 1) * page_size]
            if not np.array_equal(held[page], expected):
                raise WrongPagesError(f"request {number}: page {page} at {at} has other tokens")
        compared += len(pages)
        core.alloc(request)
        core.insert(request)
        whole = np.concatenate([prompt, output])
        for at, page in enumerate(core.path_pages(request)):
            held[page] = whole[at * page_size : (at + 1) * page_size]
    core.check()
    return compared


class WrongPagesError(Exception):
    """A core returned pages whose K/V belongs to other tokens."""


def serve(core: Core, prompt: Any, output: Any) -> Any:
    """Run one request from start to end, untimed."""
    request = core.prepare(prompt, output)
    core.match(request)
    core.alloc(request)
    core.insert(request)
    return request


def resident_mb() -> float | None:
    """Resident memory of this process in MB, or None where the system does not report it."""
    return _status_mb("VmRSS:")


def _peak_mb() -> float | None:
    return _status_mb("VmHWM:")


def _reset_peak_mb() -> float | None:
    """Reset the peak memory counter to the memory in use now."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    return resident_mb()


def _status_mb(field: str) -> float | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field)), None)
