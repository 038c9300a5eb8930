"""The Mooncake conversation trace over a small pool and a disk: it hits like a pool of the disk's size.

A page of one token stands for a block of 512 tokens of the trace; its token is the block's id.
`pytest -m '' --log-cli-level INFO tests/pure/test_tier_trace.py` says the figures, in two minutes.
"""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ramify.config import EngineConfig, resolve
from ramify.engine.core import EngineCore
from ramify.engine.tier_parts import TierParts
from ramify.kv.offload import Mover
from ramify.kv.stores.page_store import PageStore
from ramify.kv.stores.segment_format import Geometry
from ramify.params import SamplingParams
from ramify.step_cost import CostModel
from ramify.testing import FakeExecutor
from tests.pure.analysis.simulated_traces import MOONCAKE
from tests.pure.store_cases import opened
from tests.pure.tier_bench import ManualMover

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 512
POOL_PAGES, DISK_PAGES = 1_000_000 // BLOCK_TOKENS, 10_000_000 // BLOCK_TOKENS
PAGE_BYTES = FakeExecutor(1, 1).page_bytes
SEGMENT_BYTES = 256 << 10
QUESTION = 200_000  # a last token that no block has: the last token of a prompt is always computed
PARAMS = SamplingParams(max_tokens=1, ignore_eos=True)


class NoText:
    """Answers have no text."""

    def __init__(self, keep: bool | Sequence[str] = False) -> None:
        assert not keep

    def step(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Budget:
    """Room of the disk tier, and what was used of it at most."""

    directory: Path
    num_bytes: int

    def used(self) -> tuple[int, int]:
        """Disk blocks in bytes, and segment files."""
        sizes = [path.stat().st_blocks * 512 for path in self.directory.glob("*/*.seg")]
        return sum(sizes), len(sizes)


@dataclass(frozen=True, slots=True)
class Replay:
    """Figures of one replay of the trace."""

    hit_rate: float
    disk_share: float  # of the tokens: loaded from disk
    max_bytes: int
    max_files: int
    seconds: float


def trace() -> Iterator[list[int]]:
    """The prompts in the order of the trace, a token for each block."""
    with MOONCAKE.open() as file:
        for line in file:
            yield json.loads(line)["hash_ids"]


def engine(
    num_pages: int, policy: str, store: PageStore | None = None, mover: Mover | None = None
) -> EngineCore:
    """An engine over a fake device, with a store as its tier."""
    config = resolve(
        EngineConfig.of(
            kv_cache_tokens=num_pages, page_size=1, max_batch_tokens=512, policy=policy
        ),
        model_max_len=512,
        token_bytes=1,
        free_memory=0,
        window=None,
    )
    device = FakeExecutor(config.num_pages, 1, vocab_size=QUESTION + 1)
    return EngineCore(
        config,
        device,
        vocab_size=QUESTION + 1,
        eos_token_ids=[],
        detokenizer_factory=NoText,
        clock=lambda: 0.0,
        tiers=None
        if store is None or mover is None
        else TierParts(
            device=device,
            stores=(store,),
            mover=mover,
            step_model=CostModel(step_s=0.0, token_s=1.0, read_s=0.0),
        ),
    )


def answer(core: EngineCore, blocks: Sequence[int]) -> tuple[int, int]:
    """Answer one prompt; returns the tokens read from the pool, and those of them from the disk."""
    core.add_request([*blocks, QUESTION], PARAMS)
    read = loaded = 0
    while core.has_unfinished:
        for event in core.step():
            if event.output is not None:
                read = event.output.cache.read_tokens
                loaded = event.output.cache.tier_tokens.get("disk", 0)
    return read, loaded


def replay(core: EngineCore, mover: ManualMover | None, budget: Budget | None) -> Replay:
    """Answer every prompt of the trace, one after another, with idle moments between."""
    begin_s = time.perf_counter()
    total = read = loaded = max_bytes = max_files = 0
    for blocks in trace():
        hits, from_disk = answer(core, blocks)
        total, read, loaded = total + len(blocks), read + hits, loaded + from_disk
        if mover is not None and budget is not None:
            core.tend_tiers()
            mover.run_all()
            used_bytes, num_files = budget.used()
            max_bytes, max_files = max(max_bytes, used_bytes), max(max_files, num_files)
    seconds = time.perf_counter() - begin_s
    return Replay(read / total, loaded / total, max_bytes, max_files, seconds)


def replay_with_disk(directory: Path) -> tuple[Replay, Budget]:
    """A pool of 1 M tokens over a disk of 10 M."""
    num_segments = -(-DISK_PAGES // Geometry(PAGE_BYTES, SEGMENT_BYTES).num_slots)
    budget = Budget(directory, num_segments * SEGMENT_BYTES)
    store = opened(
        directory,
        page_bytes=PAGE_BYTES,
        segment_bytes=SEGMENT_BYTES,
        budget_bytes=budget.num_bytes,
    )
    mover = ManualMover([store])
    return replay(engine(POOL_PAGES, "auto", store, mover), mover, budget), budget


@pytest.mark.skipif(not MOONCAKE.exists(), reason=f"the Mooncake trace is not at {MOONCAKE}")
@pytest.mark.timeout(1800)
def test_a_small_pool_with_a_disk_hits_like_a_pool_of_the_disks_size(tmp_path: Path) -> None:
    """Within one point of the hit rate; files and disk blocks stay within the budget all the time."""
    large = replay(engine(DISK_PAGES, "lru"), None, None)
    small = replay(engine(POOL_PAGES, "lru"), None, None)
    tiered, budget = replay_with_disk(tmp_path)

    logger.info("large pool: %s\nsmall pool: %s\nwith a disk: %s", large, small, tiered)
    assert small.hit_rate < large.hit_rate - 0.05, "the trace needs more than the small pool"
    assert tiered.hit_rate > large.hit_rate - 0.01
    assert tiered.disk_share > 0.05
    assert tiered.max_bytes <= budget.num_bytes + SEGMENT_BYTES
    assert tiered.max_files <= budget.num_bytes // SEGMENT_BYTES + 2
