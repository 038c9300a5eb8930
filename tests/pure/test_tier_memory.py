"""A million pages between pool and disk: memory stays as it is, queues and staging buffers are bounded."""

import logging
import random
import time
from pathlib import Path

import pytest

from ramify.engine.core import EngineCore
from ramify.engine.tier_parts import STAGING_BYTES, StagingArea
from ramify.engine.tiering import EngineTiering
from ramify.kv.offload import MoverThreads
from ramify.kv.stores.segment_format import Geometry
from tests.budget import IS_FULL
from tests.pure.store_cases import opened
from tests.pure.test_tier_trace import PAGE_BYTES, answer, engine

logger = logging.getLogger(__name__)

NUM_TRANSFERS = 1_000_000 if IS_FULL else 10_000
SEGMENT_BYTES = 256 << 10
NUM_PROMPTS, PROMPT_PAGES, POOL_PAGES = 120, 40, 100
MAX_GROWTH_BYTES = 4 << 20
STATM_RESIDENT, STATM_UNIT = 1, 4096


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[STATM_RESIDENT]) * STATM_UNIT


def num_transfers(tiering: EngineTiering) -> int:
    """Pages that were handed to the writer, and pages that were loaded."""
    return tiering.counts.queued + sum(tiering.counts.loaded.values())


def check_bounds(tiering: EngineTiering, mover: MoverThreads) -> None:
    """No queue has more jobs than there are staging buffers."""
    num_buffers = tiering._area.ledger.num_buffers
    assert len(mover._writes) + len(mover._reads) <= num_buffers
    assert len(mover._results._results) <= num_buffers
    assert tiering.num_buffers_in_use <= num_buffers


def answer_until(core: EngineCore, mover: MoverThreads, rng: random.Random, count: int) -> None:
    """Answer random prompts until so many pages were transferred."""
    tiering = core.tiering
    assert tiering is not None
    while num_transfers(tiering) < count:
        first = rng.randrange(NUM_PROMPTS) * PROMPT_PAGES
        answer(core, range(first, first + PROMPT_PAGES))
        core.tend_tiers()
        check_bounds(tiering, mover)


@pytest.mark.timeout(3600)
def test_memory_is_flat_over_a_million_transfers(tmp_path: Path) -> None:
    """120 prompts, of which the pool holds two and the disk half: pages go out and come back all the time."""
    per_segment = Geometry(PAGE_BYTES, SEGMENT_BYTES).num_slots
    num_segments = NUM_PROMPTS * PROMPT_PAGES // 2 // per_segment
    store = opened(
        tmp_path,
        page_bytes=PAGE_BYTES,
        segment_bytes=SEGMENT_BYTES,
        budget_bytes=num_segments * SEGMENT_BYTES,
        clock=time.monotonic,
    )
    mover = MoverThreads([store])
    core = engine(POOL_PAGES, "lru", store, mover)
    rng = random.Random(1)

    answer_until(core, mover, rng, NUM_TRANSFERS // 5)
    early = resident_bytes()
    answer_until(core, mover, rng, NUM_TRANSFERS)
    late = resident_bytes()

    assert core.tiering is not None
    loaded = core.tiering.counts.loaded["disk"]
    logger.info(
        "%d transfers, %d of them loads: %.1f MB, then %.1f MB resident",
        num_transfers(core.tiering), loaded, early / 1e6, late / 1e6,
    )  # fmt: skip
    core.close()
    assert loaded > NUM_TRANSFERS // 5 and store.counts().evicted_pages > NUM_TRANSFERS // 10
    assert late - early < MAX_GROWTH_BYTES


def test_staging_is_at_most_64_mib_for_pages_up_to_16_mib() -> None:
    """Tiny pages get 1,024 buffers, the largest four."""
    for page_bytes, num_buffers in ((24, 1024), (368_640, 182), (2 << 20, 32), (16 << 20, 4)):
        area = StagingArea(page_bytes, STAGING_BYTES)

        assert area.ledger.num_buffers == num_buffers
        assert sum(view.nbytes for view in area.views) <= 64 << 20
