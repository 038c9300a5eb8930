"""Engines over a disk that fails: every request gets its answer, nothing leaks, and the engine ends."""

import errno
import random
import time
from pathlib import Path

import pytest

from ramify.cache.key import CacheKey
from ramify.errors import ConfigError
from ramify.testing import FakeExecutor
from tests.budget import IS_FULL
from tests.pure.engine_bench import expected
from tests.pure.file_faults import KINDS, FailingOps, always, no_fault, nth
from tests.pure.store_cases import SEGMENT_BYTES, opened
from tests.pure.test_segment_faults import FAULTS
from tests.pure.tier_bench import TierBench

PAGE_BYTES = FakeExecutor(1, 4).page_bytes
# 11 pages each: a pool of 16 pages holds one of them, two segments of the disk five.
PROMPTS = [[number] * 45 for number in range(1, 7)]


def disk_bench(directory: Path, ops: FailingOps) -> TierBench:
    """An engine whose pool holds one prompt, over a disk tier with room for five.

    Raises:
        ConfigError: the directory cannot be used.
    """
    store = opened(
        directory,
        ops=ops,
        page_bytes=PAGE_BYTES,
        budget_bytes=2 * SEGMENT_BYTES,
    )
    return TierBench(stores=[store], staging_bytes=32 * PAGE_BYTES)


def ask(bench: TierBench, prompts: list[list[int]]) -> int:
    """Answer prompts, each as an engine without a cache would; returns the tokens read from the tier."""
    num_loaded = 0
    for prompt in prompts:
        request_id = bench.answer(prompt, max_tokens=2)
        assert list(bench.outputs[request_id].token_ids) == expected(prompt, 2, ends=())
        num_loaded += bench.outputs[request_id].cache.tier_tokens.get("disk", 0)
        bench.settle()
        bench.check()
    return num_loaded


def end(bench: TierBench, ops: FailingOps) -> None:
    """Close an engine; it holds no staging buffer, no step of it has failed, and no file is open."""
    assert bench.tiering.num_buffers_in_use == 0
    assert bench.core.context.failures.failed_steps == 0
    bench.core.close()
    bench.stores[0].close()
    assert not ops.open_fds


def life(directory: Path, ops: FailingOps) -> int:
    """Two engines after each other on one directory; returns the tokens read from the disk."""
    num_loaded = 0
    for _ in range(2):
        try:
            bench = disk_bench(directory, ops)
        except ConfigError:
            assert not ops.open_fds
            continue
        num_loaded += ask(bench, [*PROMPTS, PROMPTS[4]])
        bench.core.cache.evict_if(lambda node: CacheKey(node.atoms).tokens()[0] == 5)
        bench.stores[0].maintain()
        num_loaded += ask(bench, PROMPTS[3:5])
        end(bench, ops)
    return num_loaded


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_requests_go_on_whichever_call_of_the_system_fails(tmp_path: Path, kind: str) -> None:
    """The n-th call of a kind fails, for a hundred n in a full run: answers are right, nothing leaks.

    `test_segment_faults` has every n for the store alone.
    """
    whole = FailingOps(no_fault)
    assert life(tmp_path / "whole", whole) > 100
    num_calls = whole.calls[kind]
    assert num_calls > 0

    for fault in FAULTS.get(kind, (errno.EIO,)):
        count = min(num_calls, 100 if IS_FULL else 5)
        for number in sorted(random.Random(kind).sample(range(num_calls), count)):
            ops = FailingOps(nth(kind, number, fault))
            life(tmp_path / f"{fault}-{number}", ops)
            assert ops.calls[kind] > number


def test_reads_that_do_not_return_cost_requests_their_patience_and_turn_the_tier_off() -> None:
    """Each request computes at its deadline; after three stuck reads nothing is read any more."""
    first = TierBench(disk_pages=500)
    ask(first, PROMPTS)
    first.core.close()
    bench = TierBench(
        stores=first.stores, works_in_wait=False, step_s=0.01, token_s=0.001, stuck_s=0.5
    )

    assert ask_without_reads(bench, PROMPTS[:3]) == 0
    late = bench.tiering.counts.loads_late
    patience_s = time.monotonic() + 20
    while bench.tiering.counts.stuck_reads < 3 and time.monotonic() < patience_s:
        bench.tiering.poll()

    assert (late, bench.tiering.counts.stuck_reads) == (3, 3)
    assert bench.tiering.reading_off == "3 reads did not return"
    assert ask_without_reads(bench, PROMPTS[3:5]) == 0
    assert bench.tiering.counts.loads == 3
    bench.settle()  # at last they return
    assert bench.tiering.num_buffers_in_use == 0
    bench.check()


def ask_without_reads(bench: TierBench, prompts: list[list[int]]) -> int:
    """Answer prompts that come together while nothing is read; returns the tokens read from the tier."""
    request_ids = [bench.add(prompt, max_tokens=2, ignore_eos=True) for prompt in prompts]
    bench.run()
    outputs = [bench.outputs[request_id] for request_id in request_ids]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == expected(prompt, 2, ends=())
    return sum(output.cache.tier_tokens.get("disk", 0) for output in outputs)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_takes_no_page_costs_no_request(tmp_path: Path, code: int) -> None:
    """Writing off, reading on, told by the metrics; a minute later it is tried again."""
    now = [0.0]
    ops = FailingOps(no_fault)
    store = opened(
        tmp_path,
        ops=ops,
        clock=lambda: now[0],
        page_bytes=PAGE_BYTES,
        budget_bytes=8 * SEGMENT_BYTES,
    )
    bench = TierBench(stores=[store], staging_bytes=32 * PAGE_BYTES)
    ask(bench, PROMPTS[:3])
    ops.plan = always("allocate write", code)

    num_loaded = ask(bench, [*PROMPTS[3:], *PROMPTS[:2]])
    full = bench.tiering.stats()["disk"]
    ops.plan, now[0] = no_fault, 61.0
    ask(bench, PROMPTS[3:])
    again = bench.tiering.stats()["disk"]

    assert num_loaded >= 44  # the first prompt was written whole
    assert (full.is_writable, full.is_available) == (0, 1)
    assert full.refused_pages == bench.tiering.totals()["unwritten_pages"] > 0
    assert again.is_writable == 1 and again.written_pages > full.written_pages
    end(bench, ops)


def test_a_failed_fsync_costs_pages_and_no_request(tmp_path: Path) -> None:
    """Its segment is gone and nothing more is written; what was synced before is read."""
    ops = FailingOps(no_fault)
    bench = disk_bench(tmp_path, ops)
    ask(bench, PROMPTS[:3])
    written = bench.tiering.stats()["disk"].pages
    ops.plan = always("datasync")

    ask(bench, [*PROMPTS[3:], *PROMPTS[:3]])

    stats = bench.tiering.stats()["disk"]
    assert stats.is_writable == 0 and stats.pages < written
    assert bench.tiering.reading_off == ""
    end(bench, ops)
